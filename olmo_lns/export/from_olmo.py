"""What an OLMo checkpoint becomes, in each format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.olmo import OLMoCheckpoint
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold_schemes, gemma2, huggingface, tokenizer
from olmo_lns.export.fold import Factor
from olmo_lns.export.olmo import NewCheckpoint, folding, plain
from olmo_lns.export.options import HF, OLMO_UNSHARDED, Options, Target
from olmo_lns.integrations.olmo import types
from olmo_lns.record import Record
from olmo_lns.schemes import Scheme

__all__ = ["fold_record", "gemma2_target", "huggingface_target", "olmo_target"]


def fold_record(record: Record) -> Record:
    """The record of the same weights with the factor inside."""
    return replace(record, folded=record.folded or record.active, plugin_version=__version__)


def olmo_target(source: Path, options: Options) -> Target:
    """:raises LNSConfigError: the format cannot hold this model, or there is nothing to fold."""
    checkpoint = OLMoCheckpoint.open(source, exponent=options.exponent)
    options.require_exponent(checkpoint.record, source)
    record, model = fold_record(checkpoint.record), checkpoint.architecture
    if checkpoint.record.active and model.norm_after:
        raise LNSConfigError(
            f"{checkpoint.folder}: LNS with norm_after (post-norm blocks) is not a model that can be folded"
        )
    scheme = checkpoint.record.scheme
    if checkpoint.record.active and fold_schemes.obstacle(scheme, model.n_layers):
        if options.format == HF and gemma2.has_form(scheme, model.n_layers):
            return _gemma2_target(checkpoint, record, options)
        if options.format != HF:
            return _unfolded_target(checkpoint, options)
    if options.format == HF:
        weights = plain(checkpoint, options.rounding, options.dtype)
        identifier = options.tokenizer or (checkpoint.config.get("tokenizer") or {}).get("identifier")
        return huggingface_target(model, weights, record, options, identifier, checkpoint.folder)
    if not checkpoint.record.active and model.init_fn not in types.INIT_FNS:
        state = "folded already" if checkpoint.record.folded else "Pre-LN"
        raise LNSConfigError(
            f"{checkpoint.folder} is {state}: there is nothing to fold, and stock OLMo runs it as it is"
        )

    def write(out: Path) -> list[str]:
        new = _in_olmos_format(checkpoint, record, model.base_norm, options, folding(checkpoint))
        new.write(out)
        return _in_words(new)

    return write


def _in_words(new: NewCheckpoint) -> list[str]:
    """What became of a checkpoint that stock OLMo runs."""
    model, scheme = new.source.architecture, new.record.scheme
    lines = [f"OLMo, {new.layout}, layer_norm_type {model.base_norm}: "]
    if new.source.record.active:
        into = "gains and biases of the block norms" if model.layer_norm_with_affine else "projections after the norms"
        into = into if scheme.keeps_forward(model.n_layers) else "rows of attn_out and ff_out"
        lines[0] += f"{model.n_layers} factors folded into the {into}"
        lines.append("the optimizer's state is left out: its moments belong to the unfolded weights")
    else:
        lines[0] += "there was nothing to fold"
        lines.append("the optimizer's state is left out")
    if model.init_fn in types.INIT_FNS:
        lines.append(
            f"init_fn {model.init_fn}, which stock OLMo does not know, is called normal: the weights are drawn"
        )
    return lines


def _unfolded_target(checkpoint: OLMoCheckpoint, options: Options) -> Target:
    """OLMo's own format, with its scheme: layout and dtype may change, the model does not."""
    record, model = replace(checkpoint.record, plugin_version=__version__), checkpoint.architecture
    problem = fold_schemes.obstacle(record.scheme, model.n_layers)

    def write(out: Path) -> list[str]:
        new = _in_olmos_format(checkpoint, record, types.spell(record.scheme, model.base_norm), options, {})
        new.write(out)
        what = f"OLMo, {new.layout}, layer_norm_type {new.layer_norm_type}"
        return [f"{what}: not folded ({problem}); it runs in OLMo with olmo-lns only"]

    return write


def _in_olmos_format(
    checkpoint: OLMoCheckpoint, record: Record, kind: str, options: Options, factors: Mapping[str, Factor]
) -> NewCheckpoint:
    layout = "unsharded" if options.format == OLMO_UNSHARDED else checkpoint.layout
    return NewCheckpoint(checkpoint, record, kind, layout, options.rounding, factors, options.dtype)


def _gemma2_target(checkpoint: OLMoCheckpoint, record: Record, options: Options) -> Target:
    identifier = options.tokenizer or (checkpoint.config.get("tokenizer") or {}).get("identifier")
    scheme = checkpoint.record.scheme
    return gemma2_target(
        checkpoint.architecture, scheme, checkpoint.tensors, record, options, identifier, checkpoint.folder
    )


def gemma2_target(
    model: Architecture,
    scheme: Scheme,
    tensors: Mapping[str, LazyTensor],
    record: Record,
    options: Options,
    identifier: str | None,
    beside: Path,
) -> Target:
    """:param tensors: OLMo's names, the scheme's own among them.
    :raises LNSConfigError: Gemma 2 does not compute this model.
    """
    weights = gemma2.renamed(model, scheme, tensors, options.rounding, options.dtype)
    config = gemma2.transformers_config(model, huggingface.dominant_dtype(weights), record)
    why = f"its blocks have the four norms of {scheme.definition.title}"
    return _transformers_target(why, weights, config, options, identifier, beside)


def huggingface_target(
    model: Architecture,
    weights: Mapping[str, LazyTensor],
    record: Record,
    options: Options,
    identifier: str | None,
    beside: Path,
) -> Target:
    """:param weights: OLMo's names, already folded.
    :raises LNSConfigError: no transformers class computes this model.
    """
    _, why = huggingface.choose_class(model)
    renamed = huggingface.to_huggingface(model, weights)
    config: dict[str, Any] = huggingface.transformers_config(model, huggingface.dominant_dtype(renamed), record)
    return _transformers_target(why, renamed, config, options, identifier, beside)


def _transformers_target(
    why: str,
    weights: Mapping[str, LazyTensor],
    config: dict[str, Any],
    options: Options,
    identifier: str | None,
    beside: Path,
) -> Target:
    def write(out: Path) -> list[str]:
        (name,) = config["architectures"]
        lines = [f"{name}: {why}", f"lns: {'folded' if 'lns' in config else 'none (a Pre-LN model)'}"]
        lines.append(tokenizer.write_tokenizer(out, identifier, config=config, beside=beside))
        huggingface.write_huggingface(out, weights, config, max_shard_bytes=options.max_shard_size)
        return lines

    return write
