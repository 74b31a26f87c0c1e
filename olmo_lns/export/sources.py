"""The kinds of checkpoints that are exported: for each, how it is recognised, folded, unfolded, brought in and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_lns.checkpoints.megatron import MegatronCheckpoint, is_megatron
from olmo_lns.checkpoints.olmo import OLMoCheckpoint, checkpoints_inside, is_olmo
from olmo_lns.checkpoints.olmo_core import is_olmo_core
from olmo_lns.checkpoints.records import record_in
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import (
    as_trained,
    authors,
    from_olmo,
    megatron,
    olmo_core,
    olmo_core_unfold,
    transformers_folder,
    unfold,
)
from olmo_lns.export.hooked import hooked_llama
from olmo_lns.export.options import HF, MEGATRON, OLMO, OLMO_CORE, OLMO_UNSHARDED, Options, Source, Target
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, PRE_LN

__all__ = ["SOURCES", "format_of", "source_of"]


class _OLMo:
    name = "olmo"
    kind = "an OLMo checkpoint"
    formats: tuple[str, ...] = (OLMO, OLMO_UNSHARDED, HF)

    def recognises(self, folder: Path) -> bool:
        return is_olmo(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        return from_olmo.olmo_target(folder, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        return unfold.olmo_target(folder, options)

    def train(self, folder: Path, options: Options) -> Target:
        return as_trained.olmo_target(folder, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.olmo import open_olmo

        OLMoCheckpoint.open(folder)  # its weights against its config, as for an export
        return open_olmo(folder)


class _OLMoCore:
    name = "olmo-core"
    kind = "an OLMo-core checkpoint"
    formats: tuple[str, ...] = (OLMO_CORE, HF)

    def recognises(self, folder: Path) -> bool:
        return is_olmo_core(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        return olmo_core.target(folder, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        return olmo_core_unfold.unfold_target(folder, options)

    def train(self, folder: Path, options: Options) -> Target:
        return as_trained.olmo_core_target(folder, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.olmo_core import open_olmo_core

        return open_olmo_core(folder)


class _Megatron:
    name = "megatron"
    kind = "a Megatron checkpoint"
    formats: tuple[str, ...] = (MEGATRON, HF)

    def recognises(self, folder: Path) -> bool:
        return is_megatron(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        return megatron.target(folder, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        return unfold.megatron_target(folder, options)

    def train(self, folder: Path, options: Options) -> Target:
        return as_trained.megatron_target(folder, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        checkpoint = MegatronCheckpoint.open(folder)
        scheme = checkpoint.record.scheme if checkpoint.record.active else PRE_LN
        return hooked_llama(*checkpoint.as_olmo(), scheme=scheme)


class _Transformers:
    name = "transformers"
    kind = "a transformers model"
    formats: tuple[str, ...] = (HF,)

    def recognises(self, folder: Path) -> bool:
        return transformers_folder.is_ours(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        return transformers_folder.target(folder, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        raise _not_unfolded(self)

    def train(self, folder: Path, options: Options) -> Target:
        raise LNSConfigError(f"{folder} is a transformers folder of ours already: train on it as it is")

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        return transformers_folder.load(folder).float().eval()


class _Authors:
    """The paper's LLaMA code; its files say nothing about the norms, so it is never recognised."""

    name = "authors"
    kind = "the paper's LLaMA"
    formats: tuple[str, ...] = (HF,)

    def recognises(self, folder: Path) -> bool:
        return False

    def fold(self, folder: Path, options: Options) -> Target:
        return authors.target(folder, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        raise _not_unfolded(self)

    def train(self, folder: Path, options: Options) -> Target:
        raise LNSConfigError("hf import reads OLMo, OLMo-core and Megatron checkpoints, not --source authors")

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        return hooked_llama(*authors.unfolded(folder), scheme=exported.scheme if exported and exported.folded else LNS)


#: In the order in which a folder is looked at.
SOURCES: tuple[Source, ...] = (_OLMo(), _OLMoCore(), _Megatron(), _Transformers(), _Authors())


def source_of(folder: Path, name: str = "auto") -> Source:
    """The kind called ``name``, or the one that recognises ``folder``.

    :raises LNSConfigError: no folder, or no checkpoint.
    """
    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give a checkpoint folder")
    for source in SOURCES:
        if source.name == name or (name == "auto" and source.recognises(folder)):
            return source
    if inside := checkpoints_inside(folder):
        raise LNSConfigError(f"{folder} is the folder of a run; give one of its checkpoints: {', '.join(inside)}")
    if (record := _exported(folder)) is not None:
        raise LNSConfigError(
            f"{folder} is a Hugging Face export ({record}), stock and final: expected a checkpoint, such as the one it "
            "was made from"
        )
    raise LNSConfigError(
        f"{folder} holds neither config.yaml (OLMo), config.json and model_and_optim (OLMo-core) nor an iter_* "
        "folder or metadata.json (Megatron): not a checkpoint (the paper's LLaMA: say --source authors)"
    )


def _exported(folder: Path) -> Record | None:
    """The record in a stock model's ``config.json``, where an export left one."""
    found = record_in(folder) if (folder / "config.json").is_file() else None
    return found if found is not None and found.folded else None


def format_of(source: Source, folder: Path, asked: str | None, *, unfold: bool) -> str:
    """The format ``asked`` for, or the checkpoint's own.

    :raises LNSConfigError: one that the checkpoint is not written in.
    """
    formats = source.formats[:1] if unfold else source.formats
    if unfold and formats == (HF,):
        return HF  # what its ``unfold`` says is that there is none
    if asked is not None and asked not in formats:
        how = "is unfolded into" if unfold else "is written as"
        raise LNSConfigError(f"--format {asked}: {folder} is {source.kind}, which {how} {' or '.join(formats)}")
    return asked or formats[0]


def _not_unfolded(source: Source) -> LNSConfigError:
    return LNSConfigError(f"--unfold reads OLMo, OLMo-core and Megatron checkpoints, not --source {source.name}")
