"""Write settings under the names of all versions of transformers, so that all versions read the same model.

transformers 5 keeps a model's rotary embedding in ``rope_parameters``. Version 4 reads ``rope_theta``,
``rope_scaling`` and ``partial_rotary_factor``. Where they are missing, it takes a base of 10,000 without a warning.
Version 5 reads both. ``scripts/export_versions.py`` runs the versions against each other; docs/export.md has its table.
"""

from __future__ import annotations

from typing import Any, Mapping

#: Settings of one meaning with several names. Every name gets the value that one of them has.
_NAMES = (("dtype", "torch_dtype"), ("num_local_experts", "num_experts"))
#: Family -> its names in transformers 4 for the rotary base and the rotary part of a head.
_ROTARY_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
#: Family -> its names in transformers 4 for the rotary base of each type of layer.
LAYER_TYPES = {
    family: {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
    for family in ("modernbert", "modernbert-decoder")
}


def with_all_spellings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a ``config.json``, those of nested configs included, under every known name.

    Example: ``with_all_spellings({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})["rope_theta"]``.
    """
    result = {
        name: with_all_spellings(value) if name.endswith("_config") and isinstance(value, Mapping) else value
        for name, value in values.items()
    }
    for names in _NAMES:
        for name in names:
            if result.get(name) is not None:
                result = dict.fromkeys(names, result[name]) | result
    family = str(values.get("model_type")).removeprefix("lns_")
    parameters = values.get("rope_parameters") or {}
    if by_layer := {kind: each for kind, each in parameters.items() if isinstance(each, Mapping)}:
        by_type = LAYER_TYPES.get(family, {})
        return result | {by_type[kind]: each["rope_theta"] for kind, each in by_layer.items() if kind in by_type}
    if "rope_theta" not in parameters:
        return result
    base, part = _ROTARY_NAMES.get(family, ("rope_theta", "partial_rotary_factor"))
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if family == "phi3":  # whose version 4 refuses other keys, and reads the original length beside them
        scaling = {name: scaling[name] for name in ("short_factor", "long_factor") if name in scaling}
        scaling |= {"type": parameters["rope_type"]}
    result |= {base: parameters["rope_theta"]}
    if "partial_rotary_factor" in parameters:
        result[part] = parameters["partial_rotary_factor"]
    has_scaling = parameters.get("rope_type", "default") != "default" or len(scaling) > 1
    return result | {"rope_scaling": scaling if has_scaling else None}
