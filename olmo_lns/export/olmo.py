"""OLMo's checkpoints: opened by OLMo under the plugin's types, folded, written as stock OLMo or transformers load them.

``x + g * c * f(s * N(x))`` is Pre-LN once ``s`` is in the norm's gain and ``g * c`` in the rows of ``attn_out`` or
``ff_out``, with a learned gate ``g`` and a constant ``c``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import HF, OLMO, fold, huggingface
from olmo_lns.export.open import Opened, load_state, tensors_of
from olmo_lns.schemes import PRE_LN, SUB_LAYERS, Scheme

#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"
#: Setting -> its values in a model that Llama or Olmo computes. The rest is measured.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "activation_type": ("swiglu",),
    "block_type": ("sequential", "llama"),
    "rope": (True,),
    **dict.fromkeys(("alibi", "attention_layer_norm", "embedding_layer_norm", "scale_logits", "norm_after"), (False,)),
}
#: OlmoLayerNorm's eps is a constant in its forward.
_OLMO_EPS = 1e-5


def open(folder: Path, scheme: Scheme | None = None) -> Opened:
    """Open an OLMo checkpoint, unsharded or sharded. :param scheme: laid over a stock type.

    :raises LNSConfigError: OLMo refuses the config, or the weights are not its model's.
    """
    from olmo_lns.integrations.olmo import register

    register()  # before OLMo is imported
    from olmo.config import LayerNormType, ModelConfig
    from olmo.exceptions import OLMoConfigurationError
    from olmo.model import OLMo
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from olmo_lns.integrations.olmo.types import base_type, scheme_of, spell

    path = folder / "config.yaml"
    try:
        saved: Any = OmegaConf.load(path)
        config = ModelConfig.load(path, key="model", validate_paths=False)
        if scheme is not None and scheme_of(config.layer_norm_type).is_pre_ln:
            config.layer_norm_type = LayerNormType(spell(scheme, base_type(config.layer_norm_type)))
        config.init_device = "cpu"
        model = OLMo(config, init_params=False)
    except (OLMoConfigurationError, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise LNSConfigError(f"{path}: {one_line(error)}") from None
    load_state(model, _weights(folder, model), folder)
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


def _weights(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    # Not by OLMo's own loader: that of OLMo 0.6.0 cannot read shards under torch >= 2.6.
    if (folder / "model.pt").is_file():
        try:
            state = torch.load(folder / "model.pt", map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises almost anything for a damaged file
            raise LNSConfigError(
                f"{folder / 'model.pt'} is truncated or not a file of torch.save: {one_line(error)}"
            ) from None
    else:
        state = tensors_of(folder / SHARDED, model.state_dict(), "model.")
    found: dict[str, torch.Tensor] = model._make_state_dict_compatible(state)[0]
    return found


def _settings(config: Any) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, str) else value for name, value in config.asdict().items()}


def blocks(model: Any) -> Iterator[Any]:
    """The blocks of an OLMo model in order, inside their groups where it has groups."""
    held = model.transformer
    yield from (
        (block for group in held.block_groups for block in group) if hasattr(held, "block_groups") else held.blocks
    )


def _readers(block: Any, sub_layer: str) -> list[nn.Module]:
    """The linear layers that read the norm of a sub-layer."""
    if sub_layer == "ff":
        return [block.ff_proj]
    return [block.att_proj] if hasattr(block, "att_proj") else [block.q_proj, block.k_proj, block.v_proj]


def folded(opened: Opened, dtype: torch.dtype | None = None, *, gains: bool = False) -> Opened:
    """Fold the factors of an OLMo model in place and return it as a stock OLMo model.

    :param dtype: of the weights, None: as they are. :param gains: give norms without a gain one, which holds the
        factor; else the linear layers that read them do.
    :raises LNSConfigError: the scheme doesn't fold.
    """
    model: Any = opened.model
    scheme, layers = opened.scheme, model.config.n_layers
    fold.require_foldable(scheme, layers, opened.folder)
    if gains:
        _give_gains(model)
    for number, block in enumerate(blocks(model), start=1):
        for sub_layer in SUB_LAYERS if not scheme.is_pre_ln else ():
            plan, where = scheme.plan(number, layers, sub_layer), f"block {number}, {sub_layer}"
            norm, output = getattr(block, f"{sub_layer}_norm"), getattr(block, f"{sub_layer}_out")
            if plan.norm_scale != 1.0:
                fold.fold_norm(norm, dtype, where=where, readers=_readers(block, sub_layer))
            factor: fold.Factor = plan.branch_scale
            if plan.gate is not None:
                gate = getattr(block, f"{sub_layer}_gate").weight.detach()
                factor = (gate.double() * factor).expand(model.config.d_model)
            if plan.gate is not None or factor != 1.0:
                fold.multiply(output, factor, dtype)
    return _stock(opened, dtype)


def _give_gains(model: Any) -> None:
    norms = [getattr(block, f"{sub_layer}_norm") for block in blocks(model) for sub_layer in SUB_LAYERS]
    for norm in [*norms, model.transformer.ln_f]:
        if norm.weight is None:
            norm.weight = nn.Parameter(torch.ones(model.config.d_model, dtype=next(model.parameters()).dtype))
    model.config.layer_norm_with_affine, model.config.bias_for_layer_norm = True, False


def _stock(opened: Opened, dtype: torch.dtype | None) -> Opened:
    """A stock OLMo model of the same weights, gates left out."""
    from olmo.config import InitFnType, LayerNormType, ModelConfig
    from olmo.model import OLMo

    from olmo_lns.integrations.olmo.types import INIT_FNS, base_type

    model: Any = opened.model
    config = ModelConfig(**model.config.asdict())
    config.layer_norm_type = LayerNormType(base_type(config.layer_norm_type))
    if str(config.init_fn) in INIT_FNS:
        config.init_fn = InitFnType.normal
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


def to_huggingface(opened: Opened, dtype: torch.dtype | None = None, *, keep: bool = False) -> Opened:
    """The transformers model that computes the same: Llama, or Olmo for a LayerNorm without a gain.

    :param keep: leave the factors outside the weights and apply the scheme to the Llama.
    :raises LNSConfigError: the scheme doesn't fold, or no stock class computes this model; it says why.
    """
    from olmo_lns.integrations.olmo.types import base_type

    model: Any = opened.model
    rms = base_type(model.config.layer_norm_type) == "rms"
    _check_plain(model.config, rms, opened.folder)
    if keep:
        _give_gains(model) if rms else None
        stock = _stock(opened, dtype)
    else:
        stock = folded(opened, dtype, gains=rms)
    made = huggingface.build(_config(stock, rms), _renamed(stock.model), opened.folder)
    huggingface.measure(made, stock.model, opened.folder)
    result = replace(stock, model=made, kind=HF, config=huggingface.settings(made))
    return huggingface.under(result, opened.scheme) if keep else result


def _check_plain(config: Any, rms: bool, folder: Path) -> None:
    found = [f"{key}={getattr(config, key)!s}" for key, good in _PLAIN.items() if getattr(config, key) not in good]
    if rms:
        found += ["clip_qkv, which only Olmo has"] * bool(config.clip_qkv)
    elif config.layer_norm_with_affine:
        found.append("a LayerNorm with a gain, which no Llama or Olmo has")
    elif config.layer_norm_eps != _OLMO_EPS:
        found.append(f"layer_norm_eps={config.layer_norm_eps:g}, where Olmo's is {_OLMO_EPS:g}")
    if found:
        raise LNSConfigError(
            f"{folder}: no stock transformers class computes this model: {'; '.join(found)}. Use --format olmo."
        )


def _config(stock: Opened, rms: bool) -> dict[str, Any]:
    """The settings of the transformers config."""
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


def _renamed(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a stock OLMo model under transformers' names, its fused projections taken apart."""
    config, held = model.config, model.transformer
    kv = config.effective_n_kv_heads * config.d_model // config.n_heads
    made = {"model.embed_tokens": held.wte, "model.norm": held.ln_f}
    if not config.weight_tying:
        made["lm_head"] = held.ff_out
    result: dict[str, torch.Tensor] = {}
    for index, block in enumerate(blocks(model)):
        layer = f"model.layers.{index}"
        made |= {f"{layer}.input_layernorm": block.attn_norm, f"{layer}.post_attention_layernorm": block.ff_norm}
        made |= {f"{layer}.self_attn.o_proj": block.attn_out, f"{layer}.mlp.down_proj": block.ff_out}
        for name, up_and_gate in block.ff_proj.named_parameters():
            up, gate = up_and_gate.detach().chunk(2)
            result |= {f"{layer}.mlp.up_proj.{name}": up, f"{layer}.mlp.gate_proj.{name}": gate}
        if not hasattr(block, "att_proj"):
            made |= {f"{layer}.self_attn.{part}_proj": getattr(block, f"{part}_proj") for part in "qkv"}
            continue
        for name, fused in block.att_proj.named_parameters():
            parts = fused.detach().split((config.d_model, kv, kv))
            result |= {f"{layer}.self_attn.{part}_proj.{name}": p for part, p in zip("qkv", parts, strict=True)}
    for name, module in made.items():
        result |= {f"{name}.{part}": parameter.detach() for part, parameter in module.named_parameters()}
    return result
