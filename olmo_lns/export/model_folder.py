"""transformers' folders as checkpoints: model folders of ours (``lns_llama``, …), and those of the paper's authors.

A folder of ours is folded into the stock class of its family, a weight at a time. The authors' training script
(github.com/lmsdss/LayerNorm-Scaling) saves a folder (config.json, pytorch_model.bin) of a patched ``modeling_llama``
that multiplies both norms of layer ``i`` by ``1/sqrt(i+1)``. Nothing in it says so: a stock Llama loads it and runs
without the factor. Whoever says ``--source authors`` says that it was trained with ``NORM_TYPE=LNS``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns.checkpoints import read_json
from olmo_lns.checkpoints.olmo import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor, check_shapes, read_weights, write_safetensors
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import HF, huggingface
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.sources import NONE, Options, PlannedExport, Source, Stock, plan_export, set_dtype, write_tokenizer
from olmo_lns.record import Record
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, Scheme


def is_ours(folder: Path) -> bool:
    """Whether ``folder`` holds a transformers model whose type is one of ours."""
    from olmo_lns.integrations.transformers.families import PREFIX

    try:
        return str(read_json(folder / "config.json").get("model_type", "")).startswith(PREFIX)
    except LNSConfigError:
        return False


class ModelFolder(Source):
    name = "transformers"
    kind = "a transformers model"
    formats = (HF,)
    recognises = staticmethod(is_ours)

    def fold(self, folder: Path, options: Options) -> PlannedExport:
        from olmo_lns.integrations.transformers import fold, fold_factors
        from olmo_lns.integrations.transformers.models import record_of

        def skeleton(kind: Any, config: Any) -> Any:
            with torch.device("meta"):
                return kind(config)

        model = _loaded(folder, skeleton)  # the model of its config, without data
        options.require_exponent(record_of(model.config), folder)
        kind, record, weights = type(model).__name__, model.config.lns_record, read_weights(folder)
        _check(model, weights, folder)
        factors: dict[str, Factor] = dict(fold_factors(model))
        config = fold(model).config
        folded = scaled(weights, factors, options.rounding, options.dtype)
        config.architectures = [type(model).__name__]
        if options.dtype is not None:
            set_dtype(config, options.dtype)

        def write(out: Path) -> list[str]:
            lines = [f"{kind} -> {type(model).__name__}: {record['scheme']} folded into the weights"]
            lines.append("adapters trained on the unfolded model do not fit this one: merge them first, then export")
            lines.append(_tokenizer(folder, out, options.tokenizer, config.to_dict()))
            write_safetensors(out, folded, options.shard_bytes)
            if (generation := folder / "generation_config.json").is_file():
                copy_unread(generation, out / generation.name)
            config.save_pretrained(out)
            return lines

        return PlannedExport(write, folded, config.to_dict())

    def train(self, folder: Path, options: Options) -> PlannedExport:
        raise LNSConfigError(
            f"{folder} is a transformers folder of ours already: train on it as it is, and verify its folded export"
        )

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        return load(folder).float().eval()


def _check(model: Any, weights: Mapping[str, LazyTensor], source: Path) -> None:
    """:raises LNSConfigError: weights are missing, unexpected or of another shape; of tied ones any may be there."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for tied in names.values():
        if any(name in weights for name in tied):
            for name in set(tied) - set(weights):
                expected.pop(name, None)
    try:
        check_shapes(weights, expected, source)
    except LNSConfigError as error:
        raise LNSConfigError(f"{error}. One that another transformers saved: load and save it with this one") from None


def load(source: Path) -> Any:
    """The model with its factors outside the weights, as saved. :raises LNSConfigError: it cannot be loaded."""
    return _loaded(source, lambda kind, config: kind.from_pretrained(source, config=config))


def _loaded(source: Path, make: Callable[[Any, Any], Any]) -> Any:
    """``make(class, config)`` of the folder."""
    import transformers

    from olmo_lns.integrations.transformers import register
    from olmo_lns.integrations.transformers.models import class_of

    register()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        return make(class_of(config), config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LNSConfigError(f"{source}: transformers cannot load it: {one_line(error)}") from error


def _tokenizer(source: Path, out: Path, asked: str | None, config: dict[str, Any]) -> str:
    from transformers import AutoTokenizer

    if asked == NONE:
        return "no tokenizer, as asked"
    if asked is not None:
        return write_tokenizer(out, asked, config, source)
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return "no tokenizer: the folder has none"
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return "tokenizer: the folder's own"


class Authors(Source):
    """Their files say nothing about the norms, so they are never recognised."""

    name = "authors"
    kind = "the paper's LLaMA"
    formats = (HF,)
    recognises = staticmethod(lambda folder: False)

    def fold(self, folder: Path, options: Options) -> PlannedExport:
        config, model, weights = _opened(folder)
        exponent = DEFAULT_EXPONENT if options.exponent is None else options.exponent
        scheme = Scheme.of("lns", exponent=exponent)
        factors: dict[str, Factor] = {
            f"{name}.weight": scheme.plan(index + 1, model.n_layers, "attn").norm_scale
            for index in range(model.n_layers)
            for name in huggingface.llama_names(index)
        }
        values = huggingface.transformers_config(model)
        values |= huggingface.special_tokens(config.get("eos_token_id"), config.get("pad_token_id"), model.embeddings)
        stock = Stock(
            values | {"bos_token_id": config.get("bos_token_id")},
            scaled(weights, factors, options.rounding, options.dtype),
            "the authors' LLaMA with the factor 1/sqrt(i+1) of layer i inside its norms. Their files do not say which "
            "NORM_TYPE they were trained with: LNS is taken on your word",
            str(folder) if any(folder.glob("tokenizer*")) else None,
            folder,
        )
        record = Record(scheme, "rms", "plain", folded=True)
        return plan_export(stock, record, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        _, model, weights = _opened(folder)
        return huggingface.hooked_llama(model, weights, scheme=exported.scheme if exported and exported.folded else LNS)


def _opened(folder: Path) -> tuple[dict[str, Any], Architecture, dict[str, LazyTensor]]:
    """Their config, their model, and its weights as they are, in transformers' names.

    :raises LNSConfigError: not their layout, or damaged.
    """
    config, path = read_json(folder / "config.json"), folder / "config.json"
    if config.get("model_type") != "llama":
        raise LNSConfigError(f"{path} is not the config of a Llama")
    if config.get("lns"):
        raise LNSConfigError(f"{path} says lns: {config['lns']!r}: the factor is inside the weights already")
    model = _architecture(config, path)
    # RoPE's frequencies, which older transformers saved too, are left out.
    weights = {n: tensor for n, tensor in read_weights(folder).items() if not n.endswith("rotary_emb.inv_freq")}
    model.check_weights(weights, folder, lambda: _llama_shapes(model))
    return config, model, weights


def _architecture(config: Mapping[str, Any], path: Path) -> Architecture:
    try:
        heads = int(config["num_attention_heads"])
        model = Architecture(
            d_model=int(config["hidden_size"]),
            n_heads=heads,
            n_kv_heads=int(config.get("num_key_value_heads") or heads),
            n_layers=int(config["num_hidden_layers"]),
            mlp_hidden_size=2 * int(config["intermediate_size"]),
            rope=True,
            rope_theta=float(config.get("rope_theta") or 10_000),
            layer_norm_type="rms",
            layer_norm_eps=float(config["rms_norm_eps"]),
            max_sequence_length=int(config.get("max_position_embeddings") or 2048),
            include_bias=False,
            vocab_size=int(config["vocab_size"]),
            embedding_size=int(config["vocab_size"]),
            weight_tying=bool(config.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LNSConfigError(f"{path}: missing or wrong value: {error!r}") from None
    return model.checked(path)


def _llama_shapes(model: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the same model in transformers."""
    empty = {name: LazyTensor.of(torch.empty(shape, device="meta")) for name, shape in model.shapes().items()}
    return {name: tensor.shape for name, tensor in huggingface.to_huggingface(model, empty).items()}
