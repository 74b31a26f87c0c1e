"""OLMo's checkpoints: folded for stock OLMo and transformers, unfolded to train on, in another layout or dtype."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Any, Mapping

import numpy
import torch
import yaml

from olmo_lns import __version__
from olmo_lns.checkpoints.distributed import Edit
from olmo_lns.checkpoints.olmo import SHARDED, OLMoCheckpoint, identifier_in, is_olmo
from olmo_lns.checkpoints.tensors import LazyTensor, check_archive, loading, map_tensors, read_archive, write_archive
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import HF, OLMO, OLMO_UNSHARDED, fold, huggingface
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, scaled
from olmo_lns.export.sources import Options, PlannedExport, Source, Stock, about_moments, nothing_to_fold
from olmo_lns.integrations.olmo import types
from olmo_lns.integrations.olmo.state import KEY, Mark, needs_olmo_lns
from olmo_lns.record import RECORD_FILE, Record

_OPTIMIZER = "optim.pt"


class OLMo(Source):
    name = "olmo"
    kind = "an OLMo checkpoint"
    formats = (OLMO, OLMO_UNSHARDED, HF)
    recognises = staticmethod(is_olmo)

    def open(self, folder: Path, exponent: float | None = None) -> OLMoCheckpoint:
        return OLMoCheckpoint.open(folder, exponent=exponent)

    def stock(self, checkpoint: OLMoCheckpoint, options: Options, *, trained: bool = False) -> Stock:
        folder, model, record = checkpoint.folder, checkpoint.architecture, checkpoint.record
        own = identifier_in(checkpoint.config, folder / "config.yaml")
        otherwise = ". It runs in OLMo with olmo-lns; --format olmo keeps it as it is"
        return huggingface.stock_of(
            model, checkpoint.tensors, record, options, own, folder, trained=trained, otherwise=otherwise
        )

    def folded(self, checkpoint: OLMoCheckpoint, options: Options) -> PlannedExport:
        record, model, active = fold.fold_record(checkpoint.record), checkpoint.architecture, checkpoint.record.active
        if not active and model.init_fn not in types.INIT_FNS:
            note = ", and stock OLMo runs it as it is"
            raise nothing_to_fold(checkpoint.record, checkpoint.folder, note=note)
        if active and model.norm_after:
            raise LNSConfigError(
                f"{checkpoint.folder}: LNS with norm_after (post-norm blocks) is not a model that can be folded"
            )
        layout = "unsharded" if options.format == OLMO_UNSHARDED else checkpoint.layout
        problem = fold.obstacle(record.scheme, model.n_layers) if active else ""
        if problem:  # layout and dtype may change, the model does not
            record = replace(checkpoint.record, plugin_version=__version__)
            kind = types.spell(record.scheme, model.base_norm)
            lines = [
                f"OLMo, {layout}, layer_norm_type {kind}: not folded ({problem}); it runs in OLMo with olmo-lns only"
            ]
            return _planned(checkpoint, record, layout, options, {}, lines)
        factors = fold.factors(model, record.scheme, checkpoint.tensors) if active else {}
        return _planned(checkpoint, record, layout, options, factors, _in_words(checkpoint, layout))

    def unfolded(self, checkpoint: OLMoCheckpoint, options: Options) -> PlannedExport:
        model = checkpoint.architecture
        record = fold.unfolded_record(checkpoint.record, checkpoint.folder, model.n_layers)
        name, unsharded = os.path.basename(os.path.normpath(options.output)), checkpoint.layout == "unsharded"
        if name.endswith("-unsharded") != unsharded:
            better = f"{name}-unsharded" if unsharded else name.removesuffix("-unsharded") or "lns"
            raise LNSConfigError(
                f"{options.output}: OLMo takes a --load_path for unsharded when its name ends in -unsharded, and only "
                f"then; this checkpoint is {checkpoint.layout}: call it {better}"
            )
        scales = fold.factors(model, record.scheme, {})
        moments, optimizer, note = _optimizer(checkpoint, scales, options)
        inverse: dict[str, Factor] = {name: 1 / scale for name, scale in scales.items()}
        lines = [f"{record}, {checkpoint.layout}: the factor is outside again", note]
        return _planned(checkpoint, record, checkpoint.layout, options, inverse, lines, moments, optimizer)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.loading import open_olmo

        return open_olmo(folder)


def _in_words(checkpoint: OLMoCheckpoint, layout: str) -> list[str]:
    """The report of a fold into stock OLMo."""
    model, scheme = checkpoint.architecture, checkpoint.record.scheme
    what = "there was nothing to fold"
    if checkpoint.record.active:
        into = "gains and biases of the block norms" if model.layer_norm_with_affine else "projections after the norms"
        into = into if scheme.keeps_forward(model.n_layers) else "rows of attn_out and ff_out"
        what = f"{model.n_layers} factors folded into the {into}"
    lines = [f"OLMo, {layout}, layer_norm_type {model.base_norm}: {what}"]
    why = ": its moments belong to the unfolded weights" if checkpoint.record.active else ""
    lines.append(f"the optimizer's state is left out{why}")
    if model.init_fn in types.INIT_FNS:
        lines.append(
            f"init_fn {model.init_fn}, which stock OLMo does not know, is called normal: the weights are drawn"
        )
    return lines


def _optimizer(
    checkpoint: OLMoCheckpoint, scales: Mapping[str, Factor], options: Options
) -> tuple[dict[str, Edit] | None, Any, str]:
    """What to do with a sharded optimizer's state, a rescaled unsharded one, and one line for the report."""
    canonical = {stored: name for name, stored in checkpoint.stored_names.items()}
    path, edits, state, count = checkpoint.folder / _OPTIMIZER, None, None, 0
    if options.drop_optimizer:
        pass
    elif checkpoint.layout == "sharded":
        edits = fold.sharded_moments(checkpoint.sharded, scales, canonical, options.rounding) or None
        count = len(edits or {})
    elif path.is_file():
        state, count = _rescaled(read_archive(path), path, scales, canonical, options.rounding)
        if not count:
            return None, state, "the optimizer has no moments yet: it was saved before its first step"
    return edits, state, about_moments(count, options, "start training with --reset_optimizer_state")


def _rescaled(
    state: Any, path: Path, scales: Mapping[str, Factor], canonical: Mapping[str, str], rounding: fold.Rounding
) -> tuple[Any, int]:
    """An optimizer's state dict with the moments of the scaled parameters multiplied; and their number.

    :raises LNSConfigError: moments that are missing, not named, or of a kind whose scaling is unknown.
    """
    try:
        groups = [zip(group["params"], group["param_names"], strict=True) for group in state["param_groups"]]
        names = {number: str(name) for group in groups for number, name in group}
        held = state["state"]
    except (KeyError, TypeError, ValueError):
        raise LNSConfigError(f"{path} does not name its parameters: give --drop-optimizer") from None
    keys: list[tuple[Any, ...]] = []
    map_tensors(held, lambda place, _: keys.append(place))
    stored = [(place, names.get(place[0], str(place[0])), str(place[-1])) for place in keys]
    found = fold.moments(stored, scales, canonical, path)

    def rescale(place: tuple[Any, ...], tensor: LazyTensor) -> LazyTensor:
        name = f"{names.get(place[0], place[0])}.{place[-1]}"
        return rounding.folded(name, tensor, found[place], None) if place in found else tensor

    return state | {"state": map_tensors(held, rescale)}, len(found)


def _planned(
    checkpoint: OLMoCheckpoint,
    record: Record,
    layout: str,
    options: Options,
    factors: Mapping[str, Factor],
    lines: list[str],
    moments: Mapping[str, Edit] | None = None,
    optimizer: Any = None,
) -> PlannedExport:
    """What is made of a checkpoint, in OLMo's format.

    :param record: of the weights written. :param layout: a sharded one needs a sharded source.
    :param factors: parameter -> what it is multiplied by. :param lines: of the report.
    :param moments: also keep what is not the model in a sharded checkpoint (the optimizer), and do this to its
        tensors; None: the model alone. :param optimizer: the state to write beside an unsharded model.
    :raises LNSConfigError: shards are asked for where there are none.
    """
    if layout == "unsharded" and options.max_shard_size:
        raise LNSConfigError("--max-shard-size: an unsharded OLMo checkpoint is one model.pt: leave it out")
    gone = fold.gates(checkpoint.architecture) if record.folded and checkpoint.record.active else ()
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in gone}
    weights = scaled(kept, factors, options.rounding, options.dtype)
    base, asked = checkpoint.architecture.base_norm, checkpoint.architecture.init_fn
    changes = {"layer_norm_type": types.spell(record.scheme, base) if record.active else base}
    if "init_fn" in checkpoint.config["model"]:
        # Stock OLMo does not know ours: weights that it can run are "normal", as all but residual outputs were drawn;
        # the record keeps what those were, and weights to train on under their scheme get ours back.
        ours = {drawn: name for name, drawn in types.INIT_FNS.items()}
        asked = "normal" if asked in types.INIT_FNS and not record.active else asked
        changes["init_fn"] = ours.get(record.scaled_init, asked) if asked == "normal" and record.active else asked

    def write(out: Path) -> list[str]:
        if layout == "unsharded":
            # A distributed checkpoint stores the model's names under "model."; a state dict does not.
            names = {name: stored.removeprefix("model.") for name, stored in checkpoint.stored_names.items()}
            write_archive(out / "model.pt", {names[name]: tensor for name, tensor in weights.items()})
        else:
            stored, rounding = checkpoint.stored_names, options.rounding
            edits = {stored[n]: rounding.edit(n, factors.get(n, 1.0), options.dtype) for n in weights}
            kept = edits if moments is None else set(checkpoint.sharded.metadata.state_dict_metadata)
            gone = set(stored.values()) - set(edits)
            checkpoint.sharded.rewrite(
                out / SHARDED,
                lambda name: name in kept and name not in gone,
                edits | dict(moments or {}),
                max_bytes=options.shard_bytes,
            )
        if optimizer is not None:
            write_archive(out / _OPTIMIZER, optimizer)
        record.write(out)
        found = copy_trainer_state(checkpoint, out, layout, record)
        write_config(out / "config.yaml", checkpoint, changes, record)
        unfolded = checkpoint.record.folded and record.active
        missing = "; no trainer state either: also --reset_trainer_state" if unfolded and not found else ""
        return [*lines[:-1], lines[-1] + missing]

    return PlannedExport(write, weights, checkpoint.config["model"] | changes)


def copy_trainer_state(checkpoint: OLMoCheckpoint, out: Path, layout: str, record: Record) -> bool:
    """Copy ``train.pt`` or ``train/``, unread: it holds arbitrary objects, and OLMo's Trainer wants it.

    :param record: of the weights beside it; where they need this package the state carries the mark, else none.
    :returns: whether there was one; otherwise an empty one is written, for ``--reset_trainer_state``.
    :raises LNSConfigError: it is a symbolic link, or no file of ``torch.save``.
    """
    names = {"unsharded": "train.pt", "sharded": "train/rank0.pt"}
    source, target = checkpoint.folder / names[checkpoint.layout], out / names[layout]
    found = source.is_file()
    if found and layout == checkpoint.layout == "sharded":
        copy_unread(source.parent, target.parent)
    else:
        target.parent.mkdir(exist_ok=True)
        copy_unread(source, target) if found else write_archive(target, {})
    for path in target.parent.glob("rank*.pt") if layout == "sharded" else [target]:
        mark(path, record)
    return found


def mark(path: Path, record: Record) -> None:
    """Make the trainer's state in ``path`` carry the mark when ``record`` needs this package, and no mark otherwise.

    The state is loaded safely and saved again; the file is not touched where it is so already.

    :raises LNSConfigError: not a dict in a file of ``torch.save``, or one with objects of other types than OLMo's;
        without the file, the run starts with ``--reset_trainer_state``.
    """
    # What OLMo's Trainer keeps beside tensors; _reconstruct is numpy's, wherever it lives.
    rebuild = numpy.zeros(0).__reduce__()[0]
    known: list[Any] = [PosixPath, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32")), rebuild]
    torch.serialization.add_safe_globals([needs_olmo_lns])  # again: safe_globals forgets what it was given
    with path.open("rb") as file:
        if file.read(1) != b"\x80":  # torch's older form is a plain pickle
            check_archive(path)
    advice = f"{path} (move it away to start with --reset_trainer_state)"
    with loading(advice), torch.serialization.safe_globals(known):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise LNSConfigError(f"{path} holds a {type(state).__name__}: expected the dict of a trainer's state")
    present = state.pop(KEY, None)
    if (present is not None) == record.active and (present is None or present.values == record.as_dict()):
        return
    torch.save({**state, KEY: Mark(str(record), record.as_dict())} if record.active else state, path)


def write_config(path: Path, checkpoint: OLMoCheckpoint, changes: Mapping[str, str], record: Record) -> None:
    """Write config.yaml with other values in its section ``model`` and a note of the record; keep the other text."""
    text = (checkpoint.folder / "config.yaml").read_text(encoding="utf-8")
    for name, value in changes.items():
        text = re.sub(rf"(?m)^(\s+{name}:[ \t]*)\S+[ \t]*$", rf"\g<1>{value}", text)
    config = dict(checkpoint.config, model=checkpoint.config["model"] | dict(changes))
    if yaml.safe_load(text) != config:  # an unusual spelling: its comments are lost, its content is not
        text = yaml.safe_dump(config, sort_keys=False)
    state = "is folded into the weights" if record.folded else "is active"
    note = "" if record.scheme.is_pre_ln else f"# LayerNorm Scaling ({record.scheme}) {state}; see {RECORD_FILE}.\n"
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith("# LayerNorm Scaling")]
    path.write_text(note + "".join(kept), encoding="utf-8")
