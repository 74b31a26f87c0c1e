"""Megatron's checkpoints: folded for stock Megatron and transformers, unfolded to train on.

Of a scheme of the residual addition, ``x + c * g * f(N(x))`` is Pre-LN with c * g in the rows of ``linear_proj`` and
``linear_fc2``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Callable

import torch

from olmo_lns.checkpoints.common_state import COMMON, COMMON_OBJECT, common_bytes
from olmo_lns.checkpoints.megatron import OWN, TRACKER, TRAINING, MegatronCheckpoint, is_megatron
from olmo_lns.checkpoints.tensors import ChunkFunction
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold, gemma2, huggingface
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Rounding, norm_factor, scaled
from olmo_lns.export.options import HF, MEGATRON, Options, Source, Target
from olmo_lns.export.reference import hooked_llama
from olmo_lns.integrations.megatron.addition import SLOTS
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED, Settings
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN

__all__ = ["Megatron"]

_ANY_GAIN = re.compile(r"(?:layer_norm_weight|norm\.weight)$")
_OUTPUT = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<holder>self_attention\.linear_proj|mlp\.linear_fc2)\.(?:weight|bias)$"
)


class Megatron(Source):
    name = "megatron"
    kind = "a Megatron checkpoint"
    formats = (MEGATRON, HF)

    def recognises(self, folder: Path) -> bool:
        return is_megatron(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        checkpoint = MegatronCheckpoint.open(folder)
        options.require_exponent(checkpoint.record, folder)
        if options.format == HF:
            return _for_transformers(checkpoint, options)
        if options.dtype is not None:
            raise LNSConfigError("--dtype is for --format hf: Megatron loads weights in the dtype of its own flags")
        if not checkpoint.record.active:
            state = "folded already" if checkpoint.record.folded else "Pre-LN"
            raise LNSConfigError(f"{folder} is {state}: there is nothing to fold")
        return _for_megatron(checkpoint, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        checkpoint = MegatronCheckpoint.open(folder)
        options.require_exponent(checkpoint.record, folder)
        record = fold.unfolded_record(checkpoint.record, checkpoint.folder)
        factor = norm_factor(record.scheme, int(checkpoint.args.num_layers))

        def write(out: Path) -> list[str]:
            changes: dict[str, Any] = {"layernorm_scaling": True, "layernorm_scaling_folded": False}
            changes["layernorm_scaling_exponent"] = record.scheme.parameters["exponent"]
            write_megatron(out, checkpoint, lambda number: 1 / factor(number), options, **changes)
            return [
                f"Megatron torch_dist, {record}: the factor is outside again",
                "warning: the optimizer's moments were dropped: load with --finetune and --layernorm-scaling",
            ]

        return Target(write)

    def train(self, folder: Path, options: Options) -> Target:
        checkpoint = MegatronCheckpoint.open(folder)
        model, weights = checkpoint.as_olmo()
        weights = scaled(weights, fold.inverse(model, checkpoint.record), options.rounding, options.dtype)
        stock = huggingface.of_olmo(model, weights, None, checkpoint.folder)
        return huggingface.train_target(stock, checkpoint.record, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        checkpoint = MegatronCheckpoint.open(folder)
        scheme = checkpoint.record.scheme if checkpoint.record.active else PRE_LN
        return hooked_llama(*checkpoint.as_olmo(), scheme=scheme)


def _for_megatron(checkpoint: MegatronCheckpoint, options: Options) -> Target:
    scheme, layers = checkpoint.record.scheme, int(checkpoint.args.num_layers)
    changes: dict[str, Any] = {"layernorm_scaling": False, "layernorm_scaling_folded": True}
    branches = None
    if checkpoint.addition.is_pre_ln:
        scale = norm_factor(scheme, layers)
        changes |= {"layernorm_scaling_exponent": scheme.parameters["exponent"]}
    else:
        _require_foldable(checkpoint)
        branches = _branch_functions(checkpoint, options.rounding)
        scale = lambda number: 1.0  # noqa: E731
        changes |= {"norm_scheme": "", "norm_scheme_folded": str(scheme)}
    flag = Settings.of_scheme(scheme).flag

    def write(out: Path) -> list[str]:
        write_megatron(out, checkpoint, scale, options, branches, **changes)
        lines = [f"Megatron torch_dist, {checkpoint.folder.name}: load it with --finetune, without {flag}"]
        if checkpoint.shift:
            lines.append("zero-centred gains were written as plain gains: run without --apply-layernorm-1p")
        return lines

    return Target(write)


def _for_transformers(checkpoint: MegatronCheckpoint, options: Options) -> Target:
    scheme, layers = checkpoint.addition, int(checkpoint.args.num_layers)
    gemma = gemma2.has_form(scheme, layers) and not scheme.is_pre_ln
    if not gemma:
        _require_foldable(checkpoint)
    model, weights = checkpoint.as_olmo()
    record = fold.fold_record(checkpoint.record)
    if gemma:
        stock = gemma2.stock(model, scheme, weights, options, None, checkpoint.folder)
    else:
        factors = fold.factors(model, checkpoint.record.scheme, weights) if checkpoint.record.active else {}
        gates = set(fold.gates(model))
        plain = {name: tensor for name, tensor in weights.items() if name not in gates}
        folded = scaled(plain, factors, options.rounding, options.dtype)
        stock = huggingface.of_olmo(model, folded, None, checkpoint.folder)
    return huggingface.export_target(stock, record, options)


def _require_foldable(checkpoint: MegatronCheckpoint) -> None:
    """:raises LNSConfigError: a scheme that no weights of a Pre-LN model can hold."""
    scheme = checkpoint.addition
    if problem := fold.obstacle(scheme, int(checkpoint.args.num_layers)):
        raise LNSConfigError(
            f"{checkpoint.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a Pre-LN model: {problem}"
        )


def write_megatron(
    out: Path,
    checkpoint: MegatronCheckpoint,
    scale: Callable[[int], float],
    options: Options,
    branches: dict[str, ChunkFunction] | None = None,
    **args: Any,
) -> None:
    """Write the model, block norms times ``scale``, without optimizer and training state.

    With ``branches``, functions of the output projections, what the residual additions own is left out.

    Zero-centred gains are written as plain gains: s·(1+g) - 1 would lose up to a percent in
    bf16. ``args`` are changes of the saved arguments.
    """
    shift, rounding = checkpoint.shift, options.rounding
    functions: dict[str, ChunkFunction] = {
        name: _scaler(name, layer, scale, rounding, shift if name.endswith("weight") else 0.0)
        for name, layer in checkpoint.sites()
    }
    functions |= branches or {}
    for name in set(checkpoint.names) - set(functions):
        functions[name] = _shifter(rounding, shift if _ANY_GAIN.search(name) else 0.0)
    kept = {key: value for key, value in checkpoint.common.items() if not TRAINING.match(key)}
    plain = {name: False for name in ZERO_CENTRED if hasattr(checkpoint.args, name)}
    changed = argparse.Namespace(**{**vars(checkpoint.args), **args, **plain})
    folder, common = out / checkpoint.folder.name, kept | {"args": changed}
    objects = {COMMON_OBJECT: common_bytes(common)}
    kept_names = {n for n in checkpoint.state.metadata.state_dict_metadata if not TRAINING.match(n)}
    kept_names -= {name for name in kept_names if branches is not None and OWN.match(name)}
    keep, max_bytes = kept_names.__contains__, options.shard_bytes
    checkpoint.state.rewrite(folder, keep, functions, max_bytes=max_bytes, objects=objects)
    copy_unread(checkpoint.folder / "metadata.json", folder / "metadata.json")
    if COMMON_OBJECT not in checkpoint.state.metadata.state_dict_metadata:
        torch.save(common, folder / COMMON)
    iteration = checkpoint.folder.name.removeprefix("iter_").lstrip("0") or "0"
    (out / TRACKER).write_text(iteration, encoding="utf-8")


def _scaler(name: str, layer: int | None, scale: Callable[[int], float], rounding: Rounding, shift: float) -> Any:
    """A function for :meth:`DistributedCheckpoint.rewrite` that multiplies each layer by its factor.

    :param scale: 1-based layer number -> factor. :param shift: what is added to a stored value.
    """

    def function(_: str, offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
        if layer is not None:
            return rounding.scale(name, chunk, scale(layer + 1), chunk.dtype, shift, in_place=True)
        for number, row in enumerate(chunk, offsets[0] + 1):
            rounding.scale(name, row, scale(number), row.dtype, shift, in_place=True)
        return chunk

    return function


def _shifter(rounding: Rounding, shift: float) -> ChunkFunction:
    return lambda name, _, chunk: rounding.scale(name, chunk, 1.0, chunk.dtype, shift, in_place=True)


def _branch_functions(checkpoint: MegatronCheckpoint, rounding: Rounding) -> dict[str, ChunkFunction]:
    """Name of each output projection -> what multiplies the rows of its chunks.

    :raises LNSConfigError: the branch of an MLP has several last matrices.
    """
    scheme, n_layers, tensors = checkpoint.record.scheme, int(checkpoint.args.num_layers), checkpoint.names
    found = {name: match for name in tensors if (match := _OUTPUT.match(name))}
    if not any("linear_fc2" in name for name in found) or any(".experts." in name for name in tensors):
        raise LNSConfigError(
            f"{scheme.definition.title} ({scheme}) is not folded into a mixture of experts, whose branch is a sum of "
            "several matrices: it runs in Megatron with olmo-lns"
        )

    def factor(index: int, sub_layer: str) -> float | torch.Tensor:
        plan = scheme.plan(index + 1, n_layers, sub_layer)
        if plan.gate is None:
            return plan.branch_scale
        return checkpoint.take(f"decoder.layers.{SLOTS[sub_layer]}.gate", index).load().double() * plan.branch_scale

    def function(name: str, match: re.Match[str]) -> ChunkFunction:
        sub_layer = "attn" if match["holder"].startswith("self_attention") else "ff"
        number = match["layer"]

        def of_layer(index: int, start: int, rows: torch.Tensor) -> torch.Tensor:
            value = factor(index, sub_layer)
            if not isinstance(value, float):
                value = value.expand(len(rows)) if len(value) == 1 else value[start : start + len(rows)]
            return rounding.scale(name, rows, value, rows.dtype, in_place=True)

        def scale(_: str, offsets: tuple[int, ...], chunk: torch.Tensor) -> torch.Tensor:
            if number is not None:
                return of_layer(int(number), offsets[0], chunk)
            for index, rows in enumerate(chunk, offsets[0]):
                of_layer(index, offsets[1], rows)
            return chunk

        return scale

    return {name: function(name, match) for name, match in found.items()}
