"""Run an OLMo checkpoint in stock OLMo: the program of a process of its own (see :mod:`olmo_lns.export.stock`).

It imports nothing of this package, and keeps the plugin out also of an OLMo that was patched to load it. Arguments:
folder, dtype. It reads one JSON list of token ids a line and answers with one JSON line and, where that says a
shape, the logits' bytes (float32).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any, Iterator
from unittest import mock

__all__ = ["logits_of"]


def logits_of(model: Any, ids: Any) -> tuple[Any, str | None]:
    """Logits of ``ids`` (int64, (1, length)) in float32, and the first module whose output is not finite.

    Modules are looked at only when the logits are not finite: then the model runs again.
    """
    import torch

    found_logits = model(ids)
    logits = getattr(found_logits, "logits", found_logits).float()  # OLMo-core returns the logits themselves
    if bool(torch.isfinite(logits).all()):
        return logits, None
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not found and not all(bool(torch.isfinite(t).all()) for t in _tensors(output)):
                found.append(name or "the logits")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model(ids)
    finally:
        for handle in handles:
            handle.remove()
    return logits, found[0] if found else "the logits"


def _tensors(output: Any) -> Iterator[Any]:
    """The floating-point tensors in a module's output."""
    import torch

    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple, dict)):
        for item in output.values() if isinstance(output, dict) else output:
            yield from _tensors(item)


def _without_plugins() -> Any:
    """Entry points as if this package were not installed."""
    everything: Any = importlib.metadata.entry_points

    def select(**wanted: Any) -> Any:
        return [entry for entry in everything(**wanted) if not entry.value.startswith("olmo_lns")]

    def entry_points(**wanted: Any) -> Any:
        return select(**wanted) if wanted else types.SimpleNamespace(select=select)

    return mock.patch.object(importlib.metadata, "entry_points", entry_points)


def _load(folder: Path) -> Any:
    import torch

    with _without_plugins():
        from olmo.config import CheckpointType, LayerNormType, ModelConfig
        from olmo.model import OLMo
    if "lns_rms" in LayerNormType.__members__:
        raise RuntimeError("this OLMo has the lns types although the plugin was kept out: it is not stock OLMo")
    if (folder / "model.pt").is_file():
        return OLMo.from_checkpoint(str(folder), device="cpu", checkpoint_type=CheckpointType.unsharded)
    # OLMo 0.6.0's own reader of sharded checkpoints cannot be made under torch >= 2.6; torch's reads them.
    from torch.distributed import checkpoint as dcp

    config = ModelConfig.load(folder / "config.yaml", key="model", validate_paths=False)
    config.init_device = "cpu"
    model = OLMo(config, init_params=False)
    stored: Any = dcp.FileSystemReader(folder / "model_and_optim").read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith("model.")
    }
    dcp.load(state, checkpoint_id=folder / "model_and_optim", no_dist=True)
    model.load_state_dict(
        {name.removeprefix("model.").replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in state.items()}
    )
    return model


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what OLMo prints must not come between the answers

    def answer(data: bytes = b"", **header: Any) -> None:
        output.write(json.dumps(header).encode() + b"\n" + data)
        output.flush()

    try:
        import torch

        model = _load(Path(sys.argv[1])).to(getattr(torch, sys.argv[2])).eval()
        answer(ready=True)
        with torch.inference_mode():
            for line in sys.stdin:
                logits, first = logits_of(model, torch.tensor([json.loads(line)]))
                answer(logits.numpy().tobytes(), shape=list(logits.shape), not_finite=first)
    except Exception as error:  # whatever stock OLMo raises is the answer
        answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
