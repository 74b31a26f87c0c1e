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

from olmo_lns.checkpoints.megatron import (
    COMMON,
    COMMON_OBJECT,
    GAIN,
    OWN,
    TRACKER,
    TRAINING,
    Absent,
    MegatronCheckpoint,
    common_bytes,
    is_megatron,
)
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, MEGATRON, fold, huggingface
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor
from olmo_lns.export.sources import Options, PlannedExport, Source, Stock, nothing_to_fold
from olmo_lns.integrations.megatron.settings import SLOTS, ZERO_CENTRED, Settings
from olmo_lns.record import Record
from olmo_lns.schemes import PRE_LN, Scheme

_OUTPUT = re.compile(
    r"decoder\.layers\.(?:(?P<layer>\d+)\.)?(?P<holder>self_attention\.linear_proj|mlp\.linear_fc2)\.(?:weight|bias)$"
)


class Megatron(Source):
    name = "megatron"
    kind = "a Megatron checkpoint"
    formats = (MEGATRON, HF)
    checkpoint = MegatronCheckpoint
    recognises = staticmethod(is_megatron)

    def stock(self, checkpoint: MegatronCheckpoint, options: Options, *, trained: bool = False) -> Stock:
        record, folder, layers = checkpoint.record, checkpoint.folder, int(checkpoint.args.num_layers)
        if record.active and not trained and not huggingface.is_gemma2(record.scheme, layers):
            fold.require_foldable(record.scheme, layers, folder)  # before weights that it may lack are asked for
        model, weights = checkpoint.as_olmo()
        return huggingface.stock_of(model, weights, record, options, None, folder, trained=trained)

    def folded(self, checkpoint: MegatronCheckpoint, options: Options) -> PlannedExport:
        if options.dtype is not None:
            raise LNSConfigError("--dtype is for --format hf: Megatron loads weights in the dtype of its own flags")
        if not checkpoint.record.active:
            raise nothing_to_fold(checkpoint.record, checkpoint.folder)
        scheme = checkpoint.record.scheme
        changes: dict[str, Any] = {"layernorm_scaling": False, "layernorm_scaling_folded": True}
        factors = _of_norms(checkpoint, scheme)
        if checkpoint.addition.is_pre_ln:
            changes |= {"layernorm_scaling_exponent": scheme.parameters["exponent"]}
        else:
            fold.require_foldable(scheme, int(checkpoint.args.num_layers), checkpoint.folder)
            factors |= _of_branches(checkpoint, scheme)
            changes |= {"norm_scheme": "", "norm_scheme_folded": str(scheme)}
        flag = Settings.of_scheme(scheme).flag

        def write(out: Path) -> list[str]:
            _write(out, checkpoint, factors, options, **changes)
            lines = [f"Megatron torch_dist, {checkpoint.folder.name}: load it with --finetune, without {flag}"]
            if checkpoint.shift:
                lines.append("zero-centred gains were written as plain gains: run without --apply-layernorm-1p")
            return lines

        return PlannedExport(write)

    def unfolded(self, checkpoint: MegatronCheckpoint, options: Options) -> PlannedExport:
        record = fold.unfolded_record(checkpoint.record, checkpoint.folder, int(checkpoint.args.num_layers))
        inverse: dict[str, Factor] = {name: 1 / by for name, by in _of_norms(checkpoint, record.scheme).items()}
        changes: dict[str, Any] = {"layernorm_scaling": True, "layernorm_scaling_folded": False}
        changes["layernorm_scaling_exponent"] = record.scheme.parameters["exponent"]

        def write(out: Path) -> list[str]:
            _write(out, checkpoint, inverse, options, **changes)
            return [
                f"Megatron torch_dist, {record}: the factor is outside again",
                "warning: the optimizer's moments were dropped: load with --finetune and --layernorm-scaling",
            ]

        return PlannedExport(write)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        checkpoint = MegatronCheckpoint.open(folder)
        scheme = checkpoint.record.scheme if checkpoint.record.active else PRE_LN
        return huggingface.hooked_llama(*checkpoint.as_olmo(), scheme=scheme)


def _write(
    out: Path, checkpoint: MegatronCheckpoint, factors: dict[str, Factor], options: Options, **args: Any
) -> None:
    """Write the model, multiplied by ``factors``, without optimizer, training state and what residual additions own.

    Zero-centred gains are written as plain gains: s·(1+g) - 1 would lose up to a percent in bf16.

    :param factors: stored name -> factor. :param args: changes of the saved arguments.
    """
    if absent := [name for name, value in vars(checkpoint.args).items() if isinstance(value, Absent)]:
        raise LNSConfigError(
            f"{checkpoint.folder}: the saved argument {absent[0]} is of a class of Megatron Core's, which is not "
            "installed here and could not be written: install megatron-core, or export with --format hf"
        )
    shift = checkpoint.shift
    edits = {
        name: options.rounding.edit(name, factors.get(name, 1.0), shift=shift if GAIN.search(name) else 0.0)
        for name in checkpoint.names
    }
    kept = {key: value for key, value in checkpoint.common.items() if not TRAINING.match(key)}
    plain = {name: False for name in ZERO_CENTRED if hasattr(checkpoint.args, name)}
    common = kept | {"args": argparse.Namespace(**{**vars(checkpoint.args), **args, **plain})}
    folder = out / checkpoint.folder.name
    checkpoint.state.rewrite(
        folder,
        lambda name: not TRAINING.match(name) and not OWN.match(name),
        edits,
        max_bytes=options.shard_bytes,
        objects={COMMON_OBJECT: common_bytes(common)},
    )
    copy_unread(checkpoint.folder / "metadata.json", folder / "metadata.json")
    if COMMON_OBJECT not in checkpoint.state.metadata.state_dict_metadata:
        torch.save(common, folder / COMMON)
    iteration = checkpoint.folder.name.removeprefix("iter_").lstrip("0") or "0"
    (out / TRACKER).write_text(iteration, encoding="utf-8")


def _stacked(checkpoint: MegatronCheckpoint, layer: int | None, value: Callable[[int], Factor]) -> Factor:
    """``value`` of the 0-based ``layer``; for None, a tensor that stacks all layers, one value for each of its rows."""
    if layer is not None:
        return value(layer)
    layers = range(int(checkpoint.args.num_layers))
    stacked = torch.stack([torch.as_tensor(value(index), dtype=torch.float64) for index in layers])
    return stacked if bool((stacked != 1.0).any()) else 1.0


def _of_norms(checkpoint: MegatronCheckpoint, scheme: Scheme) -> dict[str, Factor]:
    """Stored name of a parameter of a block norm -> its factor."""
    layers = int(checkpoint.args.num_layers)
    return {
        name: _stacked(checkpoint, layer, lambda i, sub=sub_layer: scheme.plan(i + 1, layers, sub).norm_scale)  # type: ignore[misc]
        for name, layer, sub_layer in checkpoint.sites()
    }


def _of_branches(checkpoint: MegatronCheckpoint, scheme: Scheme) -> dict[str, Factor]:
    """Stored name of an output projection -> what its rows are multiplied by.

    :raises LNSConfigError: the branch of an MLP has several last matrices.
    """
    layers, found = int(checkpoint.args.num_layers), [m for name in checkpoint.names if (m := _OUTPUT.match(name))]
    if not any("linear_fc2" in m.string for m in found) or any(".experts." in name for name in checkpoint.names):
        raise LNSConfigError(
            f"{scheme.definition.title} ({scheme}) is not folded into a mixture of experts, whose branch is a sum of "
            "several matrices: it runs in Megatron with olmo-lns"
        )

    def factor(match: re.Match[str], index: int) -> Factor:
        sub_layer = "attn" if match["holder"].startswith("self_attention") else "ff"
        plan = scheme.plan(index + 1, layers, sub_layer)
        if plan.gate is None:
            return plan.branch_scale
        gate = checkpoint.take(f"decoder.layers.{SLOTS[sub_layer]}.gate", index).load().double()
        return (gate * plan.branch_scale).expand(int(checkpoint.args.hidden_size))

    return {
        m.string: _stacked(checkpoint, int(m["layer"]) if m["layer"] else None, lambda i, m=m: factor(m, i))  # type: ignore[misc]
        for m in found
    }
