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
    text = model_card(name, record, source, config, worst=rounding.worst, changed=len(rounding.changed))
    (folder / "README.md").write_text(text, encoding="utf-8")


def model_card(name: str, record: Record, source: str, config: Mapping[str, Any], *, worst: float, changed: int) -> str:
    """The text of README.md.

    :param name: class in transformers. :param source: name of the checkpoint's folder, without its path.
    :param worst: largest relative rounding error of the ``changed`` tensors, in the dtype they are written in.
    """
    if record.folded:
        what = (
            f"trained under `{record.scheme}` ({record.scheme.definition.title}); the factor is folded into the weights"
        )
        exact = (
            f"{changed} tensors were multiplied by their block's factor; largest relative rounding error {worst:.2e}."
        )
    else:
        what, exact = "a Pre-LN model", "No weight was changed."
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

{exact} `SHA256SUMS` holds the hash of every file; compare the logits with those of the checkpoint by
`olmo-lns verify CHECKPOINT .`. To train on under the scheme, unfold the checkpoint first: a folded model computes the
same, but its gradients are not those of the scheme.

Written by olmo-lns {__version__}.
"""
