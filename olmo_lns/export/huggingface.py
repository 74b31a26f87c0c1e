"""transformers' folders: opened with or without a scheme, folded into stock models, built from other formats."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF
from olmo_lns.export.open import Opened, readable
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.sites import read_back

#: Largest relative difference of logits between one model in two frameworks: in fp32, and in fp16 or bf16.
_SAME, _SAME_ROUNDED = 1e-4, 0.05


def open(folder: Path, scheme: Scheme | None = None) -> Opened:
    """Open a transformers folder, ours (``lns_llama``, …) or stock; transformers decides which files it reads.

    :param folder: a folder, or a name on the hub. :param scheme: scheme of the training of a stock folder.
    :raises LNSConfigError: transformers cannot load the folder, or weights are missing.
    """
    import transformers

    from olmo_lns.integrations.transformers import register

    register()
    with readable(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        loader = getattr(transformers, auto_class(config))
        model = _loaded(loader, folder, folder, torch_dtype="auto")
    has_tokenizer = not folder.is_dir() or any(folder.glob("tokenizer*"))
    eos = getattr(config, "eos_token_id", None)
    opened = Opened(
        model,
        HF,
        read_back(model),
        folder,
        settings(model),
        tokenizer=str(folder) if has_tokenizer else None,
        max_length=int(getattr(config, "max_position_embeddings", None) or 2048),
        eos_token_id=eos if isinstance(eos, int) else None,
        pad_token_id=getattr(config, "pad_token_id", None),
    )
    return under(opened, scheme) if scheme is not None and opened.scheme.is_pre_ln else opened


def auto_class(config: Any) -> str:
    """Return the auto class for a config's head: ``AutoModelForCausalLM`` for ``LlamaForCausalLM``."""
    name = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    task = name.partition("For")[2] or ("CausalLM" if name.endswith("LMHeadModel") else "")
    return f"AutoModelFor{task}" if task else "AutoModel"


def _loaded(loader: Any, source: Path | None, name: Path, *, complete: bool = False, **how: Any) -> Any:
    """Load a model and check its weights. :param complete: also refuse weights that the model lacks."""
    with readable(name):
        model, loading_info = loader.from_pretrained(source, output_loading_info=True, **how)
    problems = {"is missing": "missing_keys", "has another shape": "mismatched_keys"}
    for problem, key in (problems | ({"has no place": "unexpected_keys"} if complete else {})).items():
        if names := sorted(map(str, loading_info[key])):
            what = f"{names[0]} {problem} in {type(model).__name__} ({len(names)} such weights)"
            raise LNSConfigError(f"{name}: {what}. Expected the weights of this model.")
    return model


def under(opened: Opened, scheme: Scheme) -> Opened:
    """Apply ``scheme`` to a stock transformers model whose weights were trained with it."""
    from olmo_lns.integrations.transformers import apply

    model = apply(opened.model, scheme, trained=True) if not scheme.is_pre_ln else opened.model
    return replace(opened, model=model, scheme=scheme)


def settings(model: Any) -> dict[str, Any]:
    """Return the stock settings of a transformers model, with defaults and without those of a scheme."""
    from transformers import PretrainedConfig

    values = PretrainedConfig.to_dict(model.config)
    values["model_type"] = str(values["model_type"]).removeprefix("lns_")
    removed = ("lns", "auto_map", "_name_or_path", "name_or_path", "architectures", "transformers_version")
    return {name: value for name, value in values.items() if not name.startswith(removed)}


def folded(opened: Opened, dtype: torch.dtype | None = None) -> Opened:
    """Fold a transformers model in place and return it as its stock class.

    :raises LNSConfigError: a scheme that cannot be folded.
    """
    from olmo_lns.integrations.transformers import fold

    model: Any = opened.model
    stock = (model if opened.scheme.is_pre_ln else fold(model, dtype)).to(dtype=dtype)
    return replace(opened, model=stock, scheme=PRE_LN, config=settings(stock))


def vocabulary(model: nn.Module) -> int:
    """Return the number of embedding rows, padding included."""
    return next(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))


def prompt(model: nn.Module, count: int = 1, length: int = 12) -> torch.Tensor:
    """Return random input: token ids, int64 (count, length); for images, fp32 (count, channels, height, width)."""
    generator, config = torch.Generator().manual_seed(0), getattr(model, "config", None)
    if getattr(model, "main_input_name", "") == "pixel_values":
        from olmo_lns.integrations.transformers.models import image_shape

        return torch.randn(image_shape(config, count), generator=generator)
    size = min(vocabulary(model), int(getattr(config, "vocab_size", 1 << 62)))
    return torch.randint(size, (count, length), generator=generator)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits in fp32, (count, length, vocabulary). :param ids: a result of :func:`prompt`."""
    output = model(ids.to(next(model.parameters()).dtype) if ids.is_floating_point() else ids)
    result: torch.Tensor = getattr(output, "logits", output).float()
    return result


def build(values: Mapping[str, Any], state: dict[str, torch.Tensor], source: Path, reference: Any = None) -> Any:
    """Return the causal model of a config's ``values`` with the tensors of ``state``.

    :param reference: the model that it is made from; it must compute the same.
    :raises LNSConfigError: weights that do not fit, or logits that differ.
    """
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    if config.tie_word_embeddings and "lm_head.weight" in state:
        raise LNSConfigError(f"{source} ties its embeddings, yet has a weight of the output layer.")
    loader = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    dtype = next(iter(state.values())).dtype
    model = _loaded(loader, None, source, complete=True, config=config, state_dict=state, torch_dtype=dtype).eval()
    if reference is not None:
        expected, actual = (logits(each, prompt(reference)) for each in (reference, model))
        difference = float((actual - expected).abs().max() / expected.abs().max())
        allowed = _SAME if dtype in (torch.float32, torch.float64) else _SAME_ROUNDED
        if not difference <= allowed:
            raise LNSConfigError(
                f"{source}: {type(model).__name__} does not compute this model: logits differ by {difference:.1e} of "
                f"the largest, expected {allowed:.0e} at most."
            )
    return model


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace the parts of a weight's name that are keys of ``names``.

    >>> renamed("blocks.0.w_out.weight", {"blocks": "layers", "w_out": "o_proj"})
    'layers.0.o_proj.weight'
    """
    for source_part, target_part in names.items():
        name = re.sub(rf"(^|\.){re.escape(source_part)}(?=\.|$)", rf"\1{target_part}", name)
    return name


def tokens(opened: Opened) -> dict[str, int | None]:
    """Return the special tokens of a config; None for an id outside the vocabulary."""
    size = vocabulary(opened.model)
    ids = {"bos_token_id": None, "eos_token_id": opened.eos_token_id, "pad_token_id": opened.pad_token_id}
    return {role: i if isinstance(i, int) and 0 <= i < size else None for role, i in ids.items()}


def save(opened: Opened, out: Path) -> None:
    """Write the model with transformers."""
    model: Any = opened.model
    model.save_pretrained(out)
