"""Megatron checkpoints written with the factor folded into their norms, and what else is made of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Callable

import torch

from olmo_lns.checkpoints.common_state import COMMON, COMMON_OBJECT, common_bytes
from olmo_lns.checkpoints.megatron import TRACKER, TRAINING, MegatronCheckpoint
from olmo_lns.checkpoints.megatron_architecture import ZERO_CENTRED
from olmo_lns.checkpoints.megatron_schemes import OWN
from olmo_lns.checkpoints.tensors import ChunkFunction
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold_schemes, gemma2
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, Rounding, norm_factor, scaled
from olmo_lns.export.from_olmo import fold_record, gemma2_target, huggingface_target
from olmo_lns.export.megatron_schemes import branch_functions
from olmo_lns.export.options import HF, Options, Target
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.schemes import PRE_LN

__all__ = ["target", "write_megatron"]

_ANY_GAIN = re.compile(r"(?:layer_norm_weight|norm\.weight)$")


def _scaler(name: str, layer: int | None, scale: Callable[[int], float], rounding: Rounding, shift: float) -> Any:
    """A function for :meth:`DistributedCheckpoint.rewrite` that multiplies each layer by its factor.

    :param scale: 1-based layer number -> factor. :param shift: what is added to a stored value.
    """

    def function(_: str, offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
        if layer is not None:
            return rounding.scale(name, chunk, scale(layer + 1), chunk.dtype, shift)
        numbers = range(offsets[0] + 1, offsets[0] + 1 + len(chunk))
        return torch.stack(
            [rounding.scale(name, r, scale(n), r.dtype, shift) for n, r in zip(numbers, chunk, strict=True)]
        )

    return function


def write_megatron(
    out: Path,
    checkpoint: MegatronCheckpoint,
    scale: Callable[[int], float],
    rounding: Rounding,
    branches: dict[str, ChunkFunction] | None = None,
    **args: Any,
) -> None:
    """Write the model, block norms times ``scale``, without optimizer and training state.

    With ``branches``, functions of the output projections, what the residual additions own is left out.

    Zero-centred gains are written as plain gains: s·(1+g) - 1 would lose up to a percent in
    bf16. ``args`` are changes of the saved arguments.
    """
    shift = checkpoint.shift
    functions: dict[str, ChunkFunction] = {
        name: _scaler(name, layer, scale, rounding, shift if name.endswith("weight") else 0.0)
        for name, layer in checkpoint.sites()
    }
    functions |= branches or {}
    if shift:
        for name in checkpoint.names:
            if _ANY_GAIN.search(name) and name not in functions:
                functions[name] = lambda n, _, chunk: rounding.scale(n, chunk, 1.0, chunk.dtype, 1.0)
    kept = {key: value for key, value in checkpoint.common.items() if not TRAINING.match(key)}
    plain = {name: False for name in ZERO_CENTRED if hasattr(checkpoint.args, name)}
    changed = argparse.Namespace(**{**vars(checkpoint.args), **args, **plain})
    folder, common = out / checkpoint.folder.name, kept | {"args": changed}
    objects = {COMMON_OBJECT: common_bytes(common)}
    kept_names = {n for n in checkpoint.state.metadata.state_dict_metadata if not TRAINING.match(n)}
    kept_names -= {name for name in kept_names if branches is not None and OWN.match(name)}
    checkpoint.state.rewrite(folder, kept_names.__contains__, functions, objects)
    copy_unread(checkpoint.folder / "metadata.json", folder / "metadata.json")
    if COMMON_OBJECT not in checkpoint.state.metadata.state_dict_metadata:
        torch.save(common, folder / COMMON)
    iteration = checkpoint.folder.name.removeprefix("iter_").lstrip("0") or "0"
    (out / TRACKER).write_text(iteration, encoding="utf-8")


def target(source: Path, options: Options) -> Target:
    """``olmo-lns export`` from a Megatron checkpoint.

    :raises LNSConfigError: refused.
    """
    checkpoint = MegatronCheckpoint.open(source)
    options.require_exponent(checkpoint.record, source)
    if options.format == HF:
        return _transformers_target(checkpoint, options)
    if options.dtype is not None:
        raise LNSConfigError("--dtype is for --format hf: Megatron loads weights in the dtype of its own flags")
    if not checkpoint.record.active:
        state = "folded already" if checkpoint.record.folded else "Pre-LN"
        raise LNSConfigError(f"{source} is {state}: there is nothing to fold")
    return _megatron_target(checkpoint, options)


def _megatron_target(checkpoint: MegatronCheckpoint, options: Options) -> Target:
    scheme, layers = checkpoint.record.scheme, int(checkpoint.args.num_layers)
    changes: dict[str, Any] = {"layernorm_scaling": False, "layernorm_scaling_folded": True}
    branches = None
    if checkpoint.addition.is_pre_ln:
        scale = norm_factor(scheme, layers)
        changes |= {"layernorm_scaling_exponent": scheme.parameters["exponent"]}
    else:
        _require_foldable(checkpoint)
        branches = branch_functions(scheme, layers, checkpoint.names, checkpoint.take, options.rounding)
        scale = lambda number: 1.0  # noqa: E731
        changes |= {"norm_scheme": "", "norm_scheme_folded": str(scheme)}
    flag = Settings.of_scheme(scheme).flag

    def write(out: Path) -> list[str]:
        write_megatron(out, checkpoint, scale, options.rounding, branches, **changes)
        lines = [f"Megatron torch_dist, {checkpoint.folder.name}: load it with --finetune, without {flag}"]
        if checkpoint.shift:
            lines.append("zero-centred gains were written as plain gains: run without --apply-layernorm-1p")
        return lines

    return write


def _transformers_target(checkpoint: MegatronCheckpoint, options: Options) -> Target:
    scheme = checkpoint.addition
    gemma = gemma2.has_form(scheme, int(checkpoint.args.num_layers)) and not scheme.is_pre_ln
    if not gemma:
        _require_foldable(checkpoint)
    model, weights = checkpoint.as_olmo()
    record = fold_record(checkpoint.record)
    if gemma and fold_schemes.obstacle(scheme, model.n_layers):
        return gemma2_target(model, scheme, weights, record, options, options.tokenizer, checkpoint.folder)
    if scheme.is_pre_ln:
        factor = norm_factor(checkpoint.record.scheme if checkpoint.record.active else PRE_LN, model.n_layers)
        factors: dict[str, Factor] = {
            name: factor(index + 1) for index in range(model.n_layers) for name in model.sites(index)
        }
    else:
        factors = fold_schemes.factors(model, scheme, weights)
        gates = set(fold_schemes.gates(model))
        weights = {name: tensor for name, tensor in weights.items() if name not in gates}
    plain = scaled(weights, factors, options.rounding, options.dtype)
    return huggingface_target(model, plain, record, options, options.tokenizer, checkpoint.folder)


def _require_foldable(checkpoint: MegatronCheckpoint) -> None:
    """:raises LNSConfigError: a scheme that no weights of a Pre-LN model can hold."""
    scheme = checkpoint.addition
    if problem := fold_schemes.obstacle(scheme, int(checkpoint.args.num_layers)):
        raise LNSConfigError(
            f"{checkpoint.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a Pre-LN model: {problem}"
        )
