"""The kinds of checkpoints that are exported, and which of them a folder holds."""

from __future__ import annotations

from pathlib import Path

from olmo_lns.checkpoints.olmo import checkpoints_inside
from olmo_lns.checkpoints.records import record_in
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.authors import Authors
from olmo_lns.export.megatron import Megatron
from olmo_lns.export.olmo import OLMo
from olmo_lns.export.olmo_core import OLMoCore
from olmo_lns.export.options import HF, Source
from olmo_lns.export.transformers_folder import ModelFolder
from olmo_lns.record import Record

__all__ = ["SOURCES", "format_of", "source_of"]

#: In the order in which a folder is looked at.
SOURCES: tuple[Source, ...] = (OLMo(), OLMoCore(), Megatron(), ModelFolder(), Authors())


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
