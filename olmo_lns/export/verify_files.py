"""Whether an export holds what folding its checkpoint anew gives: weights, and what of its config changes a function.

Logits alone do not tell: a weight off by a thousandth, or an eps or a tied embedding that somebody changed, can hide in
what rounding costs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.olmo import OLMoCheckpoint, is_olmo
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core
from olmo_lns.checkpoints.shards import read_weights
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.options import HF, OLMO, OLMO_CORE, Options, Source
from olmo_lns.export.tokenizer import NONE
from olmo_lns.export.transformers_folder import is_ours
from olmo_lns.record import Record

__all__ = ["differences"]

#: Settings that change no function of a model that is evaluated.
_NEUTRAL = {
    HF: {
        *("transformers_version", "_name_or_path", "architectures", "auto_map", "use_cache", "return_dict"),
        *("initializer_range", "dtype", "torch_dtype", "lns", "lns_record", "lns_factors"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp"),
    },
    OLMO: {
        *("init_fn", "init_std", "init_cutoff_factor", "init_device", "scale_emb_init", "emb_init_std", "precision"),
        *("attention_dropout", "residual_dropout", "embedding_dropout", "flash_attention"),
        *("eos_token_id", "pad_token_id"),
    },
    OLMO_CORE: {"init_method", "init_seed", "init_std", "embedding_init_std"},
}


def differences(source: Source, checkpoint: Path, export: Path, exported: Record | None) -> tuple[int, list[str]]:
    """The number of weights that were compared, and what differs, a line each.

    A weight may be off by one rounding to its dtype from the product in float64; by two in a folder of ours, which
    may have been folded and unfolded.

    :param source: of the checkpoint. :param exported: what the export says of itself.
    :raises LNSConfigError: the checkpoint is not written as what the export is.
    """
    form = OLMO_CORE if is_olmo_core(export) else OLMO if is_olmo(export) else HF
    if form not in source.formats:
        raise LNSConfigError(f"{export}: {source.kind} is not written as {form}: it is the export of something else")
    exponent = exported.scheme.parameters.get("exponent") if exported is not None and source.name == "authors" else None
    options = Options(str(export), form, torch.float64, exponent, NONE)
    unfolded = form == HF and is_ours(export)
    target = (source.train if unfolded else source.fold)(checkpoint, options)
    config, weights = _found(export, form)
    lines = _of_configs(_comparable(target.config, form), config)
    if form == HF:
        lines += _of_dtype(export, weights)
    tied = {"lm_head.weight"} if target.config.get("tie_word_embeddings") else set()
    for problem, names in (
        ("lacks", set(target.weights) - set(weights)),
        ("has", set(weights) - set(target.weights) - tied),
    ):
        lines += [f"the export {problem} the weight {name}" for name in sorted(names)]
    shared = [name for name in target.weights if name in weights]
    for name in shared:
        lines += _of_weights(name, target.weights[name], weights[name], 2 if unfolded else 1)
    return len(shared), lines


def _found(export: Path, form: str) -> tuple[dict[str, Any], Mapping[str, LazyTensor]]:
    """Config, made comparable, and weights of an export."""
    if form == OLMO_CORE:
        core = OLMoCoreCheckpoint.open(export)
        return _comparable(core.model, form), core.tensors
    if form == OLMO:
        olmo = OLMoCheckpoint.open(export)
        return _comparable(olmo.config["model"], form), olmo.tensors
    return _comparable(_json(export), form), read_weights(export)


def _json(export: Path) -> dict[str, Any]:
    return dict(json.loads((export / "config.json").read_text(encoding="utf-8")))


def _comparable(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Every setting with its default, as the framework itself reads it; but for the neutral ones."""
    if form == OLMO:
        values = vars(Architecture.from_config(config, "config.yaml"))
        return {name: value for name, value in values.items() if name not in _NEUTRAL[OLMO]}
    if form == OLMO_CORE:
        flat = _flat(config)
        return {name: value for name, value in flat.items() if name.split(".")[0] not in _NEUTRAL[OLMO_CORE]}
    from transformers import AutoConfig

    from olmo_lns.integrations.transformers import register

    register()
    values = {name: value for name, value in config.items() if name != "model_type"}
    known = AutoConfig.for_model(config["model_type"], **values).to_dict()
    return _flat({name: value for name, value in known.items() if name not in _NEUTRAL[HF]})


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """``{"rope_parameters.rope_theta": 1e4}`` of what is nested."""
    if isinstance(value, Mapping) and value:
        dot = f"{name}." if name else ""
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{dot}{part}").items()}
    return {name: list(value) if isinstance(value, tuple) else value}


def _of_configs(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    none = object()
    return [
        f"config: {name} is {found.get(name, 'missing')!r}, expected {expected.get(name, 'nothing')!r}"
        for name in sorted({*expected, *found})
        if expected.get(name, none) != found.get(name, none)
    ]


def _of_dtype(export: Path, weights: Mapping[str, LazyTensor]) -> list[str]:
    """What transformers computes in, against what is stored."""
    config = _json(export)
    said = config.get("dtype", config.get("torch_dtype"))
    stored = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    return [f"config: dtype is {said}, the weights are {' and '.join(sorted(stored))}"] * (said not in {None, *stored})


def _of_weights(name: str, expected: LazyTensor, found: LazyTensor, roundings: int) -> list[str]:
    if tuple(expected.shape) != tuple(found.shape):
        return [f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    exact, values, kind = expected.load().double(), found.load(), torch.finfo(found.dtype)
    allowed = exact.abs() * (roundings * kind.eps / 2 * (1 + 2**-10)) + kind.smallest_normal * kind.eps
    off = ~((values.double() - exact).abs() <= allowed)  # so that NaN is off
    if not off.any():
        return []
    first = tuple(int(axis) for axis in off.nonzero()[0])
    return [
        f"{name}: {int(off.sum())} of {off.numel()} values are not the checkpoint's, folded: "
        f"{values[first].item():.8g} at {list(first)}, expected {exact[first].item():.8g}"
    ]
