"""Write a receipt beside an export: a file that records what the trained model computed.

It is not enough to compare an export with its checkpoint. If a version of transformers misreads the export, it misreads
the checkpoint in the same way. Both then agree, and both are wrong. The receipt has logits that the trained model
computed for fixed tokens before the fold, and the rotary frequencies, dtypes and tying of the export. An export can be
compared with it in another version of transformers, and without the checkpoint.

Other software ignores the file. transformers, vLLM, llama.cpp, OLMo and OLMo-core open only files with names of their
own or with the endings ``.safetensors``, ``.bin``, ``.pt``, ``.gguf``, ``.distcp``, ``.py`` and ``.jinja``.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF
from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.export.prompts import logits, prompt
from olmo_lns.export.saved_weights import SavedWeights

#: Name of the file.
RECEIPT_FILE = "export_receipt.json"
#: Largest logit difference in fp32, relative to the largest logit.
TOLERANCE = 1e-5
#: Largest relative difference of two rotary frequencies.
_ROTARY_TOLERANCE = 1e-4
#: Number of prompts, their length, and the number of tokens whose logits are recorded. These tokens are evenly spaced
#: in the vocabulary.
_PROMPTS, _LENGTH, _TOKENS = 4, 32, 64


def measure_trained(opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the entries of a receipt that have to be recorded before the fold.

    These are the scheme of the model and its logits for fixed prompts, computed in fp32.

    :param dtype: dtype of the export; None keeps those of the checkpoint.
    :returns: the entries. ``rounding`` is the largest difference between the logits in fp32 and the logits of the same,
        unfolded model in the dtype of the export. If the model cannot run on this machine, as some mixtures of experts
        that need a GPU, ``not_run`` gives the reason, and there are no logits. Any other error of its forward, such
        as one for lack of memory, is raised.
    """
    model: Any = opened.model
    dtype = dtype or opened.dtype
    entries: dict[str, Any] = {"scheme": str(opened.scheme)}
    dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
    try:
        inputs = prompt(model, _PROMPTS, min(_LENGTH, opened.max_length))
        in_dtype = model if dtype is None or {*dtypes.values()} == {dtype} else copy.deepcopy(model).to(dtype)
        rounded = logits(in_dtype, inputs).double()
        del in_dtype
        values = logits(model.float(), inputs)
    except (RuntimeError, ImportError) as error:
        if not _lacks_kernel(error, model):
            raise
        return entries | {"not_run": f"{type(error).__name__}: {error}"}
    finally:  # exact: every value of the narrower dtype is one of fp32
        for parameter, saved in dtypes.items():
            parameter.data = parameter.data.to(saved)
    kept = torch.linspace(0, values.shape[-1] - 1, min(_TOKENS, values.shape[-1])).long().unique()
    entries |= {"tokens": kept.tolist(), "logits": values[..., kept].tolist(), "largest": float(values.abs().max())}
    entries["rounding"] = float((rounded - values.double()).abs().max())
    return entries | {"prompt": None if inputs.is_floating_point() else inputs.tolist()}


def _lacks_kernel(error: Exception, model: nn.Module) -> bool:
    """Return true if a model did not run because this machine, or torch's CPU code, has no kernel for an operation.

    PyTorch raises NotImplementedError for an operation without a kernel, and a RuntimeError that says so for a dtype. A
    kernel for GPUs that gets a tensor on the CPU names the device that it expects.
    """
    if isinstance(error, (ImportError, NotImplementedError)):
        return True
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return (
        on_cpu
        and re.search(r"\b(cuda|gpu|xpu)\b|not implemented for|not supported on cpu", str(error), re.I) is not None
    )


def write(entries: dict[str, Any], stock: OpenCheckpoint, folder: Path) -> None:
    """Write the receipt of an export.

    :param entries: the result of :func:`measure_trained`.
    :param stock: the exported model.
    :raises LNSConfigError: if the logits of the exported model differ from those of the checkpoint by more than
        rounding.
    """
    if "logits" in entries:
        error, allowed = _largest_difference(entries, stock.model), _allowed(entries)
        if not error <= allowed:
            raise LNSConfigError(
                f"{stock.folder}: the logits of the exported model differ from those of the checkpoint by {error:.1e}. "
                f"Rounding explains at most {allowed:.1e}, and the largest logit is {entries['largest']:.1e}. Pass "
                "--dtype fp32. If the error remains, report it."
            )
    entries = {"exported_with": _versions(), **entries, **_measure_export(stock, folder)}
    (folder / RECEIPT_FILE).write_text(json.dumps(entries), encoding="utf-8")


def read(folder: Path) -> dict[str, Any] | None:
    """Return the receipt beside an export, or None if there is none.

    :raises LNSConfigError: if the file is damaged.
    """
    path = folder / RECEIPT_FILE
    if not path.is_file():
        return None
    try:
        entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "rounding" not in entries and "not_run" not in entries:
            raise KeyError("rounding")
        return {"scheme": entries["scheme"], **entries}
    except (ValueError, KeyError, TypeError) as error:
        raise LNSConfigError(
            f"{path} is damaged ({type(error).__name__}). Expected the file that olmo-lns export wrote. Export again, "
            "or remove the file to compare with the checkpoint only."
        ) from None


def compare(entries: dict[str, Any], exported: OpenCheckpoint) -> tuple[list[str], list[str]]:
    """Compare an export with its receipt.

    :param entries: the receipt.
    :param exported: the export, as the installed version of its framework has loaded it.
    :returns: lines for the user, and a line for each difference.
    """
    found = _measure_export(exported, exported.folder)
    wrong = [
        f"{name}: found {found[name]}, the exporter wrote {entries[name]}"
        for name in ("dtypes", "tied")
        if found[name] != entries.get(name)
    ]
    if not _same_rotary(found["rotary"], entries.get("rotary")):
        wrong.append(
            f"rotary embedding: transformers {_versions().get('transformers')} computes other frequencies "
            f"({_shown(found['rotary'])}) than the exporter ({_shown(entries.get('rotary'))})"
        )
    if "logits" not in entries:
        return [
            f"the model did not run where it was exported, so the receipt has no logits ({entries['not_run']})"
        ], wrong
    difference, allowed = _largest_difference(entries, exported.model), _allowed(entries)
    if not difference <= allowed:
        wrong.append(f"logits: they differ by {difference:.3e} from the exporter's, allowed {allowed:.3e}")
    return [f"from the exporter's     {difference:.3e} (allowed {allowed:.3e}; {_names(entries)})"], wrong


def compare_checkpoint(entries: dict[str, Any], model: nn.Module) -> list[str]:
    """Return a line if the checkpoint now computes other logits in fp32 than when it was exported, or else no line."""
    if "logits" not in entries:
        return []
    difference, allowed = _largest_difference(entries, model), TOLERANCE * entries["largest"]
    if difference <= allowed:
        return []
    return [
        f"checkpoint: as it is loaded here ({_names({'exported_with': _versions()})}), its logits differ by "
        f"{difference:.3e} from those at its export ({_names(entries)}). Its files changed, or a version here misreads "
        "them. `olmo-lns verify EXPORT` checks the export alone."
    ]


def _measure_export(stock: OpenCheckpoint, folder: Path) -> dict[str, Any]:
    """Return the dtypes of an export, and for transformers also its tying and its rotary frequencies."""
    dtypes = {str(tensor.dtype) for tensor in stock.model.parameters()}
    entries: dict[str, Any] = {"dtypes": sorted(name.removeprefix("torch.") for name in dtypes)}
    if stock.format != HF:
        return entries | {"tied": None, "rotary": None}
    saved = {str(dtype) for dtype in SavedWeights(folder).dtypes.values()}
    entries["dtypes"] = sorted(name.removeprefix("torch.") for name in saved)
    model: Any = stock.model
    return entries | {"tied": bool(getattr(model.config, "tie_word_embeddings", False)), "rotary": _rotary(model)}


def _rotary(model: nn.Module) -> list[list[float]]:
    """Return all different rows of rotary frequencies in a transformers model, in radians per position."""
    rows: set[tuple[float, ...]] = set()
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            rows.add(tuple(float(f"{value:.6g}") for value in buffer.float().flatten().tolist()))
    return [list(row) for row in sorted(rows)]


def _same_rotary(found: Any, expected: Any) -> bool:
    """Return true if two results of :func:`_rotary` are equal. An empty result equals only another empty one."""
    if found is None or expected is None:  # not an export of transformers
        return True
    if list(map(len, found)) != list(map(len, expected)):
        return False
    pairs = zip(itertools.chain(*found), itertools.chain(*expected), strict=True)
    return all(math.isclose(one, other, rel_tol=_ROTARY_TOLERANCE) for one, other in pairs)


def _shown(rotary: Any) -> str:
    return "; ".join(f"{row[0]:.4g} to {row[-1]:.4g}" for row in rotary or ()) or "none"


def _largest_difference(entries: dict[str, Any], model: nn.Module) -> float:
    """Return the largest difference from the recorded logits. It is infinite if the shapes differ or a logit is NaN."""
    expected = torch.tensor(entries["logits"], dtype=torch.float64)
    recorded = entries["prompt"]
    inputs = prompt(model, len(expected)) if recorded is None else torch.tensor(recorded)
    actual = logits(model, inputs).double()
    if actual.shape[-1] <= max(entries["tokens"]):
        return math.inf
    actual = actual[..., entries["tokens"]]
    if actual.shape != expected.shape:
        return math.inf
    return float((actual - expected).abs().nan_to_num(nan=math.inf).max())


def _allowed(entries: dict[str, Any]) -> float:
    """Return the allowed difference of logits.

    It is the rounding of fp32, plus twice the rounding of the unfolded model in the dtype of the export.
    """
    return float(TOLERANCE * entries["largest"] + 2.0 * entries["rounding"])


def _versions() -> dict[str, str]:
    found = {}
    for name in ("transformers", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _names(entries: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in entries.get("exported_with", {}).items())
