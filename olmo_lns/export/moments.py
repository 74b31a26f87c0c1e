"""Adam's moments of a folded model, rescaled for the unfolded one.

A gain ``g`` of the folded model is ``s·w``, so ``w = g/s`` and the gradient by ``w`` is ``s`` times the gradient by
``g``: the first moment is multiplied by ``s``, the second by ``s²``. Without gains the same holds for the projections
after the norms.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from olmo_lns.checkpoints.archive import map_tensors
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import Rounding, chunk_scaler

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

__all__ = ["MOMENT_POWERS", "moment_functions", "rescaled"]

#: Optimizer state of a parameter -> the power of the factor by which it is multiplied.
MOMENT_POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "grad_norm_exp_avg": 1, "step": 0}
#: Of these every parameter that was trained has one; the rest is kept by some optimizers for some parameters.
_OF_EVERY_PARAMETER = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
#: What wrappers put into a parameter's name: DDP in front of all, FSDP and torch.compile anywhere.
_WRAPPERS = re.compile(r"^module\.|\b(?:_fsdp_wrapped_module|_orig_mod)\.")
_SHARDED_STATE = re.compile(r"optim\.state\.(?P<parameter>.+)\.(?P<moment>[a-z_]+)$")


def rescaled(
    state: Any, path: Path, scales: Mapping[str, float], rounding: Rounding, canonical: Mapping[str, str]
) -> tuple[Any, int]:
    """An optimizer's state dict with the moments of the scaled parameters multiplied; and their number.

    :param scales: parameter -> factor. :param canonical: name of a parameter as stored -> its name in ``scales``.
    :raises LNSConfigError: moments that are missing, not named, or of a kind whose scaling is unknown.
    """
    try:
        names = {
            i: n for group in state["param_groups"] for i, n in zip(group["params"], group["param_names"], strict=True)
        }
        moments = state["state"]
    except (KeyError, TypeError, ValueError):
        raise LNSConfigError(f"{path} does not name its parameters: give --drop-optimizer") from None
    known_as = {_unwrapped(stored): name for stored, name in canonical.items()}
    found: dict[str, set[str]] = {}

    def rescale(keys: tuple[Any, ...], tensor: LazyTensor) -> LazyTensor:
        name, moment = str(names.get(keys[0], keys[0])), str(keys[-1])
        known = known_as.get(_unwrapped(name), name)
        found.setdefault(known, set()).add(moment)
        if known not in scales or (power := _power(moment, path)) == 0:
            return tensor
        return rounding.folded(f"{name}.{moment}", tensor, scales[known] ** power, tensor.dtype)

    return state | {"state": map_tensors(moments, rescale)}, _counted(found, scales, path)


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
    known_as = {_unwrapped(name): known for name, known in (canonical or {}).items()}
    functions: dict[str, ChunkFunction] = {}
    found: dict[str, set[str]] = {}
    for name in stored.names:
        if not (match := _SHARDED_STATE.match(name)):
            continue
        known = known_as.get(_unwrapped(match["parameter"]), match["parameter"])
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
