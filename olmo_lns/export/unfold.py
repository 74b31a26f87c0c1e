"""The inverse: divide the factor out of folded weights, to continue training under LNS.

The function stays the same. A gain ``g`` of the folded model is ``s·w``, so ``w = g/s`` and the
gradient by ``w`` is ``s`` times the gradient by ``g``: Adam's first moment is multiplied by ``s``,
its second by ``s²``. Without gains the same holds for the projections after the norms.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints.archive import map_tensors, read_archive, write_archive
from olmo_lns.checkpoints.megatron import MegatronCheckpoint
from olmo_lns.checkpoints.olmo import SHARDED, OLMoCheckpoint
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import Rounding, norm_factor
from olmo_lns.export.megatron import write_megatron
from olmo_lns.export.olmo import NewCheckpoint, chunk_scaler, factors_of
from olmo_lns.export.options import Options, Target
from olmo_lns.integrations.olmo import types
from olmo_lns.record import Record

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

__all__ = ["MOMENT_POWERS", "megatron_target", "moment_functions", "olmo_target", "unfolded_record"]

#: Optimizer state of a parameter -> the power of the factor by which it is multiplied.
MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "grad_norm_exp_avg": 1, "step": 0}
#: Of these every parameter that was trained has one; the rest is kept by some optimizers for some parameters.
_OF_EVERY_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
#: What wrappers put into a parameter's name: DDP in front of all, FSDP and torch.compile anywhere.
_WRAPPERS = re.compile(r"^module\.|\b(?:_fsdp_wrapped_module|_orig_mod)\.")
_OPTIMIZER = "optim.pt"
_SHARDED_STATE = re.compile(r"optim\.state\.(?P<parameter>.+)\.(?P<moment>[a-z_]+)$")


def olmo_target(source: Path, options: Options) -> Target:
    """``olmo-lns export --unfold`` of an OLMo checkpoint.

    :raises LNSConfigError: not folded.
    """
    checkpoint = OLMoCheckpoint.open(source)
    base = checkpoint.architecture.base_norm
    record = unfolded_record(checkpoint.record, options, source)
    scales, layer_norm_type = factors_of(checkpoint, record.scheme), types.spell(record.scheme, base)
    _check_name(options.output, checkpoint.layout)

    def write(out: Path) -> list[str]:
        factors = {name: 1 / scale for name, scale in scales.items()}
        lines = [f"{record}, {checkpoint.layout}: the factor is outside again"]
        note, moments = _optimizer(checkpoint, scales, options.rounding, out, drop=options.drop_optimizer)
        new = NewCheckpoint(
            checkpoint, record, layer_norm_type, checkpoint.layout, options.rounding, factors, moments=moments
        )
        if not new.write(out):
            note += "; no trainer state either: also --reset_trainer_state"
        return [*lines, note]

    return write


def _check_name(output: str, layout: str) -> None:
    """OLMo's ``--load_path`` tells the layout by the folder's name alone.

    :raises LNSConfigError: it would take this one for the other layout.
    """
    name = os.path.basename(os.path.normpath(output))
    if name.endswith("-unsharded") != (layout == "unsharded"):
        better = f"{name}-unsharded" if layout == "unsharded" else name.removesuffix("-unsharded") or "lns"
        raise LNSConfigError(
            f"{output}: OLMo takes a --load_path for unsharded when its name ends in -unsharded, and only then; this "
            f"checkpoint is {layout}: call it {better}"
        )


def unfolded_record(saved: Record, options: Options, source: Path) -> Record:
    """The record of the unfolded weights."""
    if saved.folded:
        options.require_exponent(saved, source)
        return replace(saved, folded=False, plugin_version=__version__)
    if saved.active:
        raise LNSConfigError(f"{source} is not folded: it can be trained on under LNS as it is")
    raise LNSConfigError(
        f"{source} is Pre-LN and never was LNS: there is no factor to take out, and a new label makes no LNS model"
    )


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
    state, count = _rescaled(read_archive(path), checkpoint, scales, rounding)
    write_archive(out / _OPTIMIZER, state)
    if not count:
        return "the optimizer has no moments yet: it was saved before its first step", None
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
    canonical = {_unwrapped(stored): name for name, stored in checkpoint.stored_names.items()}
    found: dict[str, set[str]] = {}

    def rescale(keys: tuple[Any, ...], tensor: LazyTensor) -> LazyTensor:
        name, moment = str(names.get(keys[0], keys[0])), str(keys[-1])
        known = canonical.get(_unwrapped(name), name)
        found.setdefault(known, set()).add(moment)
        if known not in scales or (power := _power(moment, path)) == 0:
            return tensor
        return rounding.folded(f"{name}.{moment}", tensor, scales[known] ** power, tensor.dtype)

    rescaled = map_tensors(moments, rescale)
    return state | {"state": rescaled}, _counted(found, scales, path)


def _sharded_moments(
    checkpoint: OLMoCheckpoint, scales: Mapping[str, float], rounding: Rounding
) -> dict[str, ChunkFunction]:
    canonical = {_unwrapped(stored): name for name, stored in checkpoint.stored_names.items()}
    return moment_functions(checkpoint.sharded, checkpoint.folder / SHARDED, scales, rounding, canonical)


def moment_functions(
    stored: DistributedCheckpoint,
    folder: Path,
    scales: Mapping[str, float],
    rounding: Rounding,
    canonical: Mapping[str, str] | None = None,
) -> dict[str, ChunkFunction]:
    """Name of a stored moment -> what to do with its chunks, for the parameters in ``scales``.

    :param canonical: name of a parameter as stored -> its name in ``scales``, where they differ.
    :raises LNSConfigError: moments that are missing, or of a kind whose scaling is unknown.
    """
    functions: dict[str, ChunkFunction] = {}
    found: dict[str, set[str]] = {}
    for name in stored.names:
        if not (match := _SHARDED_STATE.match(name)):
            continue
        known = (canonical or {}).get(_unwrapped(match["parameter"]), match["parameter"])
        found.setdefault(known, set()).add(match["moment"])
        if known in scales and (power := _power(match["moment"], folder)):
            functions[name] = chunk_scaler(name, scales[known] ** power, rounding, None)
    _counted(found, scales, folder)
    return functions


def _unwrapped(name: str) -> str:
    """A parameter's name in the model itself."""
    return _WRAPPERS.sub("", name.removeprefix("model."))


def _counted(found: Mapping[str, set[str]], scales: Mapping[str, float], path: Path) -> int:
    """Number of moments that are rescaled; 0 where no parameter has any.

    :param found: parameter -> the moments that its state holds.
    :raises LNSConfigError: a scaled parameter lacks one that other parameters have.
    """
    if not found:
        return 0
    expected = _OF_EVERY_PARAMETER & {moment for moments in found.values() for moment in moments}
    if lacking := sorted(name for name in scales if not expected <= found.get(name, set()) or not expected):
        raise LNSConfigError(
            f"{path}: found the moments of {len(scales) - len(lacking)} of the {len(scales)} parameters to rescale, "
            f"none or not all of {lacking[0]}'s (it names {min(found, default='no parameter')}, …): training would go "
            "on with moments of another scale; give --drop-optimizer to leave the optimizer's state out"
        )
    return sum(1 for name in scales for moment in found[name] if _power(moment, path))


def _power(moment: str, path: Path) -> int:
    if moment not in MOMENT_POWERS:
        raise LNSConfigError(
            f"{path} holds optimizer state {moment!r}, whose scaling is unknown: give --drop-optimizer"
        )
    return MOMENT_POWERS[moment]


def megatron_target(source: Path, options: Options) -> Target:
    """``olmo-lns export --unfold`` of a Megatron checkpoint.

    :raises LNSConfigError: not folded.
    """
    checkpoint = MegatronCheckpoint.open(source)
    record = unfolded_record(checkpoint.record, options, checkpoint.folder)
    factor = norm_factor(record.scheme, int(checkpoint.args.num_layers))

    def write(out: Path) -> list[str]:
        changes: dict[str, Any] = {"layernorm_scaling": True, "layernorm_scaling_folded": False}
        changes["layernorm_scaling_exponent"] = record.scheme.parameters["exponent"]
        write_megatron(out, checkpoint, lambda number: 1 / factor(number), options.rounding, **changes)
        return [
            f"Megatron torch_dist, {record}: the factor is outside again",
            "warning: the optimizer's moments were dropped: load with --finetune and --layernorm-scaling",
        ]

    return write
