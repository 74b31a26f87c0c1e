"""OLMo's checkpoints: folded for stock OLMo and transformers, unfolded to train on, in another layout or dtype."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PosixPath
from typing import Any, Mapping

import numpy
import torch
import yaml

from olmo_lns import __version__
from olmo_lns.checkpoints.archive import read_archive, write_archive
from olmo_lns.checkpoints.olmo import SHARDED, OLMoCheckpoint, is_olmo
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.export import fold, gemma2, huggingface, tokenizer
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, chunk_scaler, scaled
from olmo_lns.export.moments import moment_functions, rescaled
from olmo_lns.export.options import HF, OLMO, OLMO_UNSHARDED, Options, Source, Target
from olmo_lns.integrations.olmo import types
from olmo_lns.integrations.olmo.state import KEY, Mark, allow_in_safe_loading
from olmo_lns.record import RECORD_FILE, Record

__all__ = ["OLMo", "mark"]

_NOTE = "# LayerNorm Scaling"
_OPTIMIZER = "optim.pt"


class OLMo(Source):
    name = "olmo"
    kind = "an OLMo checkpoint"
    formats = (OLMO, OLMO_UNSHARDED, HF)

    def recognises(self, folder: Path) -> bool:
        return is_olmo(folder)

    def fold(self, folder: Path, options: Options) -> Target:
        checkpoint = OLMoCheckpoint.open(folder, exponent=options.exponent)
        options.require_exponent(checkpoint.record, folder)
        active, model, scheme = checkpoint.record.active, checkpoint.architecture, checkpoint.record.scheme
        if active and model.norm_after:
            raise LNSConfigError(f"{folder}: LNS with norm_after (post-norm blocks) is not a model that can be folded")
        problem = fold.obstacle(scheme, model.n_layers) if active else ""
        record = fold.fold_record(checkpoint.record)
        if options.format == HF:
            own = tokenizer.identifier_in(checkpoint.config, folder / "config.yaml")
            if problem and gemma2.has_form(scheme, model.n_layers):
                stock = gemma2.stock(model, scheme, checkpoint.tensors, options, own, folder)
            else:
                weights = scaled(_kept(checkpoint, record), _factors(checkpoint), options.rounding, options.dtype)
                stock = huggingface.of_olmo(model, weights, own, folder)
            return huggingface.export_target(stock, record, options)
        if not active and model.init_fn not in types.INIT_FNS:
            state = "folded already" if checkpoint.record.folded else "Pre-LN"
            raise LNSConfigError(f"{folder} is {state}: there is nothing to fold, and stock OLMo runs it as it is")
        layout = "unsharded" if options.format == OLMO_UNSHARDED else checkpoint.layout
        if problem:  # layout and dtype may change, the model does not
            record = replace(checkpoint.record, plugin_version=__version__)
            kind, factors = types.spell(scheme, model.base_norm), {}
            lines = [
                f"OLMo, {layout}, layer_norm_type {kind}: not folded ({problem}); it runs in OLMo with olmo-lns only"
            ]
        else:
            kind, factors, lines = model.base_norm, _factors(checkpoint), _in_words(checkpoint, layout)
        new = NewCheckpoint(checkpoint, record, kind, layout, options, factors)
        return new.target(lines)

    def unfold(self, folder: Path, options: Options) -> Target:
        checkpoint = OLMoCheckpoint.open(folder)
        options.require_exponent(checkpoint.record, folder)
        record, layout = fold.unfolded_record(checkpoint.record, folder), checkpoint.layout
        scales = _scales(checkpoint)
        _check_name(options.output, layout)
        moments, optimizer, note = _optimizer(checkpoint, scales, options)
        new = NewCheckpoint(
            checkpoint,
            record,
            types.spell(record.scheme, checkpoint.architecture.base_norm),
            layout,
            options,
            {name: 1 / scale for name, scale in scales.items()},
            moments=moments,
            optimizer=optimizer,
        )
        return new.target([f"{record}, {layout}: the factor is outside again", note])

    def train(self, folder: Path, options: Options) -> Target:
        checkpoint = OLMoCheckpoint.open(folder)
        own = tokenizer.identifier_in(checkpoint.config, folder / "config.yaml")
        inverse = fold.inverse(checkpoint.architecture, checkpoint.record)
        weights = scaled(checkpoint.tensors, inverse, options.rounding, options.dtype)
        stock = huggingface.of_olmo(checkpoint.architecture, weights, own, folder)
        return huggingface.train_target(stock, checkpoint.record, options)

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        from olmo_lns.models.loading import open_olmo

        OLMoCheckpoint.open(folder)  # its weights against its config, as for an export
        return open_olmo(folder)


def _factors(checkpoint: OLMoCheckpoint) -> dict[str, Factor]:
    """Parameter -> what it is multiplied by when the checkpoint's scheme is folded into stock Pre-LN.

    :raises LNSConfigError: a scheme that cannot be.
    """
    if not checkpoint.record.active:
        return {}
    scheme, layers = checkpoint.record.scheme, checkpoint.architecture.n_layers
    if problem := fold.obstacle(scheme, layers):
        raise LNSConfigError(
            f"{checkpoint.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a stock model: "
            f"{problem}. It runs in OLMo with olmo-lns; --format olmo keeps it as it is"
        )
    return fold.factors(checkpoint.architecture, scheme, checkpoint.tensors)


def _scales(checkpoint: OLMoCheckpoint) -> dict[str, float]:
    """Parameter -> the factor of its block, for all parameters that carry it when LNS is folded in."""
    model = checkpoint.architecture
    scale = fold.norm_factor(checkpoint.record.scheme, model.n_layers)
    return {name: scale(index + 1) for index in range(model.n_layers) for name in model.sites(index)}


def _kept(checkpoint: OLMoCheckpoint, record: Record) -> dict[str, LazyTensor]:
    """The weights that the model of ``record`` has: a stock one none of the gates that were folded."""
    gone = set(fold.gates(checkpoint.architecture)) if record.folded and checkpoint.record.active else set()
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in gone}


def _in_words(checkpoint: OLMoCheckpoint, layout: str) -> list[str]:
    """What becomes of a checkpoint that stock OLMo runs then."""
    model, scheme = checkpoint.architecture, checkpoint.record.scheme
    lines = [f"OLMo, {layout}, layer_norm_type {model.base_norm}: "]
    if checkpoint.record.active:
        into = "gains and biases of the block norms" if model.layer_norm_with_affine else "projections after the norms"
        into = into if scheme.keeps_forward(model.n_layers) else "rows of attn_out and ff_out"
        lines[0] += f"{model.n_layers} factors folded into the {into}"
        lines.append("the optimizer's state is left out: its moments belong to the unfolded weights")
    else:
        lines[0] += "there was nothing to fold"
        lines.append("the optimizer's state is left out")
    if model.init_fn in types.INIT_FNS:
        lines.append(
            f"init_fn {model.init_fn}, which stock OLMo does not know, is called normal: the weights are drawn"
        )
    return lines


def _check_name(output: str, layout: str) -> None:
    """OLMo's ``--load_path`` tells the layout by the folder's name alone.

    :raises LNSConfigError: it would take this one for the other layout.
    """
    name = os.path.basename(os.path.normpath(output))
    if name.endswith("-unsharded") != (layout == "unsharded"):
        better = f"{name}-unsharded" if layout == "unsharded" else name.removesuffix("-unsharded") or "lns"
        raise LNSConfigError(
            f"{output}: OLMo takes a --load_path for unsharded when its name ends in -unsharded, and only then; this "
            f"checkpoint is {layout}: call it {better}"
        )


def _optimizer(
    checkpoint: OLMoCheckpoint, scales: Mapping[str, float], options: Options
) -> tuple[dict[str, ChunkFunction] | None, Any, str]:
    """What to do with a sharded optimizer's state, a rescaled unsharded one, and one line for the report."""
    reset = "start training with --reset_optimizer_state"
    canonical = {stored: name for name, stored in checkpoint.stored_names.items()}
    if options.drop_optimizer:
        return None, None, f"warning: the optimizer's moments were dropped as asked: {reset}"
    if checkpoint.layout == "sharded":
        place = checkpoint.folder / SHARDED
        functions = moment_functions(checkpoint.sharded, place, scales, options.rounding, canonical)
        if functions:
            return functions, None, f"{len(functions)} moments of the optimizer rescaled to match"
    path = checkpoint.folder / _OPTIMIZER
    if checkpoint.layout == "sharded" or not path.is_file():
        return None, None, f"warning: the checkpoint holds no optimizer state: {reset}"
    state, count = rescaled(read_archive(path), path, scales, options.rounding, canonical)
    if not count:
        return None, state, "the optimizer has no moments yet: it was saved before its first step"
    return None, state, f"{count} moments of the optimizer rescaled to match"


@dataclass(frozen=True)
class NewCheckpoint:
    """What is made of an OLMo checkpoint, in OLMo's format.

    :param record: of the weights written, and ``layer_norm_type`` what the config calls them.
    :param factors: parameter -> what it is multiplied by.
    :param layout: ``unsharded`` or ``sharded``; a sharded one needs a sharded source.
    :param moments: also keep what is not the model in a sharded checkpoint (the optimizer), and do
        this to its tensors; None: the model alone. :param optimizer: the state to write beside an unsharded one.
    """

    source: OLMoCheckpoint
    record: Record
    layer_norm_type: str
    layout: str
    options: Options
    factors: Mapping[str, Factor] = field(default_factory=dict)
    moments: Mapping[str, ChunkFunction] | None = None
    optimizer: Any = None

    def target(self, lines: list[str]) -> Target:
        """:param lines: of the report. :raises LNSConfigError: shards are asked for where there are none."""
        if self.layout == "unsharded" and self.options.max_shard_size:
            raise LNSConfigError("--max-shard-size: an unsharded OLMo checkpoint is one model.pt: leave it out")
        kept, options = _kept(self.source, self.record), self.options
        weights = scaled(kept, self.factors, options.rounding, options.dtype)

        def write(out: Path) -> list[str]:
            self._unsharded(out, weights) if self.layout == "unsharded" else self._sharded(out, set(weights))
            if self.optimizer is not None:
                write_archive(out / _OPTIMIZER, self.optimizer)
            self.record.write(out)
            found = copy_trainer_state(self.source, out, self.layout, self.record)
            write_config(out / "config.yaml", self.source, self._changes(), self.record)
            unfolded = self.source.record.folded and self.record.active
            missing = "; no trainer state either: also --reset_trainer_state" if unfolded and not found else ""
            return [*lines[:-1], lines[-1] + missing]

        return Target(write, weights, self.source.config["model"] | self._changes())

    def _changes(self) -> dict[str, str]:
        """Of the model's settings: the norm type, and an ``init_fn`` that whoever runs it knows."""
        changes = {"layer_norm_type": self.layer_norm_type}
        if "init_fn" in self.source.config["model"]:
            changes["init_fn"] = _init_fn(self.source.architecture.init_fn, self.record)
        return changes

    def _unsharded(self, out: Path, weights: Mapping[str, LazyTensor]) -> None:
        # A distributed checkpoint stores the model's names under "model."; a state dict does not.
        names = {name: stored.removeprefix("model.") for name, stored in self.source.stored_names.items()}
        write_archive(out / "model.pt", {names[name]: weights[name] for name in weights})

    def _sharded(self, out: Path, kept: set[str]) -> None:
        functions = {
            stored: chunk_scaler(name, self.factors.get(name, 1.0), self.options.rounding, self.options.dtype)
            for name, stored in self.source.stored_names.items()
        }
        gone = {stored for name, stored in self.source.stored_names.items() if name not in kept}
        model_only = self.moments is None
        self.source.sharded.rewrite(
            out / SHARDED,
            lambda n: n not in gone and (n.startswith("model.") or not model_only),
            functions | dict(self.moments or {}),
            max_bytes=self.options.shard_bytes,
            dtypes=dict.fromkeys(functions, self.options.dtype),
        )


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

    :raises LNSConfigError: not a dict in a file of ``torch.save``, or one with objects of other types than OLMo's.
    """
    # What OLMo's Trainer keeps beside tensors; _reconstruct is numpy's, wherever it lives.
    rebuild = numpy.zeros(0).__reduce__()[0]
    known: list[Any] = [PosixPath, numpy.ndarray, numpy.dtype, type(numpy.dtype("uint32")), rebuild]
    allow_in_safe_loading()
    try:
        with torch.serialization.safe_globals(known):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise LNSConfigError(
                f"{path} holds {found[1]}, which is not loaded from a file: move the trainer's state away and export "
                "again; the run then starts with --reset_trainer_state"
            ) from None
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    except (RuntimeError, ValueError, KeyError, EOFError) as error:
        raise LNSConfigError(f"{path} is truncated or not a file of torch.save: {one_line(error)}") from None
    if not isinstance(state, dict):
        raise LNSConfigError(f"{path} holds a {type(state).__name__}: expected the dict of a trainer's state")
    present = state.pop(KEY, None)
    if (present is not None) == record.active and (present is None or present.values == record.as_dict()):
        return
    torch.save({**state, KEY: Mark(str(record), record.as_dict())} if record.active else state, path)


def write_config(path: Path, checkpoint: OLMoCheckpoint, changes: Mapping[str, str], record: Record) -> None:
    """The checkpoint's config.yaml with other values in its section ``model``; everything else keeps its text."""
    text = checkpoint.text
    for name, value in changes.items():
        text = re.sub(rf"(?m)^(\s+{name}:[ \t]*)\S+[ \t]*$", rf"\g<1>{value}", text)
    wanted = dict(checkpoint.config, model=checkpoint.config["model"] | dict(changes))
    if yaml.safe_load(text) != wanted:
        # An unusual spelling of the file: its comments are lost, its content is not.
        text = yaml.safe_dump(wanted, sort_keys=False)
    state = "is folded into the weights" if record.folded else "is active"
    note = "" if record.scheme.is_pre_ln else f"{_NOTE} ({record.scheme}) {state}; see {RECORD_FILE}.\n"
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_NOTE))
    path.write_text(note + text, encoding="utf-8")


def _init_fn(asked: str, record: Record) -> str:
    """Stock OLMo does not know ours: weights that it can run are ``normal``, as all but residual outputs were drawn.

    The record keeps what those were; weights to train on under their scheme get ours back.
    """
    if not record.active:
        return "normal" if asked in types.INIT_FNS else asked
    ours = {drawn: name for name, drawn in types.INIT_FNS.items()}
    return ours.get(record.scaled_init, asked) if asked == "normal" else asked
