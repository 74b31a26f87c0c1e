"""Write the config and the tokenizer of an export so that every supported version of transformers reads them.

Settings that the versions read differently cause a warning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Mapping

from olmo_lns.integrations.transformers.spellings import LAYER_TYPES, with_all_spellings


def differences(folder: Path) -> list[str]:
    """Return a warning for each setting in a saved ``config.json`` that the supported versions read differently."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found, family = [], str(values.get("model_type"))
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    by_layer = [kind for kind, each in parameters.items() if isinstance(each, Mapping)]
    if by_layer and family not in LAYER_TYPES:
        found.append(
            f"transformers 4 does not read the rotary embedding of this {family}, which differs between its layers "
            f"({', '.join(sorted(by_layer))}). Load the export with transformers 5."
        )
    original = parameters.get("original_max_position_embeddings")
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "yarn" and original not in (None, values.get("max_position_embeddings")):
        found.append(
            f"transformers 4.48 computes YaRN from max_position_embeddings, later versions from the original length of "
            f"{original} tokens. Train and run this model on the same side."
        )
    if family.startswith("qwen2") and values.get("use_sliding_window") and values.get("max_window_layers"):
        found.append(
            "transformers 4.48 applies the sliding window of Qwen2 to every layer, later versions only to the layers "
            "from max_window_layers on. Train and run this model on the same side."
        )
    return found


def rewrite_config(folder: Path) -> None:
    """Add to a saved ``config.json`` the spellings that the other versions of transformers read."""
    path = folder / "config.json"
    values = with_all_spellings(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def rewrite_tokenizer(folder: Path) -> None:
    """Rewrite a saved ``tokenizer_config.json`` so that transformers 4 can read it. Version 5 reads this form as well.

    Version 5 writes the name of a class that version 4 does not have, and saves special tokens and the chat template
    in other places.
    """
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    if template.is_file():
        values.setdefault("chat_template", template.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
