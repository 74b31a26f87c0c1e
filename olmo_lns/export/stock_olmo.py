"""Run an OLMo checkpoint in stock OLMo: the program of a process of its own, in which the plugin is switched off.

It uses nothing of this package, and keeps the plugin out also of an OLMo that was patched to load it. Arguments:
folder, dtype, a file of token ids, (count, length), and the file to write: for each prompt its logits and the first
module that is not finite, or what went wrong.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

__all__ = ["logits_of"]


def logits_of(model: Any, ids: Any) -> tuple[Any, str | None]:
    """Logits of ``ids`` (int64, (1, length)) in float32, and the first module whose output is not finite.

    Modules are looked at only when the logits are not finite: then the model runs again.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    found_logits = model(ids)
    logits = getattr(found_logits, "logits", found_logits).float()  # OLMo-core returns the logits themselves
    if bool(torch.isfinite(logits).all()):
        return logits, None
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            leaves = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf) and leaf.is_floating_point()]
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
                found.append(name or "the logits")

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules()]
    try:
        model(ids)
    finally:
        for handle in handles:
            handle.remove()
    return logits, found[0] if found else "the logits"


def _load(folder: Path) -> Any:
    import torch

    no_plugins: Any = importlib.metadata.EntryPoints(())
    importlib.metadata.entry_points = lambda **wanted: no_plugins
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
    place = folder / "model_and_optim"
    stored: Any = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    names = [name for name in stored if name.startswith("model.")]
    state = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    model.load_state_dict({n.removeprefix("model.").replace("_fsdp_wrapped_module.", ""): state[n] for n in names})
    return model


def main() -> None:
    import torch

    folder, dtype, asked, answer = sys.argv[1:]
    try:
        model = _load(Path(folder)).to(getattr(torch, dtype)).eval()
        with torch.inference_mode():
            found: Any = [logits_of(model, ids) for ids in torch.load(asked, weights_only=True).split(1)]
    except Exception as error:  # whatever stock OLMo raises is the answer
        found = f"{type(error).__name__}: {error}"
    torch.save(found, f"{answer}.partial")
    Path(f"{answer}.partial").rename(answer)


if __name__ == "__main__":
    main()
