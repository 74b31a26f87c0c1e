"""Comparison of a checkpoint with its export: config, every weight, logits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, MEGATRON
from olmo_lns.export.convert import WRITTEN_AS, convert
from olmo_lns.export.huggingface import logits, prompt
from olmo_lns.export.open import open_checkpoint
from olmo_lns.schemes import Scheme

#: Largest logit difference in fp32, relative to the largest logit.
TOLERANCE = 1e-5
#: Random prompts.
PROMPTS = 8
#: Settings, or beginnings of their names, that do not change what a model in evaluation mode computes.
_NEUTRAL = (
    *("init_", "emb_init", "scale_emb_init", "initializer_", "embedding_init_std", "precision", "flash_attention"),
    *("dtype", "torch_dtype", "use_cache", "return_dict", "output_", "id2label", "label2id", "problem_type"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("pretraining_tp", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob"),
    *("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"),
)


def verify(checkpoint: Path, export: Path, *, scheme: Scheme | None = None, length: int = 64) -> tuple[list[str], bool]:
    """Run a checkpoint and its export on the same random tokens; compare config and weights with a fresh fold.

    :param scheme: of a checkpoint that doesn't say it. :param length: tokens of each prompt.
    :returns: comparisons and differences, one line each, and true where the export computes the checkpoint.
    :raises LNSConfigError: either cannot be opened (weights are missing, say), or the export still needs its factor.

    Example: ``lines, passed = verify(Path("runs/lns/step1000"), Path("model"))``.
    """
    if not export.is_dir():
        raise LNSConfigError(f"There is no such folder: {export}. Give the one that olmo-lns export wrote.")
    if checkpoint.resolve() == export.resolve():
        raise LNSConfigError(f"{export} is the checkpoint itself. Give the folder of its export.")
    found = open_checkpoint(export)
    if not found.scheme.is_pre_ln:
        raise LNSConfigError(
            f"{export} still needs its factor ({found.scheme}). Give the checkpoint and its export: olmo-lns verify "
            "CHECKPOINT EXPORT."
        )
    opened = open_checkpoint(checkpoint, scheme)
    if found.kind not in WRITTEN_AS[opened.kind]:
        raise LNSConfigError(
            f"{export} isn't an export of {checkpoint}: {opened.kind} is never written as {found.kind}."
        )
    dtype = next(found.model.parameters()).dtype
    ids = prompt(opened.model, PROMPTS, min(length, opened.max_length))
    reference = opened.model.float()
    with torch.inference_mode():
        expected, given = logits(reference, ids).double(), logits(found.model, ids).double()
        allowed = TOLERANCE * float(expected.abs().max())
        if dtype != torch.float32:  # twice what running the checkpoint itself in that dtype costs
            allowed = 2 * float((logits(copy.deepcopy(reference).to(dtype), ids).double() - expected).abs().max())
    anew = convert(opened, HF if found.kind == MEGATRON else found.kind, dtype)
    weights, differences = anew.model.state_dict(), _of_settings(anew.config, found.config)
    try:  # within one rounding
        torch.testing.assert_close(found.model.state_dict(), weights, rtol=torch.finfo(dtype).eps, atol=0.0)
    except AssertionError as error:
        differences.append(f"weights: {' '.join(str(error).split())}")
    largest, agreement = math.inf, 0.0
    if given.shape == expected.shape:
        largest = float((given - expected).abs().max().nan_to_num(nan=math.inf))
        agreement = float((given.argmax(-1) == expected.argmax(-1)).double().mean())
    lines = [
        *(f"differs                 {line}" for line in differences),
        f"weights compared        {len(weights)}",
        f"max |difference|, logit {largest:.3e} (allowed {allowed:.3e})",
        f"top-1 agreement         {agreement:.2%}",
    ]
    return lines, not differences and largest <= allowed


def _of_settings(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    wanted, given = _flat(expected), _flat(found)
    return [
        f"config: {name} is {given.get(name, 'missing')!r}, expected {wanted.get(name, 'nothing')!r}"
        for name in sorted({*wanted, *given})
        if not name.startswith(_NEUTRAL) and wanted.get(name) != given.get(name)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """``{"rope_parameters.rope_theta": 1e4}`` of nested settings."""
    if isinstance(value, Mapping) and value:
        dot = f"{name}." if name else ""
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{dot}{part}").items()}
    return {name: list(value) if isinstance(value, tuple) else value}
