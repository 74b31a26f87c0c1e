"""What ``olmo-lns verify`` compares: logits, every weight, and what of a config changes a function.

Logits alone do not tell: a weight off by a thousandth, or an eps or a tied embedding that somebody changed, can hide in
what rounding costs. The export is opened as somebody without this package would: in stock transformers or stock OLMo.
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.checkpoints import read_json
from olmo_lns.checkpoints.olmo import Architecture, OLMoCheckpoint, is_olmo
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core
from olmo_lns.checkpoints.tensors import LazyTensor, read_weights
from olmo_lns.environment import DISABLE
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import stock_olmo
from olmo_lns.export.fold import obstacle
from olmo_lns.export.model_folder import is_ours, load
from olmo_lns.export.sources import HF, NONE, OLMO, OLMO_CORE, Options, Source
from olmo_lns.record import Record

__all__ = ["Comparison", "StockOLMo", "compare", "differences", "open_export"]

#: Largest logit difference in fp32, relative to the largest logit.
TOLERANCE = 1e-5
#: Differences of weights and config that are named.
_SHOWN = 10
#: Settings that change no function of a model that is evaluated.
_NEUTRAL = {
    HF: {
        *("transformers_version", "_name_or_path", "architectures", "auto_map", "use_cache", "return_dict"),
        *("initializer_range", "dtype", "torch_dtype", "lns", "lns_record", "lns_factors"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("attention_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
        *("resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp"),
    },
    OLMO: {
        *("init_fn", "init_std", "init_cutoff_factor", "init_device", "scale_emb_init", "emb_init_std", "precision"),
        *("attention_dropout", "residual_dropout", "embedding_dropout", "flash_attention"),
        *("eos_token_id", "pad_token_id"),
    },
    OLMO_CORE: {"init_method", "init_seed", "init_std", "embedding_init_std"},
}


class StockOLMo:
    """An OLMo export, run in a process of its own in which this package's plugin is not loaded."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype

    def run(self, batches: torch.Tensor) -> list[tuple[torch.Tensor, str | None]]:
        """For each row of ``batches`` (int64, (count, length)) its logits in float32, (1, length, embeddings), and the
        first module whose output is not finite.

        :raises LNSConfigError: stock OLMo cannot load the folder, or ended.
        """
        with tempfile.TemporaryDirectory() as place:
            asked, answer = Path(place, "ids.pt"), Path(place, "logits.pt")
            torch.save(batches, asked)
            arguments = [str(self.folder), str(self.dtype).removeprefix("torch."), str(asked), str(answer)]
            program = f"import sys; sys.path[:] = {sys.path!r}; from {stock_olmo.__name__} import main; main()"
            command, environment = [sys.executable, "-c", program, *arguments], os.environ | {DISABLE: "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if not answer.is_file():
                raise LNSConfigError(f"{self.folder}: stock OLMo ended with exit code {done.returncode}")
            found: Any = torch.load(answer, weights_only=True)
        if isinstance(found, str):
            raise LNSConfigError(f"{self.folder}: stock OLMo cannot run it: {one_line(found)}")
        return list(found)


def open_export(folder: Path) -> tuple[Any, int, int]:
    """The export in stock code, its number of tokens and the longest prompt that it takes.

    :raises LNSConfigError: no export, or one that stock software cannot run, or would run without the factor.
    """
    from olmo_lns.models.loading import open_olmo, open_olmo_core

    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give what olmo-lns export made of the checkpoint")
    usage = "export made of one (usage: olmo-lns verify CHECKPOINT EXPORT)"
    if is_olmo_core(folder):
        core = OLMoCoreCheckpoint.open(folder)
        if core.record.active:
            raise LNSConfigError(
                f"{folder} is an OLMo-core checkpoint with our block, not an export: expected what olmo-lns {usage}"
            )
        model = open_olmo_core(folder).to(next(iter(core.tensors.values())).dtype)
        return model, model.vocab_size, 1 << 30
    if (folder / "config.json").is_file():
        found = _open_transformers(folder).eval()
        return found, getattr(found.config, "vocab_size", 0), getattr(found.config, "max_position_embeddings", 0)
    if is_olmo(folder):
        olmo = OLMoCheckpoint.open(folder)
        sizes, dtype = olmo.architecture, next(iter(olmo.tensors.values())).dtype
        if not olmo.record.active:
            return StockOLMo(folder, dtype), sizes.vocab_size, sizes.max_sequence_length
        if obstacle(olmo.record.scheme, sizes.n_layers):
            # No stock software runs it: what there is to compare is our own model of its weights.
            return open_olmo(folder).to(dtype), sizes.vocab_size, sizes.max_sequence_length
        raise LNSConfigError(
            f"{folder} is an LNS checkpoint, which stock OLMo cannot run: expected what olmo-lns {usage}"
        )
    raise LNSConfigError(
        f"{folder} holds neither config.json nor config.yaml: verify reads Hugging Face, OLMo and OLMo-core exports "
        "(a folded Megatron checkpoint can be exported with --format hf and verified so)"
    )


def _open_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    if is_ours(folder):  # brought in by `hf import`: no stock software runs it, and it refuses to try
        return load(folder)
    try:
        config = read_json(folder / "config.json")
        said = config.get("lns", "folded")
        images = any(name.endswith("ForImageClassification") for name in config.get("architectures") or [])
        kind = AutoModelForImageClassification if images else AutoModelForCausalLM
        how = {"torch_dtype": "auto", "local_files_only": True, "trust_remote_code": False}
        model = kind.from_pretrained(folder, **how) if said == "folded" else None
    except Exception as error:  # transformers raises almost anything for a folder that it cannot load
        raise LNSConfigError(f"{folder}: stock transformers cannot load it: {one_line(error)}") from None
    if model is None:
        raise LNSConfigError(
            f"{folder}/config.json says lns: {said!r}, which stock transformers drops: expected an export"
        )
    if not type(model).__module__.startswith("transformers."):
        raise LNSConfigError(f"{folder} is a {type(model).__module__}.{type(model).__name__}, not stock transformers")
    return model


@dataclass(frozen=True)
class Comparison:
    """:param difference: max |Δ logit|, and ``allowed`` what it may be.
    :param agreement: fraction of positions with the same most likely token.
    :param perplexities: of the checkpoint and of the export, on the prompts; None for images.
    :param not_finite: which model has NaN or infinite logits, and the first of its layers that has; then nothing
        was compared.
    :param different: what of weights and config is not what folding the checkpoint anew gives.
    :param text: what the perplexities are of.
    """

    difference: float = math.inf
    allowed: float = 0.0
    agreement: float = 0.0
    perplexities: tuple[float, float] | None = None
    positions: int = 0
    not_finite: str = ""
    different: tuple[str, ...] = ()
    text: str = ""

    @property
    def passed(self) -> bool:
        return (
            not self.not_finite
            and not self.different
            and math.isfinite(self.allowed)
            and self.difference <= self.allowed
        )

    def __str__(self) -> str:
        lines = [f"differs                 {line}" for line in self.different[:_SHOWN]]
        if len(self.different) > _SHOWN:
            lines.append(f"differs                 … and {len(self.different) - _SHOWN} more")
        if self.not_finite:
            return "\n".join([*lines, f"not finite              {self.not_finite}", "FAIL"])
        lines += [
            f"positions compared      {self.positions}",
            f"max |difference|, logit {self.difference:.3e} (allowed {self.allowed:.3e})",
            f"top-1 agreement         {self.agreement:.2%}",
        ]
        if self.perplexities is not None:
            before, after = self.perplexities
            of = f", of {self.text}" if self.text else ""
            lines.append(f"perplexity              {before:.4f} checkpoint, {after:.4f} export{of}")
        return "\n".join([*lines, "PASS" if self.passed else "FAIL"])


def compare(source: Any, exported: Any, batches: torch.Tensor) -> Comparison:
    """Run both on ``batches`` (int64, (count, length), or images), one at a time.

    :param source: a module in fp32. :param exported: a module in the dtype to judge, or :class:`StockOLMo`.
    :raises LNSConfigError: they are not of one model.
    """
    in_process = isinstance(exported, torch.nn.Module)
    dtype = next(exported.parameters()).dtype if in_process else exported.dtype
    low = None if dtype == torch.float32 else copy.deepcopy(source).to(dtype)
    answers = (_run(exported, ids) for ids in batches.split(1)) if in_process else exported.run(batches)
    difference = gap = largest = 0.0
    agree, losses, count, text = 0, [0.0, 0.0], 0, not batches.is_floating_point()
    for ids, answer in zip(batches.split(1), answers, strict=True):
        try:
            runs = {"checkpoint": _run(source, ids), "export": answer}
        except IndexError:  # of the embedding
            raise LNSConfigError(
                f"the checkpoint has no token {int(ids.max())}: the export is of another model"
            ) from None
        if low is not None:
            runs[f"checkpoint run in {dtype}"] = _run(low, ids)
        for which, (_, first) in runs.items():
            if first is not None:
                return Comparison(not_finite=f"{which}: NaN or infinite from {first} on")
        expected, found, *lower = (logits.double() for logits, _ in runs.values())
        if expected.shape != found.shape:
            raise LNSConfigError(
                f"the checkpoint has {expected.shape[-1]} logits a token, the export {found.shape[-1]}: it is of "
                "another model"
            )
        difference = max(difference, float((expected - found).abs().max()))
        largest = max(largest, float(expected.abs().max()))
        gap = max([gap, *(float((logits - expected).abs().max()) for logits in lower)])
        agree += int((expected.argmax(-1) == found.argmax(-1)).sum())
        for index, logits in enumerate((expected, found) if text else ()):
            losses[index] += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += expected[..., 0].numel()
    allowed = TOLERANCE * largest if low is None else 2 * gap
    perplexities = None
    if text:
        before, after = (math.exp(min(loss / (count - len(batches)), 700.0)) for loss in losses)
        perplexities = before, after
    return Comparison(difference, allowed, agree / count, perplexities, count)


def _run(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """The logits, and the first module that is not finite. Images are cast to the dtype that the model computes in."""
    given = ids.to(next(model.parameters()).dtype) if ids.is_floating_point() else ids
    return stock_olmo.logits_of(model, given)


def differences(source: Source, checkpoint: Path, export: Path, exported: Record | None) -> tuple[int, list[str]]:
    """The number of weights that were compared, and what differs, a line each.

    A weight may be off by one rounding to its dtype from the product in float64; by two in a folder of ours, which
    may have been folded and unfolded.

    :param source: of the checkpoint. :param exported: what the export says of itself.
    :raises LNSConfigError: the checkpoint is not written as what the export is.
    """
    form = OLMO_CORE if is_olmo_core(export) else OLMO if is_olmo(export) else HF
    if form not in source.formats:
        raise LNSConfigError(f"{export}: {source.kind} is not written as {form}: it is the export of something else")
    exponent = exported.scheme.parameters.get("exponent") if exported is not None and source.name == "authors" else None
    options = Options(str(export), form, torch.float64, exponent, NONE)
    unfolded = form == HF and is_ours(export)
    target = (source.train if unfolded else source.fold)(checkpoint, options)
    config, weights = _found(export, form)
    wanted, none = _comparable(target.config, form), object()
    lines = [
        f"config: {name} is {config.get(name, 'missing')!r}, expected {wanted.get(name, 'nothing')!r}"
        for name in sorted({*wanted, *config})
        if wanted.get(name, none) != config.get(name, none)
    ]
    if form == HF:  # what transformers computes in, against what is stored
        said = (values := read_json(export / "config.json")).get("dtype", values.get("torch_dtype"))
        stored = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
        if said not in {None, *stored}:
            lines.append(f"config: dtype is {said}, the weights are {' and '.join(sorted(stored))}")
    tied = {"lm_head.weight"} if target.config.get("tie_word_embeddings") else set()
    for problem, names in (
        ("lacks", set(target.weights) - set(weights)),
        ("has", set(weights) - set(target.weights) - tied),
    ):
        lines += [f"the export {problem} the weight {name}" for name in sorted(names)]
    shared = [name for name in target.weights if name in weights]
    for name in shared:
        lines += _of_weights(name, target.weights[name], weights[name], 2 if unfolded else 1)
    return len(shared), lines


def _found(export: Path, form: str) -> tuple[dict[str, Any], Mapping[str, LazyTensor]]:
    """The config of an export, made comparable, and its weights."""
    if form == OLMO_CORE:
        core = OLMoCoreCheckpoint.open(export)
        return _comparable(core.model, form), core.tensors
    if form == OLMO:
        olmo = OLMoCheckpoint.open(export)
        return _comparable(olmo.config["model"], form), olmo.tensors
    return _comparable(read_json(export / "config.json"), form), read_weights(export)


def _comparable(config: Mapping[str, Any], form: str) -> dict[str, Any]:
    """Every setting that changes the function, defaults included, as the framework itself reads it."""
    if form == OLMO:
        values = vars(Architecture.from_config(config, "config.yaml"))
        return {name: value for name, value in values.items() if name not in _NEUTRAL[OLMO]}
    if form == OLMO_CORE:
        flat = _flat(config)
        return {name: value for name, value in flat.items() if name.split(".")[0] not in _NEUTRAL[OLMO_CORE]}
    from transformers import AutoConfig

    from olmo_lns.integrations.transformers import register

    register()
    values = {name: value for name, value in config.items() if name != "model_type"}
    known = AutoConfig.for_model(config["model_type"], **values).to_dict()
    return _flat({name: value for name, value in known.items() if name not in _NEUTRAL[HF]})


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """``{"rope_parameters.rope_theta": 1e4}`` of what is nested."""
    if isinstance(value, Mapping) and value:
        dot = f"{name}." if name else ""
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{dot}{part}").items()}
    return {name: list(value) if isinstance(value, tuple) else value}


def _of_weights(name: str, expected: LazyTensor, found: LazyTensor, roundings: int) -> list[str]:
    if tuple(expected.shape) != tuple(found.shape):
        return [f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    exact, values, kind = expected.load().double(), found.load(), torch.finfo(found.dtype)
    allowed = exact.abs() * (roundings * kind.eps / 2 * (1 + 2**-10)) + kind.smallest_normal * kind.eps
    off = ~((values.double() - exact).abs() <= allowed)  # so that NaN is off
    if not off.any():
        return []
    first = tuple(int(axis) for axis in off.nonzero()[0])
    return [
        f"{name}: {int(off.sum())} of {off.numel()} values are not the checkpoint's, folded: "
        f"{values[first].item():.8g} at {list(first)}, expected {exact[first].item():.8g}"
    ]
