"""What ``olmo-lns export`` does with an OLMo checkpoint, for each format."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns import __version__
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import huggingface, tokenizer
from olmo_lns.export.architecture import Architecture
from olmo_lns.export.fold import LazyTensor, Rounding
from olmo_lns.export.olmo import OLMoCheckpoint, copy_trainer_state, write_olmo
from olmo_lns.record import LNSRecord

__all__ = ["fold_record", "huggingface_job", "olmo_job"]


def fold_record(record: LNSRecord) -> LNSRecord:
    """The record of the same weights with the factor inside."""
    return replace(record, folded=record.folded or record.active, plugin_version=__version__)


def olmo_job(
    checkpoint: OLMoCheckpoint, args: argparse.Namespace, dtype: torch.dtype | None, rounding: Rounding
) -> Callable[[Path], list[str]]:
    """:raises LNSConfigError: the format cannot hold this model, or there is nothing to fold."""
    record, model = fold_record(checkpoint.record), checkpoint.architecture
    if checkpoint.record.active and model.norm_after:
        raise LNSConfigError(
            f"{checkpoint.folder}: LNS with norm_after (post-norm blocks) is not a model that can be folded"
        )
    if args.format == "megatron":
        raise LNSConfigError(
            f"{checkpoint.folder} is an OLMo checkpoint: --format megatron is for Megatron checkpoints"
        )
    if args.format == "hf":
        weights = checkpoint.plain(rounding, dtype)
        identifier = args.tokenizer or (checkpoint.config.get("tokenizer") or {}).get("identifier")
        return huggingface_job(model, weights, record, args, identifier, checkpoint.folder)
    if not checkpoint.record.active:
        state = "folded already" if checkpoint.record.folded else "Pre-LN"
        raise LNSConfigError(
            f"{checkpoint.folder} is {state}: there is nothing to fold, and stock OLMo runs it as it is"
        )

    def job(out: Path) -> list[str]:
        factors = checkpoint.factors()
        layout = "unsharded" if args.format == "olmo-unsharded" else checkpoint.layout
        layer_norm_type = model.base_norm
        write_olmo(
            out,
            checkpoint,
            factors,
            record,
            layer_norm_type=layer_norm_type,
            rounding=rounding,
            dtype=dtype,
            layout=layout,
        )
        copy_trainer_state(checkpoint, out, layout)
        into = "gains and biases of the block norms" if model.layer_norm_with_affine else "projections after the norms"
        return [
            f"OLMo, {layout}, layer_norm_type {layer_norm_type}: {model.n_layers} factors folded into the {into}",
            "the optimizer's state is left out: its moments belong to the unfolded weights",
        ]

    return job


def huggingface_job(
    model: Architecture,
    weights: Mapping[str, LazyTensor],
    record: LNSRecord,
    args: argparse.Namespace,
    identifier: str | None,
    beside: Path,
) -> Callable[[Path], list[str]]:
    """:param weights: OLMo's names, already folded.
    :raises LNSConfigError: no transformers class computes this model.
    """
    name, why = huggingface.choose_class(model)
    renamed = huggingface.to_huggingface(model, weights)
    config: dict[str, Any] = huggingface.transformers_config(model, huggingface.dominant_dtype(renamed), record)

    def job(out: Path) -> list[str]:
        lines = [f"{name}: {why}", f"lns: {'folded' if record.folded else 'none (a Pre-LN model)'}"]
        if identifier is None or identifier == tokenizer.NONE:
            lines.append("no tokenizer: give --tokenizer to include one")
        else:
            lines.append(tokenizer.write_tokenizer(out, identifier, config=config, beside=beside))
        huggingface.write_huggingface(out, renamed, config, max_shard_bytes=args.max_shard_size)
        return lines

    return job
