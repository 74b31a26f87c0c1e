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
from torch.utils._pytree import tree_leaves

from olmo_lns.checkpoints import read_json
from olmo_lns.checkpoints.olmo import Architecture, OLMoCheckpoint, is_olmo
from olmo_lns.checkpoints.olmo_core import OLMoCoreCheckpoint, is_olmo_core
from olmo_lns.checkpoints.tensors import LazyTensor, read_weights
from olmo_lns.environment import DISABLE
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import HF, OLMO, OLMO_CORE
from olmo_lns.export.fold import obstacle
from olmo_lns.export.model_folder import is_ours, load
from olmo_lns.export.sources import NONE, Options, Source
from olmo_lns.record import Record

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
    OLMO: {"init_fn", "init_std", "eos_token_id", "pad_token_id"},
    OLMO_CORE: {"init_method", "init_seed", "init_std", "embedding_init_std"},
}


class StockOLMo:
    """An OLMo export, run in a process of its own in which this package's plugin is switched off."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype

    def run(self, batches: torch.Tensor) -> list[tuple[torch.Tensor, str | None]]:
        """What :func:`_logits_of` gives for each row of ``batches`` (int64, (count, length)).

        :raises LNSConfigError: stock OLMo cannot load or run the folder.
        """
        with tempfile.TemporaryDirectory() as place:
            torch.save((str(self.folder), self.dtype, batches), Path(place, "asked"))
            program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import in_stock_olmo; in_stock_olmo()"
            environment = os.environ | {DISABLE: "1"}
            done = subprocess.run(
                [sys.executable, "-c", program, place], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                last = done.stderr.strip().rpartition("\n")[2] if done.returncode == 1 else ""
                said = last or f"it ended with exit code {done.returncode}"
                raise LNSConfigError(f"{self.folder}: stock OLMo cannot run it: {said}")
            found: list[tuple[torch.Tensor, str | None]] = torch.load(Path(place, "answer"), weights_only=True)
        return found


def in_stock_olmo() -> None:
    """:meth:`StockOLMo.run` in its process; what goes wrong is its last words, in one line."""
    try:
        _answer(Path(sys.argv[1]))
    except Exception as error:  # whatever stock OLMo raises
        sys.exit(f"{type(error).__name__}: {one_line(error)}")


def _answer(place: Path) -> None:
    from olmo.config import CheckpointType, LayerNormType, ModelConfig
    from olmo.model import OLMo

    if "lns_rms" in LayerNormType.__members__:
        raise RuntimeError("this OLMo has the lns types although the plugin is switched off: it is not stock OLMo")
    folder, dtype, batches = torch.load(place / "asked", weights_only=True)
    if Path(folder, "model.pt").is_file():
        model = OLMo.from_checkpoint(folder, device="cpu", checkpoint_type=CheckpointType.unsharded)
    else:  # OLMo 0.6.0's own reader of sharded checkpoints cannot be made under torch >= 2.6
        config = ModelConfig.load(Path(folder, "config.yaml"), key="model", validate_paths=False)
        config.init_device = "cpu"
        model = OLMo(config, init_params=False)
        state = {name: tensor.load() for name, tensor in OLMoCheckpoint.open(folder).tensors.items()}
        model.load_state_dict(model._make_state_dict_compatible(state)[0])
    model = model.to(dtype).eval()
    with torch.inference_mode():
        torch.save([_logits_of(model, ids) for ids in batches.split(1)], place / "answer")


def _logits_of(model: Any, given: torch.Tensor) -> tuple[torch.Tensor, str | None]:
    """The logits in float32, and the first module whose output is not finite.

    Modules are looked at only when the logits are not finite: then the model runs again.

    :param given: token ids (int64, (1, length)), or images, which are cast to the dtype that the model computes in.
    """
    given = given.to(next(model.parameters()).dtype) if given.is_floating_point() else given
    output = model(given)
    logits = getattr(output, "logits", output).float()  # OLMo-core returns the logits themselves
    if bool(torch.isfinite(logits).all()):
        return logits, None
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            leaves = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.is_floating_point()]
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
                found.append(name or "the logits")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model(given)
    finally:
        for handle in handles:
            handle.remove()
    return logits, found[0] if found else "the logits"


def open_export(folder: Path) -> tuple[Any, int, int]:
    """The export in stock code, its number of tokens and the longest prompt that it takes.

    :raises LNSConfigError: no export, or one that stock software cannot run, or would run without the factor.
    """
    from olmo_lns.models.loading import open_olmo, open_olmo_core

    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give what olmo-lns export made of the checkpoint")
    if (core := is_olmo_core(folder)) or is_olmo(folder):
        opened: Any = (OLMoCoreCheckpoint if core else OLMoCheckpoint).open(folder)
        record, dtype = opened.record, next(iter(opened.tensors.values())).dtype
        if record.active and (core or not obstacle(record.scheme, opened.architecture.n_layers)):
            raise LNSConfigError(
                f"{folder} is an LNS checkpoint ({record}), which stock software cannot run: expected what olmo-lns "
                "export made of one (usage: olmo-lns verify CHECKPOINT EXPORT)"
            )
        if core:
            model = open_olmo_core(folder).to(dtype)
            return model, model.vocab_size, 1 << 30
        # Where a scheme does not fold, no stock software runs the export: what there is to run is our own model of it.
        runs = open_olmo(folder).to(dtype) if record.active else StockOLMo(folder, dtype)
        return runs, opened.architecture.vocab_size, opened.architecture.max_sequence_length
    if (folder / "config.json").is_file():
        found = _open_transformers(folder).eval()
        return found, getattr(found.config, "vocab_size", 0), getattr(found.config, "max_position_embeddings", 0)
    raise LNSConfigError(
        f"{folder} holds neither config.json nor config.yaml: verify reads Hugging Face, OLMo and OLMo-core exports "
        "(a folded Megatron checkpoint can be exported with --format hf and verified so)"
    )


def _open_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    if is_ours(folder):  # brought in by `hf import`: no stock software runs it, and it refuses to try
        return load(folder)
    config = read_json(folder / "config.json")
    if (said := config.get("lns", "folded")) != "folded":
        raise LNSConfigError(f"{folder}/config.json says lns: {said!r}, which stock software drops: expected an export")
    images = any(str(name).endswith("ForImageClassification") for name in config.get("architectures") or [])
    kind = AutoModelForImageClassification if images else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(folder, torch_dtype="auto", local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises almost anything for a folder that it cannot load
        raise LNSConfigError(f"{folder}: stock transformers cannot load it: {one_line(error)}") from None
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
        return not self.different and math.isfinite(self.allowed) and self.difference <= self.allowed

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
    answers = (_logits_of(exported, ids) for ids in batches.split(1)) if in_process else exported.run(batches)
    difference = gap = largest = 0.0
    agree, losses, count, text = 0, [0.0, 0.0], 0, not batches.is_floating_point()
    for ids, answer in zip(batches.split(1), answers, strict=True):
        try:
            runs = {"checkpoint": _logits_of(source, ids), "export": answer}
        except IndexError:  # of the embedding
            raise LNSConfigError(f"the checkpoint has no token {int(ids.max())}: an export of another model") from None
        if low is not None:
            runs[f"checkpoint run in {dtype}"] = _logits_of(low, ids)
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
    expected = dict(target.weights)
    if target.config.get("tie_word_embeddings") and "lm_head.weight" in weights:  # written a second time
        expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    for problem, names in (("lacks", set(expected) - set(weights)), ("has", set(weights) - set(expected))):
        lines += [f"the export {problem} the weight {name}" for name in sorted(names)]
    shared = [name for name in expected if name in weights]
    for name in shared:
        lines += _of_weights(name, expected[name], weights[name], 2 if unfolded else 1)
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
    off = ~((values.double() - exact).abs() <= allowed)  # written so that NaN counts as off
    if not off.any():
        return []
    first = tuple(int(axis) for axis in off.nonzero()[0])
    return [
        f"{name}: {int(off.sum())} of {off.numel()} values are not the checkpoint's, folded: "
        f"{values[first].item():.8g} at {list(first)}, expected {exact[first].item():.8g}"
    ]
