"""Comparison of a checkpoint with its export: what is missing, config, every weight, logits."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
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
#: Differences of config and weights that are named.
_SHOWN = 10
#: Settings, or what their names begin with, that change no function of a model that is evaluated.
_NEUTRAL = (
    *("init_", "emb_init", "scale_emb_init", "initializer_", "embedding_init_std", "precision", "flash_attention"),
    *("dtype", "torch_dtype", "use_cache", "return_dict", "output_", "id2label", "label2id", "problem_type"),
    *(
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "pretraining_tp",
    ),
    *("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout", "attention_probs_dropout_prob"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
)


@dataclass
class Comparison:
    """Result of :func:`verify`.

    :param lines: what was compared and found, for a user. :param passed: the export computes what the checkpoint does.
    """

    lines: list[str]
    passed: bool

    def __str__(self) -> str:
        return "\n".join([*self.lines, "PASS" if self.passed else "FAIL"])


def verify(
    checkpoint: Path, export: Path, *, scheme: Scheme | None = None, prompts: int = 8, length: int = 64, seed: int = 0
) -> Comparison:
    """Run a checkpoint and its export on the same random tokens; compare config and weights with a fresh fold.

    :param scheme: of a checkpoint that doesn't say it. :param prompts: how many. :param length: tokens of each.
    :raises LNSConfigError: either cannot be opened (weights are missing, say), or the export still needs its factor.

    Example: ``verify(Path("runs/lns/step1000"), Path("model")).passed``.
    """
    found = open_checkpoint(export)
    if not found.scheme.is_pre_ln:
        raise LNSConfigError(
            f"{export} still needs its factor ({found.scheme}). Give the checkpoint and what olmo-lns export made of "
            "it: olmo-lns verify CHECKPOINT EXPORT."
        )
    opened = open_checkpoint(checkpoint, scheme)
    if found.kind not in WRITTEN_AS[opened.kind]:
        raise LNSConfigError(f"{export} is no export of {checkpoint}: {opened.kind} is never made into {found.kind}.")
    dtype = next(found.model.parameters()).dtype
    ids = prompt(opened.model, prompts, min(length, opened.max_length), seed)
    reference = opened.model.float()
    with torch.inference_mode():
        expected, given = logits(reference, ids).double(), logits(found.model, ids).double()
        allowed = TOLERANCE * float(expected.abs().max())
        if dtype != torch.float32:  # twice what running the checkpoint itself in that dtype costs
            allowed = 2 * float((logits(copy.deepcopy(reference).to(dtype), ids).double() - expected).abs().max())
    anew = convert(opened, HF if found.kind == MEGATRON else found.kind, dtype)
    weights = anew.model.state_dict()
    differences = _of_settings(anew.config, found.config) + _of_weights(weights, found.model.state_dict())
    largest, agreement = math.inf, 0.0
    if given.shape == expected.shape:
        largest = float((given - expected).abs().max().nan_to_num(nan=math.inf))
        agreement = float((given.argmax(-1) == expected.argmax(-1)).double().mean())
    lines = [f"differs                 {line}" for line in differences[:_SHOWN]]
    lines += [f"differs                 … and {len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)
    lines += [
        f"weights compared        {len(weights)}",
        f"max |difference|, logit {largest:.3e} (allowed {allowed:.3e})",
        f"top-1 agreement         {agreement:.2%}",
    ]
    return Comparison(lines, not differences and largest <= allowed)


def _of_settings(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    wanted, given = _flat(expected), _flat(found)
    return [
        f"config: {name} is {given.get(name, 'missing')!r}, expected {wanted.get(name, 'nothing')!r}"
        for name in sorted({*wanted, *given})
        if not name.startswith(_NEUTRAL) and wanted.get(name) != given.get(name)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """``{"rope_parameters.rope_theta": 1e4}`` of what is nested."""
    if isinstance(value, Mapping) and value:
        dot = f"{name}." if name else ""
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{dot}{part}").items()}
    return {name: list(value) if isinstance(value, tuple) else value}


def _of_weights(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    lines = [f"the export has no weight {name}" for name in sorted(set(expected) - set(found))]
    lines += [f"the checkpoint has no weight {name}" for name in sorted(set(found) - set(expected))]
    for name in sorted(set(expected) & set(found)):
        wanted, given = expected[name], found[name]
        if wanted.shape != given.shape:
            lines.append(f"{name}: shape {tuple(given.shape)}, expected {tuple(wanted.shape)}")
        elif wanted.is_floating_point():
            allowed = wanted.double().abs() * torch.finfo(given.dtype).eps  # one rounding more than ours
            off = ~((given.double() - wanted.double()).abs() <= allowed)  # so that NaN counts as off
            if bool(off.any()):
                lines.append(f"{name}: {int(off.sum())} of {off.numel()} values are not the checkpoint's, folded")
    return lines
