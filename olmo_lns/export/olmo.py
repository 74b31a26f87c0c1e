"""Open OLMo's checkpoints, fold them, and write them for stock OLMo or transformers.

Under a scheme, a sub-layer computes ``x + g * c * f(s * N(x))`` with a learned gate ``g`` and constants ``c`` and
``s``. The fold multiplies the weight of the norm by ``s``, and the rows of ``attn_out`` or ``ff_out`` by ``g * c``. The
result is a stock Pre-LN block that computes the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, OLMO, huggingface
from olmo_lns.export.checkpoint import OpenCheckpoint, load_state, reporting_load_errors
from olmo_lns.export.interface import Format
from olmo_lns.export.metadata import load_tensors, read_metadata
from olmo_lns.export.prompts import prompt
from olmo_lns.folding import Factor, fold_norms, multiplied
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"
#: Sub-layer -> its norm in transformers.
_HF_NORMS = {"attn": "input_layernorm", "ff": "post_attention_layernorm"}
#: Constant eps in the forward of transformers' OlmoLayerNorm.
_OLMO_EPS = 1e-5


def _load(model: Any, folder: Path) -> None:
    """Load the weights. OLMo's own loader is not used, since that of 0.6.0 cannot read shards under torch >= 2.6."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with reporting_load_errors(f"{folder}, its weights,"):
        if (folder / "model.pt").is_file():
            state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True, mmap=True)
            state = model._make_state_dict_compatible(state)[0]
        else:
            metadata = read_metadata(folder / SHARDED).state_dict_metadata
            shards = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in metadata.items()
                if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
            }
            load_tensors(folder / SHARDED, shards)
            state = {name.removeprefix("model."): tensor for name, tensor in shards.items()}
        model.load_state_dict(state, assign=True)


def _settings(config: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, str) else value for name, value in config.asdict().items()}


def _read_by(block: Any, sub_layer: str) -> list[Any]:
    """Return the gain and bias of a sub-layer's norm. For a norm without them, return the matrices that read it."""
    from olmo_lns.integrations.olmo.block import NORMS

    if parameters := list(getattr(block, NORMS[sub_layer]).parameters()):
        return parameters
    names = ("att_proj", "q_proj", "k_proj", "v_proj") if sub_layer == "attn" else ("ff_proj",)
    return [getattr(block, name).weight for name in names if hasattr(block, name)]


def _hf_config(stock: OpenCheckpoint, is_rms: bool) -> dict[str, Any]:
    """Return the settings of the transformers config."""
    model: Any = stock.model
    config = model.config
    mlp_hidden_size = config.mlp_hidden_size or config.mlp_ratio * config.d_model  # of gate and up together
    values = {
        "model_type": "llama" if is_rms else "olmo",
        "vocab_size": config.embedding_size or config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": mlp_hidden_size // 2,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.effective_n_kv_heads,
        "max_position_embeddings": config.max_sequence_length,
        "rope_theta": float(config.rope_theta),
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.weight_tying,
        "attention_bias": bool(config.include_bias),
        **huggingface.special_tokens(stock),
    }
    if is_rms:
        return values | {"rms_norm_eps": config.layer_norm_eps, "mlp_bias": bool(config.include_bias)}
    return values | {"clip_qkv": config.clip_qkv}


def _hf_weights(model: Any, is_rms: bool) -> dict[str, torch.Tensor]:
    """Return the weights of a stock OLMo model under transformers' names. Its fused projections are split."""
    from olmo_lns.integrations.olmo.block import NORMS
    from olmo_lns.integrations.olmo.model import blocks_of

    config, transformer = model.config, model.transformer
    kv_size = config.effective_n_kv_heads * config.d_model // config.n_heads
    modules = {"model.embed_tokens": transformer.wte, "model.norm": transformer.ln_f}
    if not config.weight_tying:
        modules["lm_head"] = transformer.ff_out
    state: dict[str, torch.Tensor] = {}
    for index, block in enumerate(blocks_of(model)):
        layer = f"model.layers.{index}"
        modules |= {f"{layer}.{name}": getattr(block, NORMS[sub_layer]) for sub_layer, name in _HF_NORMS.items()}
        modules |= {f"{layer}.self_attn.o_proj": block.attn_out, f"{layer}.mlp.down_proj": block.ff_out}
        for kind, up_and_gate in block.ff_proj.named_parameters():
            up, gate = up_and_gate.detach().chunk(2)
            state |= {f"{layer}.mlp.up_proj.{kind}": up, f"{layer}.mlp.gate_proj.{kind}": gate}
        if not hasattr(block, "att_proj"):
            modules |= {f"{layer}.self_attn.{part}_proj": getattr(block, f"{part}_proj") for part in "qkv"}
            continue
        for kind, fused in block.att_proj.named_parameters():
            split = fused.detach().split((config.d_model, kv_size, kv_size))
            state |= {f"{layer}.self_attn.{part}_proj.{kind}": rows for part, rows in zip("qkv", split, strict=True)}
    for name, module in modules.items():
        if is_rms and "norm" in name and module.weight is None:  # every norm of Llama has a weight
            state[f"{name}.weight"] = torch.ones_like(transformer.wte.weight[0])
        state |= {f"{name}.{kind}": parameter.detach() for kind, parameter in module.named_parameters()}
    return state


def _has_rms_norms(model: Any) -> bool:
    from olmo_lns.integrations.olmo.norm_types import base_type

    return base_type(model.config.layer_norm_type) == "rms"


class OLMoFormat(Format):
    """OLMo's checkpoints, sharded or not."""

    name = OLMO
    outputs = (OLMO, HF)
    files = (
        "config.yaml with model.pt or model_and_optim/ (OLMo: a step* folder of the run; unshard others with its "
        "scripts/unshard.py)"
    )

    def recognizes(self, folder: Path) -> bool:
        return (folder / "config.yaml").exists() and any((folder / name).exists() for name in ("model.pt", SHARDED))

    def open(self, folder: Path, scheme: Scheme | None = None) -> OpenCheckpoint:
        """Open an OLMo checkpoint, which may be sharded.

        :param folder: folder of the checkpoint.
        :param scheme: scheme of a checkpoint whose config names a stock norm type.
        :raises LNSConfigError: if OLMo refuses the config, or the weights do not fit the model.
        """
        from olmo_lns.integrations.olmo import register

        register()  # must precede the import of OLMo
        from olmo.config import LayerNormType, ModelConfig
        from olmo.model import OLMo
        from omegaconf import OmegaConf

        from olmo_lns.integrations.olmo.norm_types import base_type, scheme_of_type, type_name

        path = folder / "config.yaml"
        with reporting_load_errors(path):
            saved: Any = OmegaConf.load(path)
            config = ModelConfig.load(path, key="model", validate_paths=False)
            if scheme is not None and scheme_of_type(config.layer_norm_type).is_pre_ln:
                config.layer_norm_type = LayerNormType(type_name(scheme, base_type(config.layer_norm_type)))
            config.init_device = "cpu"
            model = OLMo(config, init_params=False)
        _load(model, folder)
        return OpenCheckpoint(
            model,
            OLMO,
            scheme_of_type(config.layer_norm_type),
            folder,
            _settings(config),
            tokenizer=OmegaConf.select(saved, "tokenizer.identifier"),
            max_length=config.max_sequence_length,
            token_dtype=str(OmegaConf.select(saved, "data.memmap_dtype") or "uint16"),
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )

    def folded(self, opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> OpenCheckpoint:
        """Fold the factors of an OLMo model in place and return it as a stock OLMo model, without gates.

        :param dtype: dtype of the weights; None keeps their dtypes.
        :raises LNSConfigError: if the scheme cannot be folded.
        """
        from olmo.config import ModelConfig
        from olmo.model import OLMo

        from olmo_lns.integrations.olmo import norm_types
        from olmo_lns.integrations.olmo.model import blocks_of

        model: Any = opened.model
        scheme = opened.scheme
        with norm_types.stock_names(model.config):
            config = ModelConfig(**model.config.asdict())
        if not scheme.folds_into_pre_ln(config.n_layers):
            raise LNSConfigError(
                f"{opened.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a stock model, because a "
                "Pre-LN block cannot express it. Such a block has no norms on branches or sums, no norms of channel "
                "groups and no weighted shortcut. Run this checkpoint with OLMo and olmo-lns."
            )
        fold_norms(model, lambda: model(prompt(model)), dtype)
        for number, block in enumerate(blocks_of(model), start=1):
            for sub_layer in SUB_LAYERS:
                plan = scheme.plan(number, config.n_layers, sub_layer)
                if not scheme.only_scales_norms(config.n_layers):  # the block multiplies what its norm returns
                    for parameter in _read_by(block, sub_layer):
                        parameter.data = multiplied(parameter.data, plan.norm_scale, dtype)
                factor: Factor = plan.output_scale
                if plan.gate is not None:
                    gate = getattr(block, f"{sub_layer}_gate").weight.detach()
                    factor = (gate.double() * factor).expand(config.d_model)
                for parameter in getattr(block, f"{sub_layer}_out").parameters():
                    parameter.data = multiplied(parameter.data, factor, dtype)
        stock = OLMo(config, init_params=False).eval()
        state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_gate.weight")}
        load_state(stock, state, opened.folder)
        return replace(opened, model=stock.to(dtype=dtype), scheme=PRE_LN, config=_settings(config))

    def require_transformers(self, opened: OpenCheckpoint) -> None:
        model: Any = opened.model
        config, is_rms = model.config, _has_rms_norms(model)
        unsupported = []  # only what 12 random tokens may not reveal; build() compares the logits
        if is_rms and config.clip_qkv:
            unsupported.append("clip_qkv, which only Olmo has")
        if not is_rms and config.layer_norm_with_affine:
            unsupported.append("a LayerNorm with a weight, which neither Llama nor Olmo has")
        if not is_rms and config.layer_norm_eps != _OLMO_EPS:
            unsupported.append(f"layer_norm_eps={config.layer_norm_eps:g}, where Olmo's is {_OLMO_EPS:g}")
        if unsupported:
            raise LNSConfigError(
                f"{opened.folder}: no stock transformers class can represent this model: {'; '.join(unsupported)}. "
                "Use --format olmo."
            )

    def to_transformers(self, stock: OpenCheckpoint) -> OpenCheckpoint:
        """Convert a folded model: to an Olmo if its LayerNorm has no weight, or else to a Llama."""
        is_rms = _has_rms_norms(stock.model)
        values, state = _hf_config(stock, is_rms), _hf_weights(stock.model, is_rms)
        hf_model = huggingface.build(values, state, stock.folder, stock.model)
        return replace(stock, model=hf_model, format=HF, config=huggingface.settings(hf_model))

    def save(self, opened: OpenCheckpoint, out: Path) -> None:
        """Write ``config.yaml`` and ``model.pt`` as OLMo does, for stock OLMo."""
        from omegaconf import OmegaConf

        saved: Any = OmegaConf.load(opened.folder / "config.yaml")
        for name in ("layer_norm_type", "init_fn"):
            if name in saved.model:
                saved.model[name] = opened.config[name]
        torch.save(opened.model.state_dict(), out / "model.pt")
        OmegaConf.save(saved, out / "config.yaml")


FORMAT = OLMoFormat()
