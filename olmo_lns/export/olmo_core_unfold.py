"""OLMo-core checkpoints to train on under a scheme: out of folded ones, and out of good ``default_scaled`` ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from olmo_lns import __version__
from olmo_lns.checkpoints.olmo_core import BUFFER, DEFAULT_SCALED, PREFIX, WEIGHTS, OLMoCoreCheckpoint
from olmo_lns.checkpoints.tensors import ChunkFunction
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.olmo import chunk_scaler
from olmo_lns.export.olmo_core import with_blocks
from olmo_lns.export.options import Options, Target
from olmo_lns.export.unfold import moment_functions, unfolded_record
from olmo_lns.integrations.olmo_core.record import CLASS, CONFIG_FILE
from olmo_lns.record import Record

__all__ = ["unfold_target"]

_MODEL_AND_OPTIMIZER = (PREFIX, "optim.")
#: Files of OLMo-core's trainer beside the weights; the second marks a checkpoint as complete.
_TRAINER, _COMPLETE = "train", ".metadata.json"


def unfold_target(source: Path, options: Options) -> Target:
    """``olmo-lns export --unfold`` of an OLMo-core checkpoint.

    :raises LNSConfigError: neither folded nor of right ``default_scaled`` blocks.
    """
    checkpoint = OLMoCoreCheckpoint.open(source)
    if checkpoint.default_scaled:
        return _mend_target(checkpoint)
    record = unfolded_record(checkpoint.record, options, source)
    scales = checkpoint.factors_of(record.scheme)

    def write(out: Path) -> list[str]:
        functions: dict[str, ChunkFunction] = {
            PREFIX + name: chunk_scaler(name, 1 / scale, options.rounding, None) for name, scale in scales.items()
        }
        moments = {}
        if not options.drop_optimizer:
            moments = moment_functions(checkpoint.stored, checkpoint.folder, scales, options.rounding)
        kept = _MODEL_AND_OPTIMIZER if moments else (PREFIX,)
        checkpoint.stored.rewrite(out / WEIGHTS, lambda name: name.startswith(kept), functions | moments)
        _write_rest(out, checkpoint, record)
        reset = "start with --trainer.load_optim_state=false"
        if moments:
            note = f"{len(moments)} moments of the optimizer rescaled to match"
        elif options.drop_optimizer:
            note = f"warning: the optimizer's moments were dropped as asked: {reset}"
        else:
            note = f"warning: the checkpoint holds no optimizer state: {reset}"
        if not (out / _TRAINER).is_dir():
            note += "; no trainer state either: also --trainer.load_trainer_state=false"
        return [f"{record}: the factor is outside again", note]

    return write


def _mend_target(checkpoint: OLMoCoreCheckpoint) -> Target:
    """A ``default_scaled`` checkpoint whose buffers are right, as one of ours: weights and optimizer unchanged."""
    record = replace(checkpoint.record, plugin_version=__version__)

    def write(out: Path) -> list[str]:
        checkpoint.stored.rewrite(out / WEIGHTS, lambda name: not name.endswith(f".{BUFFER}"), {})
        _write_rest(out, checkpoint, record)
        return [
            f"{DEFAULT_SCALED} blocks are {CLASS} with {record.scheme} now; {len(checkpoint.blocks)} buffers dropped"
        ]

    return write


def _write_rest(out: Path, checkpoint: OLMoCoreCheckpoint, record: Record) -> None:
    """Everything of a checkpoint but its weights; last what marks it as complete."""
    if (checkpoint.folder / _TRAINER).is_dir():
        copy_unread(checkpoint.folder / _TRAINER, out / _TRAINER)
    record.write(out)
    fields = {"_CLASS_": CLASS, "scheme": record.scheme.name, **record.scheme.parameters}
    fields["initialization"] = record.scaled_init
    text = json.dumps(with_blocks(checkpoint.config, fields), indent=2)
    (out / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    if (checkpoint.folder / _COMPLETE).is_file():
        copy_unread(checkpoint.folder / _COMPLETE, out / _COMPLETE)
