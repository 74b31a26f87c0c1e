"""Checkpoints as model folders of ours for transformers, their factors outside the weights: to train on there.

An unfolded checkpoint comes as it was trained; a folded one is unfolded on the way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.megatron import MegatronCheckpoint
from olmo_lns.checkpoints.olmo import OLMoCheckpoint
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold_schemes, huggingface, olmo_core_huggingface, tokenizer
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.options import Options, Target
from olmo_lns.integrations.transformers.families import FAMILIES
from olmo_lns.record import Record

__all__ = ["megatron_target", "olmo_core_target", "olmo_target"]


def olmo_target(folder: Path, options: Options) -> Target:
    """:raises LNSConfigError: Pre-LN, or a model or scheme that the transformers integration does not have."""
    checkpoint = OLMoCheckpoint.open(folder)
    identifier = (checkpoint.config.get("tokenizer") or {}).get("identifier")
    return _of_olmo(checkpoint.architecture, checkpoint.tensors, checkpoint.record, folder, identifier, options)


def megatron_target(folder: Path, options: Options) -> Target:
    """:raises LNSConfigError: as :func:`olmo_target`."""
    checkpoint = MegatronCheckpoint.open(folder)
    return _of_olmo(*checkpoint.as_olmo(), checkpoint.record, checkpoint.folder, None, options)


def olmo_core_target(folder: Path, options: Options) -> Target:
    """:raises LNSConfigError: as :func:`olmo_target`."""
    checkpoint = OLMoCoreCheckpoint.open(folder)
    record = _record(checkpoint.record, folder)
    values = olmo_core_huggingface.transformers_config(checkpoint, torch.float32, Record())
    _require_supported(values, record, folder)
    factors = checkpoint.factors_of(record.scheme) if checkpoint.record.folded else {}
    weights = olmo_core_huggingface.to_huggingface(
        checkpoint, scaled(checkpoint.tensors, _inverse(factors), options.rounding, options.dtype)
    )
    identifier = ((checkpoint.config.get("dataset") or {}).get("tokenizer") or {}).get("identifier")
    return _target(values, weights, record, folder, identifier, options, folded=checkpoint.record.folded)


def _of_olmo(
    model: Architecture,
    weights: Mapping[str, LazyTensor],
    saved: Record,
    folder: Path,
    identifier: str | None,
    options: Options,
) -> Target:
    """:param weights: OLMo's names."""
    record = _record(saved, folder)
    values = huggingface.transformers_config(model, torch.float32, Record())
    _require_supported(values, record, folder)
    factors = fold_schemes.factors(model, record.scheme, weights) if saved.folded else {}
    renamed = huggingface.to_huggingface(model, scaled(weights, _inverse(factors), options.rounding, options.dtype))
    return _target(values, renamed, record, folder, identifier, options, folded=saved.folded)


def _record(saved: Record, folder: Path) -> Record:
    """What the folder will say of its weights."""
    if saved.scheme.is_pre_ln:
        raise LNSConfigError(f"{folder} is Pre-LN: olmo-lns export --format hf makes a stock model of it")
    return Record(saved.scheme, saved.norm, saved.scaled_init)


def _require_supported(values: Mapping[str, Any], record: Record, folder: Path) -> None:
    """:raises LNSConfigError: an unknown family, or a scheme that its blocks cannot realise."""
    from olmo_lns.integrations.transformers.sites import require_supported

    family = FAMILIES.get(str(values["model_type"]))
    if family is None or family.sub_layers is None:
        raise LNSConfigError(
            f"{folder}: becomes a {values['model_type']} model, which the transformers integration does not know"
        )
    require_supported(family, record.scheme, int(values["num_hidden_layers"]))


def _inverse(factors: Mapping[str, Factor]) -> dict[str, Factor]:
    """The integration's schemes have no learned gate, so every factor is a number."""
    return {name: 1 / factor for name, factor in factors.items() if isinstance(factor, float) and factor != 1.0}


def _target(
    values: dict[str, Any],
    weights: Mapping[str, LazyTensor],
    record: Record,
    folder: Path,
    identifier: str | None,
    options: Options,
    *,
    folded: bool,
) -> Target:
    """:param values: of the stock config, but for the dtype. :param weights: transformers' names, unfolded."""

    def write(out: Path) -> list[str]:
        from olmo_lns.integrations.transformers.configs import config_class

        stock = {name: value for name, value in values.items() if name != "model_type"}
        stock["torch_dtype"] = str(huggingface.dominant_dtype(weights)).removeprefix("torch.")
        family = FAMILIES[str(values["model_type"])]
        config = config_class(family)(**stock, lns_record=replace(record, folded=False).as_dict())
        config.architectures = [f"LNS{name}" for name in values["architectures"]]
        note = tokenizer.write_tokenizer(out, options.tokenizer or identifier, config=stock, beside=folder)
        huggingface.write_huggingface(out, weights, stock, max_shard_bytes=options.max_shard_size)
        config.save_pretrained(out)
        state = "unfolded: the factors are outside again" if folded else "as trained, factors outside the weights"
        return [f"{config.model_type}: {record}", state, note]

    return write
