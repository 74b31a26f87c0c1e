"""Open transformers' checkpoints, fold them into stock models, and build models from the weights of other formats."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import torch

from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF
from olmo_lns.export.checkpoint import OpenCheckpoint, reporting_load_errors
from olmo_lns.export.interface import Format
from olmo_lns.export.prompts import logits, prompt, vocabulary
from olmo_lns.export.saved_weights import SavedWeights, require_one_head, widest
from olmo_lns.export.spellings import rewrite_config
from olmo_lns.integrations.transformers.spellings import with_all_spellings
from olmo_lns.schemes import PRE_LN, Scheme
from olmo_lns.sites import read_back

#: Largest relative difference of the logits of one model in two frameworks: in fp32, and in fp16 or bf16.
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 0.05
#: Settings with which a config would make transformers download and run a kernel of the hub.
_NOT_READ = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def auto_class(config: Any) -> str:
    """Return the auto class for the architecture in a config: ``AutoModelForCausalLM`` for ``LlamaForCausalLM``."""
    name = (getattr(config, "architectures", None) or ["ForCausalLM"])[0]
    task = name.partition("For")[2] or ("CausalLM" if name.endswith("LMHeadModel") else "")
    return f"AutoModelFor{task}" if task else "AutoModel"


def _load(loader: Any, path: Path | None, source: Path, *, strict: bool = False, **options: Any) -> Any:
    """Load a model and check that it has all of its weights.

    :param strict: also refuse a weight that the model does not have.
    :raises LNSConfigError: if a weight is missing or has another shape.
    """
    with reporting_load_errors(source):
        model, info = loader.from_pretrained(path, output_loading_info=True, **options)
    problems = {"missing_keys": "the weight {} is missing", "mismatched_keys": "the weight {} has another shape"}
    if strict:
        problems["unexpected_keys"] = "the model has no weight {}"
    for key, problem in problems.items():
        if names := sorted(map(str, info[key])):
            others = f", and the same holds for {len(names) - 1} others" if len(names) > 1 else ""
            raise LNSConfigError(
                f"{source} was loaded as {type(model).__name__}, but {problem.format(names[0])}{others}. Expected all "
                "weights of this model, in the shapes that its config gives. Restore the checkpoint, or correct its "
                "config."
            )
    return model


def with_scheme(opened: OpenCheckpoint, scheme: Scheme) -> OpenCheckpoint:
    """Apply ``scheme`` to a stock transformers model whose weights were trained with it."""
    from olmo_lns.integrations.transformers import apply

    model = opened.model if scheme.is_pre_ln else apply(opened.model, scheme, trained=True)
    return replace(opened, model=model, scheme=scheme)


def settings(model: Any) -> dict[str, Any]:
    """Return all settings of a transformers model, including defaults, except for those of a scheme."""
    from transformers import PretrainedConfig

    values = PretrainedConfig.to_dict(model.config)
    values["model_type"] = str(values["model_type"]).removeprefix("lns_")
    omitted = ("lns", "auto_map", "_name_or_path", "name_or_path", "architectures", "transformers_version")
    return {name: value for name, value in values.items() if not name.startswith(omitted)}


def build(values: Mapping[str, Any], state: dict[str, torch.Tensor], source: Path, reference: Any = None) -> Any:
    """Build a causal language model.

    :param values: settings of its config.
    :param state: its weights.
    :param source: folder of the checkpoint, for messages.
    :param reference: the model of another framework whose logits the new model must match, or None.
    :raises LNSConfigError: if the weights do not fit, or the logits differ.
    """
    import transformers

    config = transformers.AutoConfig.for_model(**values)
    if config.tie_word_embeddings and "lm_head.weight" in state:
        raise LNSConfigError(
            f"{source} has tied embeddings, but also a separate output weight. Expected one of the two. "
            "Correct the config of the checkpoint."
        )
    loader = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    dtype = widest(tensor.dtype for tensor in state.values()) or torch.float32
    model = _load(loader, None, source, strict=True, config=config, state_dict=state, torch_dtype=dtype).eval()
    if reference is not None:
        ids = prompt(reference)
        expected, actual = logits(reference, ids), logits(model, ids)
        difference = float((actual - expected).abs().max() / expected.abs().max())
        allowed = _TOLERANCE if dtype in (torch.float32, torch.float64) else _TOLERANCE_HALF
        if not difference <= allowed:
            raise LNSConfigError(
                f"{source} was converted to a {type(model).__name__}, but the two compute different logits. They "
                f"differ by {difference:.1e} of the largest logit, and at most {allowed:.0e} was expected. Export "
                "in the checkpoint's own format, and report this error."
            )
    return model


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace parts of a weight's name.

    :param names: old part -> new part.

    >>> renamed("blocks.0.w_out.weight", {"blocks": "layers", "w_out": "o_proj"})
    'layers.0.o_proj.weight'
    """
    for old, new in names.items():
        name = re.sub(rf"(^|\.){re.escape(old)}(?=\.|$)", rf"\1{new}", name)
    return name


def special_tokens(opened: OpenCheckpoint) -> dict[str, int | None]:
    """Return the ids of the special tokens for a config. An id outside of the vocabulary becomes None."""
    token_ids = {"bos_token_id": None, "eos_token_id": opened.eos_token_id, "pad_token_id": opened.pad_token_id}
    valid_ids = range(vocabulary(opened.model))
    return {role: token_id if token_id in valid_ids else None for role, token_id in token_ids.items()}


class HuggingFace(Format):
    """transformers' format, from a folder or from the Hugging Face hub."""

    name = HF
    outputs = (HF,)
    files = "config.json (transformers)"

    def recognizes(self, folder: Path) -> bool:
        return (folder / "config.json").exists()

    def open(self, folder: Path, scheme: Scheme | None = None) -> OpenCheckpoint:
        """Open a transformers checkpoint of a stock model type, or of one of this package such as ``lns_llama``.

        :param folder: a folder, or a name on the hub. transformers selects the files.
        :param scheme: scheme with which a checkpoint of a stock type was trained.
        :raises LNSConfigError: if transformers cannot load the checkpoint without Python files of its own, or weights
            are missing.
        """
        import transformers

        from olmo_lns.integrations.transformers import register

        register()
        with reporting_load_errors(folder):
            values, _ = transformers.PretrainedConfig.get_config_dict(folder)
            if "auto_map" in values and values.get("model_type") not in transformers.CONFIG_MAPPING:
                raise LNSConfigError(
                    f"{folder} needs Python files of its own, which this command does not run. Expected a model of "
                    "transformers. If you trust the files, load the model in Python with trust_remote_code=True, call "
                    "olmo_lns.fold(model), and save it with model.save_pretrained."
                )
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            kept = {name: value for name, value in values.items() if name not in _NOT_READ}
            config = type(config).from_dict(with_all_spellings(kept))  # another version may have written the folder
            loader = getattr(transformers, auto_class(config))
            saved = SavedWeights(folder)
            dtype = widest(saved.dtypes.values()) or "auto"
            model = _load(loader, folder, folder, config=config, torch_dtype=dtype, trust_remote_code=False)
            require_one_head(saved, model, folder)
        has_tokenizer = not folder.is_dir() or any(folder.glob("tokenizer*"))
        eos = getattr(config, "eos_token_id", None)
        opened = OpenCheckpoint(
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
        return with_scheme(opened, scheme) if scheme is not None and opened.scheme.is_pre_ln else opened

    def folded(self, opened: OpenCheckpoint, dtype: torch.dtype | None = None) -> OpenCheckpoint:
        """Fold a transformers model in place and return it as a model of the stock class.

        :param dtype: dtype of the weights; None keeps their dtypes.
        :raises LNSConfigError: if the scheme cannot be folded.
        """
        from olmo_lns.integrations.transformers import fold

        model: Any = opened.model
        stock = model if opened.scheme.is_pre_ln else fold(model, dtype)
        for parameter in stock.parameters():  # buffers, such as rotary frequencies, keep their dtype
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        return replace(opened, model=stock, format=HF, scheme=PRE_LN, config=settings(stock))

    def save(self, opened: OpenCheckpoint, out: Path) -> None:
        """Write the model in transformers' format, with a config that every supported version reads alike."""
        model: Any = opened.model
        model.save_pretrained(out)
        rewrite_config(out)


FORMAT = HuggingFace()
