"""Open OLMo-core's checkpoints, fold them for stock OLMo-core, and convert them to a Llama."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np
import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, OLMO_CORE, huggingface
from olmo_lns.export.checkpoint import OpenCheckpoint, load_state, reporting_load_errors
from olmo_lns.export.interface import Format
from olmo_lns.export.metadata import load_tensors, read_metadata
from olmo_lns.export.prompts import prompt
from olmo_lns.folding import fold_norms
from olmo_lns.integrations.olmo_core.checkpoint import BLOCK_CONFIG_CLASS, CONFIG_FILE, WEIGHTS, blocks_of
from olmo_lns.pip_extras import install_command
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.sites import read_back

#: Class of OLMo-core's block config, as saved configs name it.
STOCK_CLASS = "olmo_core.nn.transformer.config.TransformerBlockConfig"
#: Settings that only the package's block config has.
_LNS_SETTINGS = ("scheme", "exponent", "initialization")
#: Name of OLMo-core's built-in LNS block, and of the buffer that holds its factor in most versions.
DEFAULT_SCALED, BUFFER = "default_scaled", "ln_scale"


def _require_config_classes(values: Any, source: Path) -> None:
    """Check that a config names configs of OLMo-core or this package only. OLMo-core would call any other class.

    :raises LNSConfigError: if it names something else.
    """
    from olmo_core.config import Config

    for name in _class_names(values):
        module, _, attribute = name.rpartition(".")
        is_known = module.partition(".")[0] in ("olmo_core", "olmo_lns")
        cls = getattr(importlib.import_module(module), attribute, None) if is_known else None
        if not (isinstance(cls, type) and issubclass(cls, Config)):
            raise LNSConfigError(
                f"{source} names the class {name}. Expected configs of OLMo-core. If it is a class of your own, write "
                "the config of OLMo-core that builds the same model into the file."
            )


def _class_names(values: Any) -> Iterator[str]:
    if isinstance(values, dict) and "_CLASS_" in values:
        yield str(values["_CLASS_"])
    if isinstance(values, (dict, list)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _class_names(value)


def _with_stock_blocks(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the model's settings with stock blocks. ``default_scaled`` becomes ``default``."""
    stock = copy.deepcopy(dict(values))
    for block in blocks_of(stock):
        for name in _LNS_SETTINGS:
            block.pop(name, None)
        block["_CLASS_"] = STOCK_CLASS
        if block.get("name") == DEFAULT_SCALED:
            block["name"] = "default"
    return stock


def _check_buffers(weights: Path, n_layers: int, scheme: Scheme | None, folder: Path) -> None:
    """Check that the buffers of ``default_scaled`` blocks have the factors of ``scheme``.

    :raises LNSConfigError: if they have not, or if no scheme was passed.
    """
    metadata = read_metadata(weights).state_dict_metadata
    names = [name for i in range(n_layers) if (name := f"model.blocks.{i}.{BUFFER}") in metadata]
    buffers = {name: torch.empty(getattr(metadata[name], "size", ())) for name in names}
    load_tensors(weights, buffers)
    saved = [float(value) for value in buffers.values()]
    if scheme is None:
        raise LNSConfigError(
            f"{folder} was trained with block.name={DEFAULT_SCALED}. Its config does not show whether the factors took "
            f"effect, and its buffers have the factors {saved}. OLMo-core up to 3.0 overwrites these buffers when it "
            "initializes weights. A version without buffers always applies the factors. Name the scheme of the "
            "training run with --scheme lns or --scheme preln."
        )
    expected = [scheme.plan(number, n_layers, "attn").norm_scale for number in range(1, n_layers + 1)]
    if saved and not (len(saved) == n_layers and np.allclose(saved, expected, rtol=1e-6, atol=0)):
        raise LNSConfigError(
            f"{folder} has the factors {saved} in its buffers, but --scheme {scheme} has the factors {expected}. "
            "Expected the same factors. Pass the scheme that has them. If OLMo-core has overwritten the buffers, no "
            "scheme has them, and the checkpoint cannot be exported."
        )


#: OLMo-core's module names -> Llama's.
_NAMES = {
    "blocks": "model.layers",
    "embeddings": "model.embed_tokens",
    "lm_head.norm": "model.norm",
    "lm_head.w_out": "lm_head",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_out": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def _llama_config(opened: OpenCheckpoint) -> dict[str, Any]:
    """Return the settings of the Llama config."""
    model: Any = opened.model
    block = next(iter(model.blocks.values()))
    attention = block.attention
    return {
        "model_type": "llama",
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
        **huggingface.special_tokens(opened),
    }


class OLMoCoreFormat(Format):
    """OLMo-core's distributed checkpoints."""

    name = OLMO_CORE
    outputs = (OLMO_CORE, HF)
    files = "config.json with model_and_optim/ (OLMo-core)"

    def recognizes(self, folder: Path) -> bool:
        return (folder / CONFIG_FILE).exists() and any((folder / name).exists() for name in (WEIGHTS, ".metadata"))

    def open(self, folder: Path, scheme: Scheme | None = None) -> OpenCheckpoint:
        """Open an OLMo-core checkpoint.

        :param folder: folder of the checkpoint.
        :param scheme: scheme of a checkpoint with stock or ``default_scaled`` blocks.
        :raises LNSConfigError: if OLMo-core is not installed or refuses the config, or the weights do not fit.
        """
        try:
            from olmo_core.nn.transformer import TransformerConfig
        except ImportError as error:
            raise LNSConfigError(
                f"{folder} needs OLMo-core ({error}). Run, in an environment without OLMo: "
                f"{install_command('olmo-core')}"
            ) from None
        from olmo_lns.olmo_core import apply

        with reporting_load_errors(f"{folder / CONFIG_FILE}, expected as OLMo-core's trainer writes it,"):
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            values = config["model"]
            _require_config_classes(values, folder / CONFIG_FILE)
        weights = folder / WEIGHTS if (folder / WEIGHTS).is_dir() else folder
        blocks = blocks_of(values)
        has_default_scaled = any(block.get("name") == DEFAULT_SCALED for block in blocks)
        if has_default_scaled:
            _check_buffers(weights, int(values["n_layers"]), scheme, folder)
        if any(block.pop("scale_router", True) is False for block in blocks):  # only development versions saved false
            raise LNSConfigError(
                f"{folder}: its config has scale_router=false, which only a development version could write. Expected "
                "a router that reads the factor. This checkpoint cannot be exported."
            )
        is_stock = not any(block.get("_CLASS_") == BLOCK_CONFIG_CLASS for block in blocks)
        with reporting_load_errors(folder):
            settings = _with_stock_blocks(values) if has_default_scaled else copy.deepcopy(values)
            model_config = TransformerConfig.from_dict(settings)
            if is_stock and scheme is not None and not scheme.is_pre_ln:
                apply(model_config, scheme.name, **scheme.parameters, initialization="upstream")
            model = model_config.build(init_device="cpu")
            load_tensors(weights, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
        data = config.get("dataset") or {}
        tokenizer = data.get("tokenizer") or {}
        return OpenCheckpoint(
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

    def folded(self, opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> OpenCheckpoint:
        """Fold the factors in place and return the model with OLMo-core's stock block config.

        :param dtype: dtype of the weights; None keeps their dtypes.
        :raises LNSConfigError: if a factor cannot be folded into the weights.
        """
        from olmo_core.nn.transformer import TransformerConfig

        fold_norms(opened.model, lambda: opened.model(prompt(opened.model)), dtype)
        values = _with_stock_blocks(opened.config)
        stock = TransformerConfig.from_dict(copy.deepcopy(values)).build(init_device="meta").eval()
        load_state(stock, opened.model.state_dict(), opened.folder)
        return replace(opened, model=stock.to(dtype=dtype), scheme=PRE_LN, config=values)

    def require_transformers(self, opened: OpenCheckpoint) -> None:
        model: Any = opened.model
        blocks = list(model.blocks.values())
        unsupported = []  # only what 12 random tokens may not reveal; build() compares the logits
        if any(
            getattr(getattr(block.attention, "backend", None), "window_size", (-1, -1)) != (-1, -1) for block in blocks
        ):
            unsupported.append("a sliding window")
        if any(block.attention.rope is None or getattr(block.attention.rope, "scaling", None) for block in blocks):
            unsupported.append("no RoPE, or scaled RoPE")
        if any(getattr(block.attention, "clip_qkv", None) for block in blocks):
            unsupported.append("clip_qkv")
        if not all(hasattr(block, "feed_forward") and hasattr(block, "feed_forward_norm") for block in blocks):
            unsupported.append("blocks without a dense feed-forward")
        if unsupported:
            raise LNSConfigError(
                f"{opened.folder}: stock Llama cannot represent this model: {', '.join(unsupported)}. "
                "Use --format olmo-core."
            )

    def to_transformers(self, stock: OpenCheckpoint) -> OpenCheckpoint:
        """Convert a folded model to a Llama."""
        model: Any = stock.model
        state = {huggingface.renamed(name, _NAMES): parameter.detach() for name, parameter in model.named_parameters()}
        llama = huggingface.build(_llama_config(stock), state, stock.folder, model)
        return replace(stock, model=llama, format=HF, config=huggingface.settings(llama))

    def save(self, opened: OpenCheckpoint, out: Path) -> None:
        """Write config.json and the weights as OLMo-core does, for stock OLMo-core."""
        from olmo_core.distributed.checkpoint import save_model_and_optim_state

        save_model_and_optim_state(out / WEIGHTS, opened.model)
        saved = json.loads((opened.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        (out / CONFIG_FILE).write_text(json.dumps(saved | {"model": opened.config}, indent=2), encoding="utf-8")


FORMAT = OLMoCoreFormat()
