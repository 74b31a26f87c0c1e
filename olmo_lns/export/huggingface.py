"""transformers' folders: opened with or without a scheme, folded into stock models, built from other formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.export import HF
from olmo_lns.export.fold import check_finite
from olmo_lns.export.open import Opened, load_state
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.sites import read_back

#: Largest relative difference of logits between one model in two frameworks: in fp32, and in fp16 or bf16.
_SAME = {torch.float32: 1e-4, torch.float64: 1e-4}
_SAME_ROUNDED = 0.05


def open(folder: Path, scheme: Scheme | None = None, **how: Any) -> Opened:
    """Open a transformers folder, ours (``lns_llama``, …) or stock; its own loader decides which files it reads.

    :param folder: or a name of the hub. :param scheme: that a stock folder was trained with.
    :param how: for ``from_pretrained``; None is as if it were not given.
    :raises LNSConfigError: transformers cannot load it, or weights are missing.
    """
    import transformers

    from olmo_lns.integrations.transformers import register

    register()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        loader = getattr(transformers, auto_class(config))
        given = {name: value for name, value in how.items() if value is not None}
        model, found = loader.from_pretrained(folder, torch_dtype="auto", output_loading_info=True, **given)
    except LNSError:
        raise
    except Exception as error:  # transformers raises almost anything for a folder that it cannot load
        raise LNSConfigError(f"{folder}: transformers cannot load it: {one_line(error)}") from None
    for problem, key in (("is missing", "missing_keys"), ("has another shape", "mismatched_keys")):
        if names := sorted(map(str, found[key])):
            raise LNSConfigError(f"{folder}: {names[0]} {problem} ({len(names)} such weights). Expected its model's.")
    opened = Opened(
        model,
        HF,
        read_back(model),
        folder,
        settings(model),
        tokenizer=str(folder),
        max_length=int(getattr(config, "max_position_embeddings", None) or 2048),
        eos_token_id=getattr(config, "eos_token_id", None),
        pad_token_id=getattr(config, "pad_token_id", None),
    )
    return under(opened, scheme) if scheme is not None and opened.scheme.is_pre_ln else opened


def auto_class(config: Any) -> str:
    """The auto class of the head that a config names: ``AutoModelForCausalLM`` for ``LlamaForCausalLM``."""
    name = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    task = name.partition("For")[2] or ("CausalLM" if name.endswith("LMHeadModel") else "")
    return f"AutoModelFor{task}" if task else "AutoModel"


def under(opened: Opened, scheme: Scheme) -> Opened:
    """Apply ``scheme`` to a stock transformers model whose weights were trained with it."""
    from olmo_lns.integrations.transformers import apply

    model = apply(opened.model, scheme, trained=True) if not scheme.is_pre_ln else opened.model
    return replace(opened, model=model, scheme=scheme)


def settings(model: Any) -> dict[str, Any]:
    """The stock settings of a transformers model, defaults included, without a scheme's own."""
    from transformers import PretrainedConfig

    values = PretrainedConfig.to_dict(model.config)
    values["model_type"] = str(values["model_type"]).removeprefix("lns_")
    own = ("lns", "auto_map", "_name_or_path", "name_or_path", "architectures", "transformers_version")
    return {name: value for name, value in values.items() if not name.startswith(own)}


def folded(opened: Opened, dtype: torch.dtype | None = None) -> Opened:
    """Fold a transformers model in place and return it as its stock class.

    :raises LNSConfigError: adapters, or the scheme doesn't fold.
    """
    from olmo_lns.integrations.transformers import fold

    model: Any = opened.model
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise LNSConfigError(f"{opened.folder}: the model has adapters. Merge them first (merge_and_unload()).")
    if dtype is not None:  # products are rounded once
        model.to(torch.promote_types(model.dtype, dtype))
    stock = fold(model).to(dtype=dtype)
    check_finite(stock.named_parameters())
    return replace(opened, model=stock, scheme=PRE_LN, config=settings(stock))


def vocabulary(model: nn.Module) -> int:
    """Rows of the embedding, padding included."""
    return next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


def prompt(model: nn.Module, count: int = 1, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random input: token ids, int64 (count, length); for a model of images, fp32 (count, channels, height, width)."""
    generator, config = torch.Generator().manual_seed(seed), getattr(model, "config", None)
    if getattr(model, "main_input_name", "") == "pixel_values":
        shape = (count, config.num_channels, config.image_size, config.image_size)  # type: ignore[union-attr]
        return torch.randn(shape, generator=generator)
    size = min(vocabulary(model), int(getattr(config, "vocab_size", 1 << 62)))
    return torch.randint(size, (count, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor | None = None) -> torch.Tensor:
    """Logits in fp32, (count, length, vocabulary). :param ids: as :func:`prompt` gives them; default: some."""
    ids = prompt(model) if ids is None else ids
    output = model(ids.to(next(model.parameters()).dtype) if ids.is_floating_point() else ids)
    result: torch.Tensor = getattr(output, "logits", output).float()
    return result


def require_same(found: torch.Tensor, expected: torch.Tensor, model: Any, what: str) -> None:
    """:raises LNSConfigError: the logits of two models differ by more than their dtype explains."""
    allowed = _SAME.get(next(model.parameters()).dtype, _SAME_ROUNDED)
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= allowed:
        raise LNSConfigError(
            f"{what}: logits differ by {difference:.1e} of the largest, expected {allowed:.0e} at most."
        )


def build(values: Mapping[str, Any], state: Mapping[str, torch.Tensor], source: Path) -> Any:
    """The causal model of a config's ``values`` with the tensors of ``state``.

    :raises LNSConfigError: they don't fit.
    """
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    _give(model, state, source)
    return model.to(dtype=next(iter(state.values())).dtype)


def _give(model: Any, state: Mapping[str, torch.Tensor], source: Path) -> None:
    """Load into a model on the meta device, whose tables (RoPE) are made anew on the CPU."""
    shared = {name for name, p in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    state = dict(state)
    for name in shared - set(state):  # of tied weights one is stored
        twin = model.get_parameter(name)
        state[name] = state[next(n for n, p in model.named_parameters() if p is twin)]
    load_state(model, state, source)
    model.tie_weights()
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh = type(module)(config=model.config)
            module.__dict__["_buffers"] = fresh._buffers


def measure(model: Any, reference: Any, source: Path) -> None:
    """:raises LNSConfigError: a converted model computes something else than the model that it was made from."""
    name, ids = type(model).__name__, prompt(reference)
    require_same(logits(model, ids), logits(reference, ids), model, f"{source}: {name} doesn't compute this model")


def tokens(opened: Opened) -> dict[str, int | None]:
    """The special tokens of a config; an id outside the vocabulary is left out."""
    size = vocabulary(opened.model)
    ids = {"bos_token_id": None, "eos_token_id": opened.eos_token_id, "pad_token_id": opened.pad_token_id}
    return {role: i if isinstance(i, int) and 0 <= i < size else None for role, i in ids.items()}


def save(opened: Opened, out: Path, max_shard_size: str = "5GB") -> None:
    """Write the model as transformers does. :param max_shard_size: of a file, such as ``2GB``."""
    model: Any = opened.model
    model.save_pretrained(out, max_shard_size=max_shard_size)
