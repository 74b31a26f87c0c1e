"""OLMo-core's checkpoints: folded for stock OLMo-core and transformers, unfolded to train on.

What a folded checkpoint names is OLMo-core's own block config, so that it runs where this package is not installed.
The transformers class that computes exactly what an OLMo-core model computes, if there is one:

==================  =================================================================
LlamaForCausalLM    ``default`` blocks (RMSNorm in front, SwiGLU, RoPE) without QK-norm
Qwen3ForCausalLM    the same with QK-norm per head
Olmo2ForCausalLM    ``reordered_norm`` blocks with QK-norm over all heads
==================  =================================================================
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints import write_json
from olmo_lns.checkpoints.distributed import Edit
from olmo_lns.checkpoints.olmo import Architecture, identifier_in, section
from olmo_lns.checkpoints.olmo_core import (
    BUFFER,
    DEFAULT_SCALED,
    PREFIX,
    WEIGHTS,
    OLMoCoreCheckpoint,
    block_type,
    is_olmo_core,
)
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, OLMO_CORE, fold, huggingface
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.sources import Options, PlannedExport, Source, Stock, about_moments, nothing_to_fold
from olmo_lns.integrations.olmo_core.config import CLASS, CONFIG_FILE
from olmo_lns.record import Record

_STOCK_CLASS = "olmo_core.nn.transformer.config.TransformerBlockConfig"
_OURS = ("scheme", "exponent", "initialization", "scale_router")
#: Files of OLMo-core's trainer beside the weights; the second marks a checkpoint as complete.
_TRAINER, _COMPLETE = "train", ".metadata.json"
#: The norms that a class must compute.
_NORMS = ("layer_norm", "lm_head.layer_norm", "qk_norm")
_NORM: dict[str, tuple[Any, ...] | None] = {
    "name": ("rms", "fused_rms", "cute_rms", "qwen_rms"),
    "bias": (False,),
    "elementwise_affine": (True, None),
}
_NORM |= dict.fromkeys(("eps", "full_precision", "dtype"))
#: Part of a model -> setting -> the values that a stock class computes; None: any.
_STOCK: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "block": dict.fromkeys(("sequence_mixer", "attention", "feed_forward", "layer_norm", "name", *_OURS)),
    "attention": {"name": ("default",), "bias": (False,)}
    | dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "use_head_qk_norm"))
    | dict.fromkeys(("backend", "use_flash", "dtype", "type")),
    "rope": {"name": ("default",)} | dict.fromkeys(("theta", "full_precision")),
    "feed_forward": {"name": ("default",), "bias": (False,), "activation": ("silu",)}
    | dict.fromkeys(("hidden_size", "dtype")),
    **dict.fromkeys(_NORMS, _NORM),
    "lm_head": {"name": ("default", None), "bias": (False,)}
    | dict.fromkeys(("layer_norm", "dtype", "loss_implementation")),
}
#: OLMo-core's defaults that are not neutral, for where a config is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {part: {"bias": True} for part in ("attention", "feed_forward", "lm_head")}
_DEFAULTS |= {part: {"name": "default", "bias": True} for part in _NORMS}
#: Values of any other setting that change nothing.
_NEUTRAL = (None, False, 0.0, 1.0, 1)


class OLMoCore(Source):
    name = "olmo-core"
    kind = "an OLMo-core checkpoint"
    formats = (OLMO_CORE, HF)
    checkpoint = OLMoCoreCheckpoint
    recognises = staticmethod(is_olmo_core)

    def stock(self, checkpoint: OLMoCoreCheckpoint, options: Options, *, trained: bool = False) -> Stock:
        path = checkpoint.folder / CONFIG_FILE
        own = identifier_in(section(checkpoint.config, "dataset", path), path)
        factors: Mapping[str, Factor] = checkpoint.factors()
        if trained:
            record = checkpoint.record
            factors = _inverse(checkpoint.factors_of(record.scheme)) if record.folded else {}
        weights = to_huggingface(checkpoint, scaled(checkpoint.tensors, factors, options.rounding, options.dtype))
        config = transformers_config(checkpoint)
        return Stock(config, weights, "its blocks are this model's", own, checkpoint.folder)

    def folded(self, checkpoint: OLMoCoreCheckpoint, options: Options) -> PlannedExport:
        record, factors = fold.fold_record(checkpoint.record), checkpoint.factors()
        if not checkpoint.record.active:
            note = ", and stock OLMo-core runs it as it is"
            raise nothing_to_fold(checkpoint.record, checkpoint.folder, "without a scheme", note)
        config = with_blocks(checkpoint.config, {"_CLASS_": _STOCK_CLASS})

        def write(out: Path) -> list[str]:
            edits = _edits(checkpoint, factors, options)
            checkpoint.stored.rewrite(out / WEIGHTS, edits.__contains__, edits, max_bytes=options.shard_bytes)
            record.write(out)
            write_json(out / CONFIG_FILE, config)
            return [
                f"OLMo-core, {len(checkpoint.blocks)} factors folded into gains and biases of the block norms",
                "the optimizer's state is left out: its moments belong to the unfolded weights; to train on: "
                f"{_start_from(options)} --trainer.load_optim_state=false --trainer.load_trainer_state=false",
            ]

        weights = scaled(checkpoint.tensors, factors, options.rounding, options.dtype)
        return PlannedExport(write, weights, config["model"])

    def unfolded(self, checkpoint: OLMoCoreCheckpoint, options: Options) -> PlannedExport:
        """``default_scaled`` blocks whose factors were right become ours; their weights stay as they are."""
        if checkpoint.default_scaled:
            return PlannedExport(lambda out: _mended(checkpoint, out, options))
        record = fold.unfolded_record(checkpoint.record, checkpoint.folder)
        scales = checkpoint.factors_of(record.scheme)

        def write(out: Path) -> list[str]:
            edits, moments = _edits(checkpoint, _inverse(scales), options), {}
            if not options.drop_optimizer:
                moments = fold.sharded_moments(checkpoint.stored, scales, {}, options.rounding)
            kept = (PREFIX, "optim.") if moments else (PREFIX,)
            _write(checkpoint, out, record, lambda name: name.startswith(kept), edits | moments, options)
            note = about_moments(len(moments), options, "start with --trainer.load_optim_state=false")
            if not (out / _TRAINER).is_dir():
                note += f"; no trainer state either: {_start_from(options)} --trainer.load_trainer_state=false"
            return [f"{record}: the factor is outside again", note]

        return PlannedExport(write)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.loading import open_olmo_core

        return open_olmo_core(folder)


def _start_from(options: Options) -> str:
    """OLMo-core takes a folder without trainer state for none, and would start from fresh weights."""
    return f"--trainer.load_path={options.output}/{WEIGHTS}"


def _inverse(scales: Mapping[str, float]) -> dict[str, Factor]:
    return {name: 1 / scale for name, scale in scales.items()}


def _edits(checkpoint: OLMoCoreCheckpoint, factors: Mapping[str, Factor], options: Options) -> dict[str, Edit]:
    edit = options.rounding.edit
    return {PREFIX + name: edit(name, factors.get(name, 1.0), options.dtype) for name in checkpoint.tensors}


def _mended(checkpoint: OLMoCoreCheckpoint, out: Path, options: Options) -> list[str]:
    """A ``default_scaled`` checkpoint whose factors were right, as one of ours: weights and optimizer unchanged."""
    record = replace(checkpoint.record, plugin_version=__version__)
    buffers = {name for name in checkpoint.stored.names if name.endswith(f".{BUFFER}")}
    _write(checkpoint, out, record, lambda name: name not in buffers, _edits(checkpoint, {}, options), options)
    return [f"{DEFAULT_SCALED} blocks are {CLASS} with {record.scheme} now; {len(buffers)} buffers dropped"]


def _write(
    checkpoint: OLMoCoreCheckpoint,
    out: Path,
    record: Record,
    keep: Callable[[str], bool],
    edits: Mapping[str, Edit],
    options: Options,
) -> None:
    """A checkpoint to train on under ``record``; last what marks it as complete."""
    checkpoint.stored.rewrite(out / WEIGHTS, keep, edits, max_bytes=options.shard_bytes)
    if (checkpoint.folder / _TRAINER).is_dir():
        copy_unread(checkpoint.folder / _TRAINER, out / _TRAINER)
    record.write(out)
    fields = {"_CLASS_": CLASS, "scheme": record.scheme.name, **record.scheme.parameters}
    write_json(out / CONFIG_FILE, with_blocks(checkpoint.config, fields | {"initialization": record.scaled_init}))
    if (checkpoint.folder / _COMPLETE).is_file():
        copy_unread(checkpoint.folder / _COMPLETE, out / _COMPLETE)


def with_blocks(value: Any, fields: Mapping[str, Any]) -> Any:
    """The same config with ``fields`` in every plain block config, at every depth, in place of a scheme's."""
    if isinstance(value, list):
        return [with_blocks(item, fields) for item in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: with_blocks(item, fields) for key, item in value.items()}
    if made.get("_CLASS_") in (CLASS, _STOCK_CLASS) or made.get("name") == DEFAULT_SCALED:
        made = {key: item for key, item in made.items() if key not in _OURS} | dict(fields)
        if made.get("name") == DEFAULT_SCALED:
            made["name"] = "default"
    return made


def choose_class(checkpoint: OLMoCoreCheckpoint) -> str:
    """The name of the class that computes the model.

    :raises LNSConfigError: no class computes the same; it names everything that stands in the way.
    """
    model, block = checkpoint.model, checkpoint.blocks[0]
    attention, head = _attention(block), model.get("lm_head") or {}
    name, problems = _shape(block, attention)
    if any(_computed(other) != _computed(block) for other in checkpoint.blocks[1:]):
        problems.append("blocks that differ from each other")
    parts = {"block": block, "attention": attention, "rope": attention.get("rope"), "lm_head": head}
    parts |= {"feed_forward": block.get("feed_forward"), "layer_norm": block.get("layer_norm")}
    parts |= {"lm_head.layer_norm": head.get("layer_norm"), "qk_norm": attention.get("qk_norm")}
    for part, values in parts.items():
        if values is None:
            problems += [f"no {part}"] * (part != "qk_norm")
            continue
        for key, value in {**_DEFAULTS.get(part, {}), **values}.items():
            allowed = _STOCK[part].get(key, _NEUTRAL)
            switched_on = allowed is _NEUTRAL and value is True  # which equals 1
            if key != "_CLASS_" and allowed is not None and (switched_on or value not in allowed):
                problems.append(f"{part}.{key}={value!r}")
    if len({norm.get("eps", 1e-5) for part in _NORMS if (norm := parts[part])}) > 1:
        problems.append("norms of different eps")
    problems += [key for key in ("embedding_norm", "embed_scale") if model.get(key) is not None]
    if problems:
        raise LNSConfigError(
            f"no stock transformers class computes exactly this model (nearest: {name}): {'; '.join(problems)}. "
            "Use --format olmo-core, which keeps the architecture"
        )
    return name


def _attention(block: Mapping[str, Any]) -> Mapping[str, Any]:
    return block.get("sequence_mixer") or block.get("attention") or {}


def _shape(block: Mapping[str, Any], attention: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The nearest class by the places of the norms, and what it has otherwise there."""
    kind, qk, per_head = block_type(block), attention.get("qk_norm") is not None, attention.get("use_head_qk_norm")
    if kind == "reordered_norm":
        missing = not qk or bool(per_head)
        return "Olmo2ForCausalLM", ["reordered_norm blocks without QK-norm over all heads (Olmo2 has it)"] * missing
    if kind != "default":
        return "LlamaForCausalLM", [f"block type {kind}"]
    if qk and not per_head:
        return "Qwen3ForCausalLM", ["QK-norm over all heads (Qwen3's is per head)"]
    return ("Qwen3ForCausalLM" if qk else "LlamaForCausalLM"), []


def _computed(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in _OURS}


def to_huggingface(checkpoint: OLMoCoreCheckpoint, weights: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """OLMo-core's (already folded) weights under transformers' names."""
    name = choose_class(checkpoint)
    norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if name == "Olmo2ForCausalLM":
        norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
    parts = norms | {f"attention.w_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    parts |= {"attention.w_out": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj"}
    parts |= {"feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
    if name != "LlamaForCausalLM":
        parts |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    names = {"embeddings.weight": "model.embed_tokens.weight", "lm_head.norm.weight": "model.norm.weight"}
    for index in range(len(checkpoint.blocks)):
        for ours, theirs in parts.items():
            names[f"blocks.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
    tied = bool(checkpoint.model.get("tie_word_embeddings"))
    if not tied:
        names["lm_head.w_out.weight"] = "lm_head.weight"
    found = set(weights) - ({"lm_head.w_out.weight"} if tied else set())
    if found != set(names):
        odd = sorted(found ^ set(names))
        raise LNSConfigError(f"{checkpoint.folder}: {odd[0]} is not what {name} wants ({len(odd)} such weights)")
    return {theirs: weights[ours] for ours, theirs in names.items()}


def transformers_config(checkpoint: OLMoCoreCheckpoint) -> dict[str, Any]:
    """``config.json`` but for the dtype, in keys that transformers 4 and 5, vLLM and llama.cpp read."""
    model, block = checkpoint.model, checkpoint.blocks[0]
    attention = _attention(block)
    data = checkpoint.config.get("dataset") or {}
    tokens: dict[str, Any] = data.get("tokenizer") or {}
    length = data.get("sequence_length") or (checkpoint.config.get("train_module") or {}).get("max_sequence_length")
    heads = attention["n_heads"]
    sizes = Architecture(
        d_model=model["d_model"],
        n_heads=heads,
        n_kv_heads=attention.get("n_kv_heads") or heads,
        n_layers=model["n_layers"],
        mlp_hidden_size=2 * block["feed_forward"]["hidden_size"],
        rope_theta=attention["rope"].get("theta", 500_000),
        max_sequence_length=length or 2048,
        vocab_size=model["vocab_size"],
        embedding_size=model["vocab_size"],
        weight_tying=bool(model.get("tie_word_embeddings")),
        eos_token_id=tokens.get("eos_token_id", -1),
        pad_token_id=tokens.get("pad_token_id", -1),
        init_std=model.get("init_std", 0.02),
    )
    return huggingface.common(sizes, choose_class(checkpoint)) | {
        "head_dim": attention.get("head_dim") or model["d_model"] // heads,
        "rms_norm_eps": block["layer_norm"].get("eps", 1e-5),
        "attention_bias": False,
    }
