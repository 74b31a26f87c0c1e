"""The inverse: divide the factor out of folded weights, to continue training under LNS.

The function stays the same. A gain ``g`` of the folded model is ``s·w``, so ``w = g/s`` and the
gradient by ``w`` is ``s`` times the gradient by ``g``: Adam's first moment is multiplied by ``s``,
its second by ``s²``. Without gains the same holds for the projections after the norms.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns import __version__
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.archive import check_archive, map_tensors, read_archive, write_archive
from olmo_lns.export.distributed import ChunkFunction
from olmo_lns.export.fold import LazyTensor, Rounding
from olmo_lns.export.megatron import MegatronCheckpoint
from olmo_lns.export.olmo import SHARDED, OLMoCheckpoint, chunk_scaler, copy_trainer_state, write_olmo
from olmo_lns.record import LNSRecord
from olmo_lns.scale import DEFAULT_EXPONENT, lns_scale

__all__ = ["MOMENT_POWERS", "job"]

#: Optimizer state of a parameter -> the power of the factor by which it is multiplied.
MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "grad_norm_exp_avg": 1, "step": 0}
_OPTIMIZER = "optim.pt"
_SHARDED_STATE = re.compile(r"optim\.state\.(?P<parameter>.+)\.(?P<moment>[a-z_]+)$")


def job(source: Path, kind: str, args: argparse.Namespace, rounding: Rounding) -> Callable[[Path], list[str]]:
    """``olmo-lns export --unfold``.

    :raises LNSConfigError: not folded, or Pre-LN and not asked to convert it.
    """
    if args.dtype != "keep":
        raise LNSConfigError("--unfold keeps the dtype of the checkpoint: training continues from it")
    if kind == "megatron":
        return _megatron_job(MegatronCheckpoint.open(source), args, rounding)
    if kind != "olmo":
        raise LNSConfigError(f"--unfold reads OLMo and Megatron checkpoints, not --source {kind}")
    checkpoint = OLMoCheckpoint.open(source)
    record = _target(checkpoint.record, f"lns_{checkpoint.architecture.base_norm}", args, source)
    scales = checkpoint.factors(record.exponent)

    def write(out: Path) -> list[str]:
        factors = {name: 1 / scale for name, scale in scales.items()}
        lines = [f"{record.type} (exponent {record.exponent:g}), {checkpoint.layout}: the factor is outside again"]
        note, moments = _optimizer(checkpoint, scales, rounding, out, drop=args.drop_optimizer)
        write_olmo(out, checkpoint, factors, record, layer_norm_type=record.type, rounding=rounding, extra=moments)
        if not copy_trainer_state(checkpoint, out, checkpoint.layout):
            note += "; no trainer state either: also --reset_trainer_state"
        return [*lines, note, *_consequence(checkpoint.record)]

    return write


def _target(saved: LNSRecord, kind: str, args: argparse.Namespace, source: Path) -> LNSRecord:
    """The record of the unfolded weights."""
    if saved.folded:
        if args.exponent not in (None, saved.exponent):
            raise LNSConfigError(f"{source} was folded with exponent {saved.exponent:g}, not {args.exponent:g}")
        return replace(saved, folded=False, plugin_version=__version__)
    if saved.active:
        raise LNSConfigError(f"{source} is not folded: it can be trained on under LNS as it is")
    if not args.convert_preln:
        raise LNSConfigError(
            f"{source} is Pre-LN and never was LNS. --convert-preln divides the gains by the factor, so that the model "
            "computes the same under LNS; but the gain of block l then starts at sqrt(l) times its value, deep blocks "
            "get smaller gradients than before, and nothing in the paper says that this trains well"
        )
    exponent = DEFAULT_EXPONENT if args.exponent is None else args.exponent
    return LNSRecord.lns(kind, exponent, scaled_init=saved.scaled_init)


def _consequence(saved: LNSRecord) -> list[str]:
    if saved.folded:
        return []
    return [
        "converted from Pre-LN: same function, other training dynamics; not a model trained with LNS from the start"
    ]


def _optimizer(
    checkpoint: OLMoCheckpoint, scales: Mapping[str, float], rounding: Rounding, out: Path, *, drop: bool
) -> tuple[str, dict[str, ChunkFunction] | None]:
    """Write ``optim.pt``, or return what to do with a sharded state; with one line for the report."""
    reset = "start training with --reset_optimizer_state"
    if drop:
        return f"warning: the optimizer's moments were dropped as asked: {reset}", None
    if checkpoint.layout == "sharded":
        functions = _sharded_moments(checkpoint, scales, rounding)
        if not functions:
            return f"warning: the checkpoint holds no optimizer state: {reset}", None
        return f"{len(functions)} moments of the optimizer rescaled to match", functions
    path = checkpoint.folder / _OPTIMIZER
    if not path.is_file():
        return f"warning: the checkpoint holds no optimizer state: {reset}", None
    check_archive(path)
    state, count = _rescaled(read_archive(path), checkpoint, scales, rounding)
    write_archive(out / _OPTIMIZER, state)
    return f"{count} moments of the optimizer rescaled to match", None


def _rescaled(
    state: Any, checkpoint: OLMoCheckpoint, scales: Mapping[str, float], rounding: Rounding
) -> tuple[Any, int]:
    """``optim.pt`` with the moments of the scaled parameters multiplied; and their number."""
    path = checkpoint.folder / _OPTIMIZER
    try:
        names = {
            i: n for group in state["param_groups"] for i, n in zip(group["params"], group["param_names"], strict=True)
        }
        moments = state["state"]
    except (KeyError, TypeError, ValueError):
        raise LNSConfigError(f"{path} does not name its parameters: give --drop-optimizer") from None
    canonical = {stored: name for name, stored in checkpoint.stored_names.items()}
    count = 0

    def rescale(keys: tuple[Any, ...], tensor: LazyTensor) -> LazyTensor:
        nonlocal count
        name = names.get(keys[0], keys[0])
        scale = scales.get(canonical.get(str(name).replace("_fsdp_wrapped_module.", ""), ""))
        if scale is None or (power := _power(str(keys[-1]), path)) == 0:
            return tensor
        count += 1
        return rounding.folded(f"{name}.{keys[-1]}", tensor, scale**power, tensor.dtype)

    return state | {"state": map_tensors(moments, rescale)}, count


def _sharded_moments(
    checkpoint: OLMoCheckpoint, scales: Mapping[str, float], rounding: Rounding
) -> dict[str, ChunkFunction]:
    folder = checkpoint.folder / SHARDED
    canonical = {stored.removeprefix("model."): name for name, stored in checkpoint.stored_names.items()}
    functions: dict[str, ChunkFunction] = {}
    for stored in checkpoint.sharded.names:
        match = _SHARDED_STATE.match(stored)
        scale = scales.get(canonical.get(match["parameter"], "")) if match else None
        if match and scale and (power := _power(match["moment"], folder)):
            functions[stored] = chunk_scaler(stored, scale**power, rounding, None)
    return functions


def _power(moment: str, path: Path) -> int:
    if moment not in MOMENT_POWERS:
        raise LNSConfigError(
            f"{path} holds optimizer state {moment!r}, whose scaling is unknown: give --drop-optimizer"
        )
    return MOMENT_POWERS[moment]


def _megatron_job(
    checkpoint: MegatronCheckpoint, args: argparse.Namespace, rounding: Rounding
) -> Callable[[Path], list[str]]:
    record = _target(checkpoint.record, "lns", args, checkpoint.folder)

    def write(out: Path) -> list[str]:
        changes = {"layernorm_scaling": True, "layernorm_scaling_folded": False}
        changes |= {"layernorm_scaling_exponent": record.exponent}  # type: ignore[dict-item]
        checkpoint.write(out, lambda number: 1 / lns_scale(number, exponent=record.exponent), rounding, **changes)
        return [
            f"Megatron torch_dist, LNS (exponent {record.exponent:g}): the factor is outside again",
            "warning: the optimizer's moments were dropped: load with --finetune and --layernorm-scaling",
            *_consequence(checkpoint.record),
        ]

    return write
