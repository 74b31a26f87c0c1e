"""The names under which transformers saves models with a scheme: model type ``lns_llama``, class ``LNSLlamaModel``."""

from __future__ import annotations

from typing import Any

PREFIX = "lns_"
#: The prefix of a class's name in ``config.json``.
_CLASS_PREFIX = "LNS"


def stock_type(model_type: Any) -> str | None:
    """Return ``llama`` for ``lns_llama``, or None for any other type."""
    return model_type.removeprefix(PREFIX) if isinstance(model_type, str) and model_type.startswith(PREFIX) else None


def saved_name(class_name: str) -> str:
    """Return ``LNSLlamaModel`` for ``LlamaModel``, and for itself."""
    return _CLASS_PREFIX + stock_name(class_name)


def stock_name(class_name: str) -> str:
    """Return ``LlamaModel`` for ``LNSLlamaModel``, and for itself."""
    return class_name.removeprefix(_CLASS_PREFIX)


def saved_reference(auto_class: str, reference: Any) -> Any:
    """Return ``modeling_my.LNSMyModel`` for ``modeling_my.MyModel``; tokenizers and processors are unchanged.

    :param auto_class: the key in ``auto_map``, such as ``AutoModelForCausalLM``.
    """
    if not isinstance(reference, str) or not auto_class.startswith(("AutoConfig", "AutoModel")):
        return reference
    module, _, name = reference.rpartition(".")
    return f"{module}.{saved_name(name)}"


def stock_reference(reference: Any) -> Any:
    """Return ``modeling_my.MyModel`` for ``modeling_my.LNSMyModel``; any other reference is unchanged."""
    if not isinstance(reference, str):
        return reference
    module, dot, name = reference.rpartition(".")
    return f"{module}{dot}{stock_name(name)}"
