"""OLMo-core's checkpoints: opened and saved by OLMo-core; folded for stock OLMo-core and transformers.

==================  =================================================================
LlamaForCausalLM    ``default`` blocks (RMSNorm in front, SwiGLU, RoPE) without QK-norm
Qwen3ForCausalLM    the same with QK-norm per head
Olmo2ForCausalLM    ``reordered_norm`` blocks with QK-norm over all heads
==================  =================================================================
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.export import HF, OLMO_CORE, fold, huggingface
from olmo_lns.export.open import Opened, load_state
from olmo_lns.integrations.olmo_core.config import CLASS
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.sites import read_back

#: Folder of the weights inside a checkpoint of OLMo-core's trainer.
WEIGHTS = "model_and_optim"
#: The name of OLMo-core's own block config in saved configs.
STOCK_CLASS = "olmo_core.nn.transformer.config.TransformerBlockConfig"
_OURS = ("scheme", "exponent", "initialization", "scale_router")
#: OLMo-core's own LNS blocks, and the buffer that holds their factor in most versions.
DEFAULT_SCALED, BUFFER = "default_scaled", "ln_scale"


def open(folder: Path, scheme: Scheme | None = None) -> Opened:
    """Open an OLMo-core checkpoint. :param scheme: of one whose blocks are stock or ``default_scaled``.

    :raises LNSConfigError: OLMo-core isn't installed or refuses the config, or the weights are not its model's.
    """
    try:
        from olmo_core.distributed.checkpoint import get_checkpoint_metadata, load_model_and_optim_state
        from olmo_core.nn.transformer import TransformerConfig
    except ImportError as error:
        raise LNSConfigError(
            f"{folder} needs OLMo-core ({error}): pip install 'olmo-lns[olmo-core]', in an environment without OLMo."
        ) from None
    from olmo_lns.olmo_core import apply

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        values, weights = config["model"], folder / WEIGHTS if (folder / WEIGHTS).is_dir() else folder
    except (ValueError, KeyError, TypeError) as error:
        raise LNSConfigError(f"{folder / 'config.json'} is not the config of an OLMo-core run: {error!r}.") from None
    if scaled := any(block.get("name") == DEFAULT_SCALED for block in _blocks(values)):
        _check_buffers(weights, int(values["n_layers"]), scheme, folder)
    if any(block.get("scale_router") is False for block in _blocks(values)):
        raise LNSConfigError(f"{folder}: scale_router=false cannot be folded into norms alone.")
    try:
        made = TransformerConfig.from_dict(_with_blocks(values, {}, keep=True))
        if scheme is not None and not scheme.is_pre_ln and (scaled or CLASS not in json.dumps(values)):
            apply(made, scheme.name, **scheme.parameters, initialization="upstream")
        model = made.build(init_device="cpu")
        stored = get_checkpoint_metadata(str(weights)).state_dict_metadata
        if missing := sorted(name for name in model.state_dict() if f"model.{name}" not in stored):
            raise LNSConfigError(f"{weights}: {missing[0]} is missing ({len(missing)} such weights).")
        load_model_and_optim_state(str(weights), model)
    except LNSError:
        raise
    except Exception as error:  # OLMo-core's and torch's own, of many kinds
        raise LNSConfigError(f"{folder}: OLMo-core cannot load it: {one_line(error)}") from error
    data = config.get("dataset") or {}
    tokenizer = data.get("tokenizer") or {}
    return Opened(
        model,
        OLMO_CORE,
        read_back(model),
        folder,
        values,
        tokenizer=tokenizer.get("identifier"),
        max_length=int(data.get("sequence_length") or 2048),
        token_dtype=str(data.get("dtype") or "uint16"),
        eos_token_id=tokenizer.get("eos_token_id"),
        pad_token_id=tokenizer.get("pad_token_id"),
    )


def _blocks(value: Any) -> list[dict[str, Any]]:
    """Every block config inside a model's config."""
    if isinstance(value, list):
        return [block for item in value for block in _blocks(item)]
    if not isinstance(value, dict):
        return []
    own = [value] if value.get("_CLASS_") in (CLASS, STOCK_CLASS) or value.get("name") == DEFAULT_SCALED else []
    return own + [block for item in value.values() for block in _blocks(item)]


def _with_blocks(values: Mapping[str, Any], fields: Mapping[str, Any], *, keep: bool = False) -> dict[str, Any]:
    """A copy whose blocks have ``fields`` and are ``default`` instead of ``default_scaled``.

    :param keep: the fields of our block config.
    """
    made = copy.deepcopy(dict(values))
    for block in _blocks(made):
        for name in () if keep else _OURS:
            block.pop(name, None)
        block.update(fields)
        if block.get("name") == DEFAULT_SCALED:
            block["name"] = "default"
    return made


def _check_buffers(weights: Path, n_layers: int, scheme: Scheme | None, folder: Path) -> None:
    """:raises LNSConfigError: ``default_scaled`` without ``--scheme``, or buffers that are not the scheme's factors."""
    from olmo_core.distributed.checkpoint import get_checkpoint_metadata, load_keys

    stored = get_checkpoint_metadata(str(weights)).state_dict_metadata
    names = [f"model.blocks.{index}.{BUFFER}" for index in range(n_layers)]
    present = [name for name in names if name in stored]
    values = [float(value) for value in load_keys(str(weights), present)] if present else []
    found = f"the factors {', '.join(f'{value:.3g}' for value in values)} in its buffers" if present else "no buffer"
    if scheme is None:
        raise LNSConfigError(
            f"{folder} was trained with block.name={DEFAULT_SCALED} and has {found}. OLMo-core up to 3.0 overwrites "
            "that buffer when it draws weights; without one the factor was a number that nothing overwrites. Say what "
            "it was trained with: --scheme lns or --scheme preln."
        )
    wanted = [scheme.plan(number, n_layers, "attn").norm_scale for number in range(1, n_layers + 1)]
    wrong = len(values) != n_layers or any(abs(v - w) > 1e-6 * w for v, w in zip(values, wanted, strict=True))
    if present and wrong:
        expected = ", ".join(f"{value:.3g}" for value in wanted)
        raise LNSConfigError(f"{folder} has {found}, expected {expected} under {scheme}: it was not trained with that.")


def folded(opened: Opened, dtype: torch.dtype | None = None) -> Opened:
    """Fold the factors in place and return the model of OLMo-core's own block config.

    :raises LNSConfigError: a scaled norm has no gain.
    """
    from olmo_core.nn.transformer import TransformerConfig

    fold.fold_scaled(opened.model, dtype)
    values = _with_blocks(opened.config, {"_CLASS_": STOCK_CLASS})
    stock = TransformerConfig.from_dict(copy.deepcopy(values)).build(init_device="meta").eval()
    load_state(stock, opened.model.state_dict(), opened.folder)
    return replace(opened, model=stock.to(dtype=dtype), scheme=PRE_LN, config=values)


def save(opened: Opened, out: Path) -> None:
    """Write config.json and the weights as OLMo-core does, for stock OLMo-core."""
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    save_model_and_optim_state(out / WEIGHTS, opened.model)
    saved = json.loads((opened.folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(saved | {"model": opened.config}, indent=2)
    (out / "config.json").write_text(text, encoding="utf-8")


def to_huggingface(opened: Opened, dtype: torch.dtype | None = None, *, keep: bool = False) -> Opened:
    """The transformers model that computes the same. :param keep: leave the factors outside the weights.

    :raises LNSConfigError: no stock class computes this model; it says why.
    """
    model: Any = opened.model
    blocks = list(model.blocks.values())
    name = _class(blocks, opened.folder)
    values = _config(opened, name)
    names = _names(name, model)
    if not keep:
        opened, scheme = folded(opened, dtype), PRE_LN
        model = opened.model
    else:
        scheme = opened.scheme
    state = {theirs: model.get_parameter(ours).detach() for ours, theirs in names.items()}
    left = {parameter for parameter, _ in model.named_parameters()} - set(names)
    if left:
        raise LNSConfigError(f"{opened.folder}: {min(left)} has no place in {name}. Use --format olmo-core.")
    made = huggingface.build(values, state, opened.folder)
    result = replace(opened, model=made, kind=HF, config=huggingface.settings(made), scheme=PRE_LN)
    if keep:
        return huggingface.under(result, scheme)
    huggingface.measure(made, opened.model, opened.folder)
    return result


def _class(blocks: list[Any], folder: Path) -> str:
    """The nearest class, by the places of the norms; it is measured afterwards."""
    attention = blocks[0].attention
    windows = {getattr(getattr(block.attention, "backend", None), "window_size", (-1, -1)) for block in blocks}
    problems = ["a sliding window"] * (windows != {(-1, -1)})
    rope = getattr(attention, "rope", None)
    problems += ["no RoPE"] * (rope is None) + ["scaled RoPE"] * (getattr(rope, "scaling", None) is not None)
    problems += ["blocks that differ"] * (len({type(block) for block in blocks}) > 1)
    kind = next(base.__name__ for base in type(blocks[0]).__mro__ if base.__module__.startswith("olmo_core."))
    qk = getattr(attention, "q_norm", None) is not None
    per_head = qk and bool(getattr(attention, "use_head_qk_norm", False))
    name = "LlamaForCausalLM"
    if kind == "ReorderedNormTransformerBlock":
        name = "Olmo2ForCausalLM"
        problems += ["reordered_norm blocks without QK-norm over all heads"] * (not qk or per_head)
    elif kind == "TransformerBlock":
        name = "Qwen3ForCausalLM" if qk else name
        problems += ["QK-norm over all heads"] * (qk and not per_head)
    else:
        problems.append(f"blocks of class {kind}")
    if problems:
        raise LNSConfigError(
            f"{folder}: no stock transformers class computes this model (nearest: {name}): {'; '.join(problems)}. Use "
            "--format olmo-core."
        )
    return name


def _names(name: str, model: Any) -> dict[str, str]:
    """OLMo-core's names of the weights -> those of a transformers class."""
    norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if name == "Olmo2ForCausalLM":
        norms = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
    parts = norms | {f"attention.w_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    parts |= {"attention.w_out": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj"}
    parts |= {"feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj"}
    if name != "LlamaForCausalLM":
        parts |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    names = {"embeddings.weight": "model.embed_tokens.weight", "lm_head.norm.weight": "model.norm.weight"}
    if not model.tie_word_embeddings:
        names["lm_head.w_out.weight"] = "lm_head.weight"
    for index in range(len(model.blocks)):
        for ours, theirs in parts.items():
            names[f"blocks.{index}.{ours}.weight"] = f"model.layers.{index}.{theirs}.weight"
    return names


def _config(opened: Opened, name: str) -> dict[str, Any]:
    """The settings of the transformers config."""
    model: Any = opened.model
    block = next(iter(model.blocks.values()))
    attention = block.attention
    return {
        "model_type": name.removesuffix("ForCausalLM").lower(),
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": block.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": opened.max_length,
        "rope_theta": float(attention.rope.theta),
        "rms_norm_eps": block.feed_forward_norm.eps,
        "attention_bias": False,
        "tie_word_embeddings": bool(model.tie_word_embeddings),
        **huggingface.tokens(opened),
    }
