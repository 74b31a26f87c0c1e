"""OLMo checkpoints, unsharded and sharded: opened, checked and written with some weights scaled."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Mapping

import torch
import yaml

from olmo_lns.errors import LNSConfigError
from olmo_lns.export.architecture import BASE_NORMS, Architecture
from olmo_lns.export.archive import check_archive, read_archive, write_archive
from olmo_lns.export.distributed import ChunkFunction, DistributedCheckpoint
from olmo_lns.export.fold import LazyTensor, Rounding, block_factors, check_shapes, one_line, scaled
from olmo_lns.record import RECORD_FILE, LNSRecord
from olmo_lns.scale import lns_scale

__all__ = ["LAYOUTS", "SHARDED", "OLMoCheckpoint", "copy_trainer_state", "is_olmo", "write_config", "write_olmo"]

#: Folder of a sharded (``torch_new``) checkpoint.
SHARDED = "model_and_optim"
_NOTE = "# LayerNorm Scaling"
LAYOUTS = ("unsharded", "sharded")


def is_olmo(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


@dataclass(frozen=True)
class OLMoCheckpoint:
    """An OLMo checkpoint folder whose config, record and weights agree.

    :param config: the whole config.yaml, and ``text`` its text.
    :param record: how LNS was used; made from the config where the folder has no ``lns.json``.
    :param layout: ``unsharded`` (model.pt) or ``sharded`` (model_and_optim/).
    """

    folder: Path
    text: str
    config: Mapping[str, Any]
    architecture: Architecture
    record: LNSRecord
    layout: str

    @classmethod
    def open(cls, folder: str | Path, *, exponent: float | None = None) -> OLMoCheckpoint:
        """Read and compare config, record and the names and shapes of all weights; load no weight.

        :param exponent: of the factor, only for an LNS checkpoint that lost its record.
        :raises LNSConfigError: damaged, incomplete, contradictory, or of a kind that is not supported.
        """
        folder = Path(folder)
        path = folder / "config.yaml"
        try:
            text = path.read_text(encoding="utf-8")
            config = yaml.safe_load(text)
        except OSError as error:
            raise LNSConfigError(f"{path} cannot be read: {one_line(error)}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise LNSConfigError(f"{path} is not valid YAML: {one_line(error)}") from None
        if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
            raise LNSConfigError(f"{path} has no section 'model': it is not the config.yaml of an OLMo checkpoint")
        architecture = Architecture.from_config(config["model"], path)
        record = _record(folder, architecture, exponent)
        checkpoint = cls(folder, text, config, architecture, record, _layout(folder))
        check_shapes(checkpoint.tensors, architecture.shapes(), folder)
        return checkpoint

    @cached_property
    def sharded(self) -> DistributedCheckpoint:
        return DistributedCheckpoint(self.folder / SHARDED)

    @cached_property
    def stored_names(self) -> dict[str, str]:
        """Parameter name, block groups flattened -> its name in the file."""
        if self.layout == "sharded":
            stored = [name for name in self.sharded.names if name.startswith("model.")]
        else:
            stored = list(self._unsharded)
        size = 1 + max((int(m[1]) for n in stored if (m := re.search(r"block_groups\.0\.(\d+)\.", n))), default=0)
        return {_canonical(name, size): name for name in stored}

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """Parameter name, block groups flattened -> the weight."""
        if self.layout == "sharded":
            return {name: self.sharded.tensor(stored) for name, stored in self.stored_names.items()}
        return {name: self._unsharded[stored] for name, stored in self.stored_names.items()}

    @cached_property
    def _unsharded(self) -> dict[str, LazyTensor]:
        path = self.folder / "model.pt"
        check_archive(path)
        state = read_archive(path)
        if not isinstance(state, dict) or not all(isinstance(value, LazyTensor) for value in state.values()):
            raise LNSConfigError(f"{path} is not a state dict of tensors")
        return state

    def factors(self, exponent: float | None = None) -> dict[str, float]:
        """Parameter -> the LNS factor of its block, for all parameters that carry it when folded."""
        power = self.record.exponent if exponent is None else exponent
        layers = self.architecture.n_layers
        return block_factors(self.architecture.sites, layers, lambda number: lns_scale(number, exponent=power))

    def plain(self, rounding: Rounding, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
        """All weights as a Pre-LN model needs them: the factor folded in, if it is not already."""
        return scaled(self.tensors, self.factors() if self.record.active else {}, rounding, dtype)


def write_olmo(
    out: Path,
    checkpoint: OLMoCheckpoint,
    factors: Mapping[str, float],
    record: LNSRecord,
    *,
    layer_norm_type: str,
    rounding: Rounding,
    dtype: torch.dtype | None = None,
    layout: str | None = None,
    extra: Mapping[str, ChunkFunction] | None = None,
) -> None:
    """Write the weights of ``checkpoint`` times ``factors`` into the folder ``out``; config.yaml comes last.

    :param layout: ``unsharded`` or ``sharded``; a sharded output needs a sharded source.
    :param extra: also keep what is not the model in a sharded checkpoint (the optimizer), and do
        this to its tensors; default: the model alone.
    :raises LNSConfigError: unsharded to sharded was asked for.
    """
    layout = layout or checkpoint.layout
    if layout == "unsharded":
        weights = scaled(checkpoint.tensors, factors, rounding, dtype)
        # A distributed checkpoint stores the model's names under "model."; a state dict does not.
        names = {name: stored.removeprefix("model.") for name, stored in checkpoint.stored_names.items()}
        write_archive(out / "model.pt", {names[name]: weights[name] for name in weights})
    elif checkpoint.layout == "sharded":
        functions: dict[str, ChunkFunction] = {}
        for name, stored in checkpoint.stored_names.items():
            tensor = checkpoint.tensors[name]
            if name in factors or (dtype is not None and dtype != tensor.dtype):
                functions[stored] = chunk_scaler(name, factors.get(name, 1.0), rounding, dtype)
        functions.update(extra or {})
        checkpoint.sharded.rewrite(out / SHARDED, lambda n: extra is not None or n.startswith("model."), functions)
    else:
        raise LNSConfigError(f"{checkpoint.folder} is unsharded: a sharded one can only be made of a sharded one")
    record.write(out)
    write_config(out / "config.yaml", checkpoint, layer_norm_type, record)


def copy_trainer_state(checkpoint: OLMoCheckpoint, out: Path, layout: str) -> bool:
    """Copy ``train.pt`` or ``train/``, unread: it holds arbitrary objects, and OLMo's Trainer wants it.

    :returns: whether there was one; otherwise an empty one is written, for ``--reset_trainer_state``.
    """
    names = {"unsharded": "train.pt", "sharded": "train/rank0.pt"}
    source, target = checkpoint.folder / names[checkpoint.layout], out / names[layout]
    if source.is_file() and layout == checkpoint.layout == "sharded":
        shutil.copytree(source.parent, target.parent)
        return True
    target.parent.mkdir(exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, target)
        return True
    write_archive(target, {})
    return False


def chunk_scaler(name: str, factor: float, rounding: Rounding, dtype: torch.dtype | None) -> ChunkFunction:
    """A function for :meth:`DistributedCheckpoint.rewrite` that scales every chunk alike."""
    return lambda _, offsets, chunk: rounding.scale(name, chunk, factor, dtype or chunk.dtype)


def write_config(path: Path, checkpoint: OLMoCheckpoint, layer_norm_type: str, record: LNSRecord) -> None:
    """The checkpoint's config.yaml with another norm type; everything else keeps its text."""
    pattern = re.compile(r"(?m)^(\s+layer_norm_type:[ \t]*)\S+[ \t]*$")
    text = pattern.sub(lambda match: match[1] + layer_norm_type, checkpoint.text)
    wanted = dict(checkpoint.config, model=dict(checkpoint.config["model"], layer_norm_type=layer_norm_type))
    if yaml.safe_load(text) != wanted:
        # An unusual spelling of the file: its comments are lost, its content is not.
        text = yaml.safe_dump(wanted, sort_keys=False)
    state = "is folded into the weights" if record.folded else "is active"
    note = f"{_NOTE} (exponent {record.exponent:g}) {state}; see {RECORD_FILE}.\n"
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_NOTE))
    path.write_text(note + text, encoding="utf-8")


def _canonical(stored: str, group_size: int) -> str:
    name = stored.removeprefix("model.").replace("_fsdp_wrapped_module.", "")

    def flatten(match: re.Match[str]) -> str:
        return f"transformer.blocks.{int(match[1]) * group_size + int(match[2])}."

    return re.sub(r"^transformer\.block_groups\.(\d+)\.(\d+)\.", flatten, name)


def _record(folder: Path, architecture: Architecture, exponent: float | None) -> LNSRecord:
    """The record in ``folder``, compared with the config."""
    named = architecture.layer_norm_type
    kind = f"lns_{architecture.base_norm}" if architecture.lns else named
    record = LNSRecord.read(folder)
    if record is None:
        if not architecture.lns:
            return LNSRecord()
        if exponent is None:
            raise LNSConfigError(
                f"{folder}: config.yaml names {named} but {RECORD_FILE} is missing, so the exponent is unknown: "
                f"copy {RECORD_FILE} from the checkpoint it was made from, or give --exponent (0.5 is the paper's)"
            )
        return LNSRecord.lns(kind, exponent)
    if exponent is not None and record.active and exponent != record.exponent:
        raise LNSConfigError(f"{folder}: {RECORD_FILE} says exponent {record.exponent:g}, --exponent says {exponent:g}")
    says = f"{'folded ' if record.folded else ''}{record.type}"
    if record.active != architecture.lns or (record.active and record.type != kind):
        raise LNSConfigError(
            f"{folder}: config.yaml names layer_norm_type {named}, {RECORD_FILE} says {says}: they contradict each "
            "other, one of them was changed after the checkpoint was written"
        )
    if record.folded and BASE_NORMS.get(record.type) not in (None, named):
        raise LNSConfigError(f"{folder}: config.yaml names layer_norm_type {named}, {RECORD_FILE} says {says}")
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
    raise LNSConfigError(f"{folder} has neither model.pt nor {SHARDED}/: it is not a complete OLMo checkpoint")
