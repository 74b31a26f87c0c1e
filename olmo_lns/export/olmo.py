"""OLMo's checkpoints: opened by OLMo under the plugin's types, folded, written as stock OLMo or transformers load them.

``x + g * c * f(s * N(x))`` is Pre-LN once ``s`` is in the norm's gain and ``g * c`` in the rows of ``attn_out`` or
``ff_out``, with a learned gate ``g`` and a constant ``c``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, OLMO, huggingface
from olmo_lns.export.open import Opened, load_state, readable
from olmo_lns.fold import Factor, fold_norms, multiplied
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"
#: OlmoLayerNorm's eps is a constant in its forward.
_OLMO_EPS = 1e-5


def open(folder: Path, scheme: Scheme | None = None) -> Opened:
    """Open an OLMo checkpoint, unsharded or sharded.

    :param scheme: scheme of a checkpoint with a stock type.
    :raises LNSConfigError: OLMo refuses the config, or the weights are not its model's.
    """
    from olmo_lns.integrations.olmo import register

    register()  # before OLMo is imported
    from olmo.config import LayerNormType, ModelConfig
    from olmo.model import OLMo
    from omegaconf import OmegaConf

    from olmo_lns.integrations.olmo.types import base_type, scheme_of, spell

    path = folder / "config.yaml"
    with readable(path):
        saved: Any = OmegaConf.load(path)
        config = ModelConfig.load(path, key="model", validate_paths=False)
        if scheme is not None and scheme_of(config.layer_norm_type).is_pre_ln:
            config.layer_norm_type = LayerNormType(spell(scheme, base_type(config.layer_norm_type)))
        config.init_device = "cpu"
        model = OLMo(config, init_params=False)
    _load(model, folder)
    return Opened(
        model,
        OLMO,
        scheme_of(config.layer_norm_type),
        folder,
        _settings(config),
        tokenizer=OmegaConf.select(saved, "tokenizer.identifier"),
        max_length=config.max_sequence_length,
        token_dtype=str(OmegaConf.select(saved, "data.memmap_dtype") or "uint16"),
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )


def _load(model: Any, folder: Path) -> None:
    # Not by OLMo's own loader: that of OLMo 0.6.0 cannot read shards under torch >= 2.6.
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with readable(f"{folder}, its weights,"):
        if (folder / "model.pt").is_file():
            state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True, mmap=True)
            state = model._make_state_dict_compatible(state)[0]
        else:
            entries = FileSystemReader(folder / SHARDED).read_metadata().state_dict_metadata
            shards = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in entries.items()
                if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
            }
            load(shards, checkpoint_id=folder / SHARDED, no_dist=True)
            state = {name.removeprefix("model."): tensor for name, tensor in shards.items()}
        model.load_state_dict(state, assign=True)


def _settings(config: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, str) else value for name, value in config.asdict().items()}


def folded(opened: Opened, dtype: torch.dtype | None = None) -> Opened:
    """Fold the factors of an OLMo model in place and return it as a stock OLMo model, without gates.

    :param dtype: of the weights, None: as they are.
    :raises LNSConfigError: a scheme that cannot be folded.
    """
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo import types
    from olmo_lns.integrations.olmo.model import blocks_of

    model: Any = opened.model
    scheme = opened.scheme
    with types.stock(model.config):
        config = ModelConfig(**model.config.asdict())
    if not scheme.folds_into_pre_ln(config.n_layers):
        raise LNSConfigError(
            f"{opened.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a stock model: a Pre-LN "
            "block has no place for norms on branches or sums, norms of channel groups, or a weighted shortcut."
        )
    fold_norms(model, lambda: model(huggingface.prompt(model)), dtype)
    for number, block in enumerate(blocks_of(model), start=1):
        for sub_layer in SUB_LAYERS:
            plan = scheme.plan(number, config.n_layers, sub_layer)
            factor: Factor = plan.branch_scale
            if plan.gate is not None:
                gate = getattr(block, f"{sub_layer}_gate").weight.detach()
                factor = (gate.double() * factor).expand(config.d_model)
            for parameter in getattr(block, f"{sub_layer}_out").parameters():
                parameter.data = multiplied(parameter.data, factor, dtype)
    stock = OLMo(config, init_params=False).eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_gate.weight")}
    load_state(stock, state, opened.folder)
    return replace(opened, model=stock.to(dtype=dtype), scheme=PRE_LN, config=_settings(config))


def save(opened: Opened, out: Path) -> None:
    """Write ``config.yaml`` and ``model.pt`` as OLMo does, for stock OLMo."""
    from omegaconf import OmegaConf

    saved: Any = OmegaConf.load(opened.folder / "config.yaml")
    for name in ("layer_norm_type", "init_fn"):
        if name in saved.model:
            saved.model[name] = opened.config[name]
    torch.save(opened.model.state_dict(), out / "model.pt")
    OmegaConf.save(saved, out / "config.yaml")


def to_huggingface(opened: Opened, dtype: torch.dtype | None = None) -> Opened:
    """Return the transformers model that computes the same: Llama, or Olmo for a LayerNorm without a gain.

    :raises LNSConfigError: a scheme that cannot be folded, or a setting that no stock class has.
    """
    from olmo_lns.integrations.olmo.types import base_type

    model: Any = opened.model
    config, rms = model.config, base_type(model.config.layer_norm_type) == "rms"
    problems = []  # settings that 12 random tokens may not show; huggingface.build measures the others
    if rms and config.clip_qkv:
        problems.append("clip_qkv, which only Olmo has")
    if not rms and config.layer_norm_with_affine:
        problems.append("a LayerNorm with a gain, which no Llama or Olmo has")
    if not rms and config.layer_norm_eps != _OLMO_EPS:
        problems.append(f"layer_norm_eps={config.layer_norm_eps:g}, where Olmo's is {_OLMO_EPS:g}")
    if problems:
        raise LNSConfigError(
            f"{opened.folder}: no stock transformers class computes this model: {'; '.join(problems)}. Use --format "
            "olmo."
        )
    stock = folded(opened, dtype)
    converted = huggingface.build(_config(stock, rms), _renamed(stock.model, rms), opened.folder, stock.model)
    return replace(stock, model=converted, kind=HF, config=huggingface.settings(converted))


def _config(stock: Opened, rms: bool) -> dict[str, Any]:
    """Return the settings of the transformers config."""
    model: Any = stock.model
    config = model.config
    inner = config.mlp_hidden_size or config.mlp_ratio * config.d_model
    values = {
        "model_type": "llama" if rms else "olmo",
        "vocab_size": config.embedding_size or config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": inner // 2,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.effective_n_kv_heads,
        "max_position_embeddings": config.max_sequence_length,
        "rope_theta": float(config.rope_theta),
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.weight_tying,
        "attention_bias": bool(config.include_bias),
        **huggingface.tokens(stock),
    }
    if rms:
        return values | {"rms_norm_eps": config.layer_norm_eps, "mlp_bias": bool(config.include_bias)}
    return values | {"clip_qkv": config.clip_qkv}


def _renamed(model: Any, rms: bool) -> dict[str, torch.Tensor]:
    """Return the weights of a stock OLMo model under transformers' names, its fused projections taken apart."""
    from olmo_lns.integrations.olmo.model import blocks_of

    config, transformer = model.config, model.transformer
    kv = config.effective_n_kv_heads * config.d_model // config.n_heads
    modules = {"model.embed_tokens": transformer.wte, "model.norm": transformer.ln_f}
    if not config.weight_tying:
        modules["lm_head"] = transformer.ff_out
    state: dict[str, torch.Tensor] = {}
    for index, block in enumerate(blocks_of(model)):
        layer = f"model.layers.{index}"
        modules |= {f"{layer}.input_layernorm": block.attn_norm, f"{layer}.post_attention_layernorm": block.ff_norm}
        modules |= {f"{layer}.self_attn.o_proj": block.attn_out, f"{layer}.mlp.down_proj": block.ff_out}
        for name, up_and_gate in block.ff_proj.named_parameters():
            up, gate = up_and_gate.detach().chunk(2)
            state |= {f"{layer}.mlp.up_proj.{name}": up, f"{layer}.mlp.gate_proj.{name}": gate}
        if not hasattr(block, "att_proj"):
            modules |= {f"{layer}.self_attn.{part}_proj": getattr(block, f"{part}_proj") for part in "qkv"}
            continue
        for name, fused in block.att_proj.named_parameters():
            parts = fused.detach().split((config.d_model, kv, kv))
            state |= {f"{layer}.self_attn.{part}_proj.{name}": p for part, p in zip("qkv", parts, strict=True)}
    for name, module in modules.items():
        if rms and "norm" in name and module.weight is None:  # Llama's norms have a gain
            state[f"{name}.weight"] = torch.ones_like(transformer.wte.weight[0])
        state |= {f"{name}.{part}": parameter.detach() for part, parameter in module.named_parameters()}
    return state
