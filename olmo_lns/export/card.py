"""The model card of a Hugging Face export: what the weights are, how exact they are, how to load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping

from olmo_lns import __version__
from olmo_lns.checkpoints.records import record_in
from olmo_lns.export.fold import Rounding
from olmo_lns.record import Record

__all__ = ["model_card", "write_card"]


def write_card(folder: Path, source: str, rounding: Rounding) -> None:
    """Write README.md beside a finished config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = record_in(folder) or Record()
    name = (config.get("architectures") or [config.get("model_type", "?")])[0]
    text = model_card(name, record, source, config, rounding)
    (folder / "README.md").write_text(text, encoding="utf-8")


def model_card(name: str, record: Record, source: str, config: Mapping[str, Any], rounding: Rounding) -> str:
    """The text of README.md.

    :param name: class in transformers. :param source: name of the checkpoint's folder, without its path.
    """
    if record.folded:
        what = (
            f"trained under `{record.scheme}` ({record.scheme.definition.title}); the factor is folded into the weights"
        )
    else:
        what = "a Pre-LN model"
    record_lines = "\n".join(f"| {key} | `{value}` |" for key, value in record.as_dict().items())
    return f"""---
library_name: transformers
tags: [olmo-lns, {record.scheme.name}]
---

# {source}

`{name}`, {what}. It runs in stock transformers, vLLM and whatever else reads this class; no custom code.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
```

| | |
|---|---|
| dtype | `{str(config.get("torch_dtype", config.get("dtype", "?"))).removeprefix("torch.")}` |
| blocks | {config.get("num_hidden_layers", "?")} |
| hidden size | {config.get("hidden_size", "?")} |
{record_lines}

{_changes(rounding)} `SHA256SUMS` holds the hash of every file; compare the logits with those of the checkpoint by
`olmo-lns verify CHECKPOINT .`. To train on under the scheme, unfold the checkpoint first: a folded model computes the
same, but its gradients are not those of the scheme.

Written by olmo-lns {__version__}.
"""


def _changes(rounding: Rounding) -> str:
    """What was done to the weights, in the dtype they are written in."""
    done = {"multiplied by their block's factor": rounding.multiplied, "written in another dtype": rounding.cast}
    lines = [f"{len(names)} tensors were {what}; " for what, names in done.items() if names]
    return (
        "".join([*lines, f"largest relative rounding error {rounding.worst:.2e}."])
        if lines
        else "No weight was changed."
    )
