"""OLMo checkpoints, unsharded and sharded: opened and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import yaml

from olmo_lns.checkpoints import open_distributed
from olmo_lns.checkpoints.architecture import Architecture
from olmo_lns.checkpoints.tensors import LazyTensor, read_state
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo import types
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.schemes import Scheme

if TYPE_CHECKING:
    from olmo_lns.checkpoints.distributed import DistributedCheckpoint

__all__ = ["SHARDED", "OLMoCheckpoint", "checkpoints_inside", "is_olmo"]

#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"


def is_olmo(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def checkpoints_inside(folder: Path) -> list[str]:
    """Names of the checkpoints in the folder of a run, by step."""
    numbered = [(re.match(r"step(\d+)", path.name), path) for path in folder.iterdir()]
    found = [(int(match[1]), path.name) for match, path in numbered if match and is_olmo(path)]
    return [name for _, name in sorted(found)]


@dataclass(frozen=True)
class OLMoCheckpoint:
    """An OLMo checkpoint folder whose config, record and weights agree.

    :param config: the whole config.yaml, and ``text`` its text.
    :param record: how LNS was used; what the config says where the folder has no ``lns.json``.
    :param layout: ``unsharded`` (model.pt) or ``sharded`` (model_and_optim/).
    """

    folder: Path
    text: str
    config: Mapping[str, Any]
    architecture: Architecture
    record: Record
    layout: str

    @classmethod
    def open(cls, folder: str | Path, *, exponent: float | None = None) -> OLMoCheckpoint:
        """Read and compare config, record and the names and shapes of all weights; load no weight.

        :param exponent: of the factor, for a checkpoint without a record whose config names none.
        :raises LNSConfigError: damaged, incomplete, contradictory, or of a kind that is not supported.
        """
        folder = Path(folder)
        path = folder / "config.yaml"
        text, config = _read_config(path)
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise LNSConfigError(f"{path} has no section 'model': it is not the config.yaml of an OLMo checkpoint")
        architecture = Architecture.from_config(config["model"], path)
        layout = _layout(folder)  # first: a folder of checkpoints has no record to be missed
        record = _record(folder, architecture, exponent)
        checkpoint = cls(folder, text, config, architecture, record, layout)
        architecture.check_weights(checkpoint.tensors, folder)
        return checkpoint

    @cached_property
    def sharded(self) -> DistributedCheckpoint:
        return open_distributed(self.folder / SHARDED)

    @cached_property
    def _stored(self) -> dict[str, LazyTensor]:
        if self.layout == "unsharded":
            return read_state(self.folder / "model.pt")
        return {n: self.sharded.tensor(n) for n in self.sharded.names if n.startswith("model.")}

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """Parameter name, block groups flattened -> its name in the file."""
        found = (re.search(r"block_groups\.0\.(\d+)\.", name) for name in self._stored)
        size = 1 + max((int(match[1]) for match in found if match), default=0)
        return {_canonical(name, size): name for name in self._stored}

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """Parameter name, block groups flattened -> the weight."""
        return {name: self._stored[stored] for name, stored in self.stored_names.items()}


def _read_config(path: Path) -> tuple[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        aliased = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        config = None if aliased else yaml.safe_load(text)
    except OSError as error:
        raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LNSConfigError(f"{path} is not valid YAML: {one_line(error)}") from None
    if aliased:  # what refers to itself could not even be compared
        raise LNSConfigError(f"{path} holds a YAML alias (*name), which OLMo never writes: write the value out")
    return text, config


def _canonical(stored: str, group_size: int) -> str:
    name = stored.removeprefix("model.").replace("_fsdp_wrapped_module.", "")

    def flatten(match: re.Match[str]) -> str:
        return f"transformer.blocks.{int(match[1]) * group_size + int(match[2])}."

    return re.sub(r"^transformer\.block_groups\.(\d+)\.(\d+)\.", flatten, name)


def _record(folder: Path, architecture: Architecture, exponent: float | None) -> Record:
    """The record in ``folder``, compared with the config; without one what the config says, as for a resume."""
    named, base = architecture.layer_norm_type, architecture.base_norm
    record, said = Record.read(folder), types.written_record(named, architecture.init_fn)
    written = said.scheme
    if record is None:
        if exponent is not None and "exponent" in written.parameters:
            if types.has_parameters(named) and written.parameters["exponent"] != exponent:
                raise LNSConfigError(f"{folder}: config.yaml names {named}, --exponent says {exponent:g}")
            said = replace(said, scheme=Scheme.of(written.name, exponent=exponent))
        return said
    says = record.scheme.parameters.get("exponent")
    if exponent is not None and record.active and exponent != says:
        raise LNSConfigError(f"{folder}: {RECORD_FILE} says exponent {says}, --exponent says {exponent:g}")
    contradicts = record.active != architecture.lns or (not record.scheme.is_pre_ln and record.norm != base)
    if record.active and not contradicts:
        contradicts = written.name != record.scheme.name or (bool(written.arguments) and written != record.scheme)
    if contradicts:
        raise LNSConfigError(
            f"{folder}: config.yaml names layer_norm_type {named}, {RECORD_FILE} says {record}: they contradict each "
            "other, one of them was changed after the checkpoint was written"
        )
    return record


def _layout(folder: Path) -> str:
    if (folder / "model.pt").is_file():
        return "unsharded"
    if (folder / SHARDED).is_dir():
        return "sharded"
    unshard = "unshard it first with OLMo's scripts/unshard.py (and copy lns.json beside the result)"
    if (folder / "rank0.pt").is_file():
        raise LNSConfigError(f"{folder} is sharded by torch_legacy, whose files need a full unpickling: {unshard}")
    if (folder / "model" / "rank0.pt").is_file():
        raise LNSConfigError(f"{folder} is sharded by the local checkpointer (flat FSDP parameters): {unshard}")
    if (folder / "model").is_dir():
        raise LNSConfigError(f"{folder} is sharded by olmo_core, another format: {unshard}")
    problem = f"{folder} has neither model.pt nor {SHARDED}/"
    if inside := checkpoints_inside(folder):
        raise LNSConfigError(f"{problem}: it is the folder of a run; give one of its checkpoints: {', '.join(inside)}")
    raise LNSConfigError(f"{problem}: it is not a complete OLMo checkpoint")
