"""Compare the config, every weight and the logits of an export with its receipt and with its checkpoint."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, receipt
from olmo_lns.export.checkpoint import OpenCheckpoint
from olmo_lns.export.convert import convert
from olmo_lns.export.formats import FORMATS
from olmo_lns.export.open import open_checkpoint
from olmo_lns.export.prompts import logits, prompt
from olmo_lns.export.saved_weights import SavedWeights
from olmo_lns.schemes import Scheme

#: Number of random prompts.
PROMPTS = 8
#: Prefixes of settings, also of nested ones, that do not change the function of a model in evaluation mode.
_WITHOUT_EFFECT_ON_OUTPUTS = (
    *("init_", "emb_init", "scale_emb_init", "initializer_", "embedding_init_std", "precision", "flash_attention"),
    *("dtype", "torch_dtype", "use_cache", "return_dict", "output_", "id2label", "label2id", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("pretraining_tp", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob"),
    *("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"),
)


def verify(
    checkpoint: Path | None, export: Path, *, scheme: Scheme | None = None, length: int = 64
) -> tuple[list[str], bool]:
    """Compare an export with the receipt beside it and with its checkpoint.

    :param checkpoint: folder of the checkpoint. None compares the export with its receipt only.
    :param export: folder of the export.
    :param scheme: scheme of a checkpoint whose config names none.
    :param length: number of tokens in each prompt.
    :returns: a line for each comparison and each difference, and True if the export computes the same as the
        checkpoint.
    :raises LNSConfigError: if one of them cannot be opened, for instance because weights are missing, if the export
        still needs its factor, or if there is nothing to compare with.

    Example: ``lines, passed = verify(Path("runs/lns/step1000"), Path("model"))``.
    """
    if not export.is_dir():
        raise LNSConfigError(f"There is no such folder: {export}. Pass the folder that olmo-lns export wrote.")
    if checkpoint is not None and checkpoint.resolve() == export.resolve():
        raise LNSConfigError(f"{export} is the checkpoint itself. Pass the folder of its export.")
    exported, known = open_checkpoint(export), receipt.read(export)
    if not exported.scheme.is_pre_ln:
        raise LNSConfigError(
            f"{export} is not folded: it has the scheme {exported.scheme}. Expected an export. Pass the "
            "checkpoint first and then its export, as in olmo-lns verify CHECKPOINT EXPORT."
        )
    if known is None and checkpoint is None:
        raise LNSConfigError(
            f"{export} has no {receipt.RECEIPT_FILE}, so there is nothing to compare it with. Pass its checkpoint, "
            "too: olmo-lns verify CHECKPOINT EXPORT."
        )
    if known is not None and "not_run" in known and checkpoint is None:
        raise LNSConfigError(
            f"{export}: its receipt has no logits, because the model did not run where it was exported "
            f"({known['not_run']}). Pass its checkpoint, too, on a machine that can run it: olmo-lns verify "
            "CHECKPOINT EXPORT."
        )
    lines, differences = receipt.compare(known, exported) if known else ([], [])
    if checkpoint is not None:
        opened = open_checkpoint(checkpoint, scheme)
        if exported.format not in FORMATS[opened.format].outputs:
            raise LNSConfigError(
                f"{export} is not an export of {checkpoint}: {opened.format} is never exported as {exported.format}."
            )
        more_lines, more_differences = _compare(opened, exported, length, known)
        lines, differences = lines + more_lines, differences + more_differences
    return [*(f"differs                 {line}" for line in differences), *lines], not differences


def _compare(
    opened: OpenCheckpoint, exported: OpenCheckpoint, length: int, known: dict[str, Any] | None
) -> tuple[list[str], list[str]]:
    """Run a checkpoint and its export on the same random tokens, and compare the export with a new fold.

    :returns: lines for the user, and a line for each difference in logits, config or weights.
    """
    dtypes = _saved_dtypes(exported)
    coarsest = max((each for each in dtypes.values() if each.is_floating_point), key=lambda each: torch.finfo(each).eps)
    ids = prompt(opened.model, PROMPTS, min(length, opened.max_length))
    reference = opened.model.float()
    differences = receipt.compare_checkpoint(known, reference) if known else []
    with torch.inference_mode():
        expected, actual = logits(reference, ids).double(), logits(exported.model, ids).double()
        allowed = receipt.TOLERANCE * float(expected.abs().max())
        if coarsest not in (torch.float32, torch.float64):  # twice the error of the checkpoint itself in that dtype
            rounded = logits(copy.deepcopy(reference).to(coarsest), ids).double()
            allowed = 2 * float((rounded - expected).abs().max())
    refolded = convert(opened, exported.format, torch.float32)
    weights = refolded.model.state_dict()
    differences += _config_differences(refolded.config, exported.config)
    differences += _weight_differences(weights, exported.model.state_dict(), dtypes)
    largest, agreement = math.inf, 0.0
    if actual.shape == expected.shape:
        largest = float((actual - expected).abs().max().nan_to_num(nan=math.inf))
        agreement = float((actual.argmax(-1) == expected.argmax(-1)).double().mean())
    if not largest <= allowed:
        differences.append(f"logits: they differ by {largest:.3e} from the checkpoint's, allowed {allowed:.3e}")
    lines = [
        f"weights compared        {len(weights)}",
        f"max |difference|, logit {largest:.3e} (allowed {allowed:.3e})",
        f"top-1 agreement         {agreement:.2%}",
    ]
    return lines, differences


def _saved_dtypes(exported: OpenCheckpoint) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor of an export was saved: name -> dtype.

    transformers loads an export in another dtype if a tensor in its files has a wider one, or if its family keeps some
    modules in fp32.
    """
    dtypes = {name: tensor.dtype for name, tensor in exported.model.state_dict().items()}
    saved = SavedWeights(exported.folder).dtypes if exported.format == HF else {}
    return dtypes | {name: dtype for name, dtype in saved.items() if dtype is not None}


def _weight_differences(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> list[str]:
    """Compare the weights of an export with folded ones, within one rounding of the dtype of each weight.

    :param dtypes: the result of :func:`_saved_dtypes`.
    :returns: a line for each difference in names, and a line for the first weight that differs.
    """
    differences = [f"weights: {name} is missing" for name in sorted(expected.keys() - actual.keys())]
    differences += [f"weights: {name} was not expected" for name in sorted(actual.keys() - expected.keys())]
    for name in sorted(expected.keys() & actual.keys()):
        dtype = dtypes[name]
        rtol = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        try:
            torch.testing.assert_close(actual[name].to(dtype), expected[name].to(dtype), rtol=rtol, atol=0.0)
        except AssertionError as error:
            return [*differences, f"weights: {name}: {' '.join(str(error).split())}"]
    return differences


def _config_differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
    expected, actual = _flatten(expected), _flatten(actual)
    return [
        f"config: {name} is {actual.get(name, 'missing')!r}, expected {expected.get(name, 'nothing')!r}"
        for name in sorted({*expected, *actual})
        if not name.rpartition(".")[2].startswith(_WITHOUT_EFFECT_ON_OUTPUTS) and expected.get(name) != actual.get(name)
    ]


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, as in ``{"rope_parameters.rope_theta": 1e4}``."""
    if isinstance(value, Mapping) and value:
        prefix = f"{name}." if name else ""
        return {key: leaf for part, item in value.items() for key, leaf in _flatten(item, f"{prefix}{part}").items()}
    return {name: list(value) if isinstance(value, tuple) else value}
