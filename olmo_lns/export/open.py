"""Open a checkpoint as the model that it was trained as: by its own framework, under its own scheme."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

import torch
from torch import nn

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import HF, MEGATRON, OLMO, OLMO_CORE
from olmo_lns.schemes import Scheme, parse


@dataclass
class Opened:
    """A model in evaluation mode with what identifies it.

    :param model: of the framework's own class; :mod:`olmo_lns.export.huggingface`'s for Megatron.
    :param kind: one of :data:`olmo_lns.export.FORMATS`. :param scheme: Pre-LN for a stock model.
    :param config: settings that the saved file holds, as plain values.
    :param tokenizer: name or path that the checkpoint gives. :param max_length: tokens that it was made for.
    :param eos_token_id: None where it isn't known. :param pad_token_id: likewise.
    """

    model: nn.Module
    kind: str
    scheme: Scheme
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    max_length: int = 2048
    token_dtype: str = "uint16"
    eos_token_id: int | None = None
    pad_token_id: int | None = None


def kind_of(folder: Path) -> str:
    """The format of a checkpoint folder; of a hub's ``name`` or ``owner/name``, transformers'.

    :raises LNSConfigError: no folder, an adapter, the folder of a run, or no checkpoint; it says what is missing.
    """
    if not folder.exists() and len(folder.parts) <= 2 and not str(folder).startswith((".", "~", "/")):
        return HF
    if not folder.is_dir():
        raise LNSConfigError(
            f"{folder} is no such folder. Give a checkpoint folder, or a name of the Hugging Face hub."
        )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise LNSConfigError(
            f"{folder} is an adapter. Merge it first (merge_and_unload()), save that model, export it."
        )
    if (folder / "config.yaml").is_file() and any((folder / name).exists() for name in ("model.pt", "model_and_optim")):
        return OLMO
    if (folder / "config.json").is_file():
        core = (folder / "model_and_optim").is_dir() or (folder / ".metadata").is_file()
        return OLMO_CORE if core else HF
    if (folder / "latest_checkpointed_iteration.txt").is_file() or any(folder.glob("iter_*")):
        return MEGATRON
    if (folder / ".metadata").is_file():
        return MEGATRON
    if inside := sorted(path.name for path in folder.glob("step*") if path.is_dir()):
        raise LNSConfigError(f"{folder} is the folder of a run. Give one of its checkpoints: {', '.join(inside)}.")
    if (folder / "config.yaml").is_file():
        raise LNSConfigError(
            f"{folder} has a config.yaml and neither model.pt nor model_and_optim/. Unshard it with OLMo's "
            "scripts/unshard.py; expected a complete checkpoint."
        )
    raise LNSConfigError(
        f"{folder} holds neither config.yaml (OLMo), config.json (transformers; OLMo-core, with model_and_optim/) nor "
        "an iter_* folder (Megatron). Give a checkpoint folder."
    )


def open_checkpoint(folder: str | Path, scheme: str | Scheme | None = None, **how: Any) -> Opened:
    """Open ``folder`` on the CPU in the dtype that it was saved in.

    :param folder: a checkpoint folder, or a name of the Hugging Face hub.
    :param scheme: for a checkpoint that doesn't say it, such as ``"lns"``.
    :param how: for transformers' ``from_pretrained``, such as ``device_map="auto"``.
    :raises LNSConfigError: damaged, incomplete, or says another scheme.

    Example: ``open_checkpoint("runs/lns/step1000-unsharded").model``.
    """
    folder, asked = Path(folder), parse(scheme) if isinstance(scheme, str) else scheme
    kind = kind_of(folder)
    module = "huggingface" if kind == HF else kind.replace("-", "_")
    given = how if kind == HF else {}
    opened: Opened = importlib.import_module(f"olmo_lns.export.{module}").open(folder, asked, **given)
    opened.model.eval()
    if asked is not None and opened.scheme != asked:
        raise LNSConfigError(f"{folder} says scheme {opened.scheme}, --scheme says {asked}. Leave --scheme away.")
    return opened


def open_model(
    folder: str | Path,
    *,
    scheme: str | Scheme | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model of a checkpoint folder, in evaluation mode, under the scheme that it was trained with.

    :param folder: of OLMo, OLMo-core, Megatron (run as a Llama) or transformers.
    :param scheme: for a checkpoint that doesn't say it. :param dtype: None: as saved.
    :raises LNSConfigError: as :func:`open_checkpoint`.

    Example: ``open_model("LNS_1B", scheme="lns", dtype=torch.float32)``.
    """
    return open_checkpoint(folder, scheme).model.to(device=device, dtype=dtype).eval()


def load_state(model: nn.Module, state: Mapping[str, torch.Tensor], source: object) -> None:
    """Give ``model`` the tensors of ``state``, which are not copied.

    :raises LNSConfigError: missing, unexpected or of another shape; it names the first.
    """
    own = model.state_dict()
    shapes = {name for name in set(own) & set(state) if own[name].shape != state[name].shape}
    missing, unknown = set(own) - set(state), set(state) - set(own)
    for problem, names in (("is missing", missing), ("has no place", unknown), ("has another shape", shapes)):
        if names:
            raise LNSConfigError(f"{source}: {min(names)} {problem} ({len(names)} such weights). Expected its model's.")
    model.load_state_dict(dict(state), assign=True)


def tensors_of(folder: Path, wanted: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Load tensors of a torch distributed checkpoint in one process.

    :param wanted: name -> anything. :param prefix: of the stored names.
    :raises LNSConfigError: one is missing, or the files are damaged.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    try:
        reader = FileSystemReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        if missing := sorted(name for name in wanted if prefix + name not in stored):
            raise LNSConfigError(f"{folder}: {missing[0]} is missing ({len(missing)} such weights).")
        state: dict[str, Any] = {}
        for name in wanted:
            entry: Any = stored[prefix + name]
            state[prefix + name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load(state, storage_reader=reader, no_dist=True)
    except LNSConfigError:
        raise
    except Exception as error:  # torch raises almost anything for a damaged file
        raise LNSConfigError(f"{folder} cannot be read: {one_line(error)}") from None
    return {name: state[prefix + name] for name in wanted}
