"""OLMo checkpoints written with some weights multiplied: folded, unfolded, or in another layout or dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

import torch
import yaml

from olmo_lns.checkpoints.archive import write_archive
from olmo_lns.checkpoints.olmo import SHARDED, OLMoCheckpoint
from olmo_lns.checkpoints.tensors import ChunkFunction, LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export import fold_schemes, trainer_mark
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Factor, Rounding, block_factors, norm_factor, scaled
from olmo_lns.integrations.olmo import types
from olmo_lns.record import RECORD_FILE, Record
from olmo_lns.schemes import Scheme

__all__ = ["NewCheckpoint", "chunk_scaler", "copy_trainer_state", "factors_of", "folding", "plain", "write_config"]

_NOTE = "# LayerNorm Scaling"


def folding(checkpoint: OLMoCheckpoint) -> dict[str, Factor]:
    """Parameter -> what it is multiplied by when the checkpoint's scheme is folded into stock Pre-LN.

    :raises LNSConfigError: a scheme that cannot be.
    """
    scheme, layers = checkpoint.record.scheme, checkpoint.architecture.n_layers
    if not checkpoint.record.active:
        return {}
    if scheme.keeps_forward(layers):
        return dict(factors_of(checkpoint, scheme))
    if problem := fold_schemes.obstacle(scheme, layers):
        raise LNSConfigError(
            f"{checkpoint.folder}: {scheme.definition.title} ({scheme}) cannot be folded into a stock model: "
            f"{problem}. It runs in OLMo with olmo-lns; --format olmo keeps it as it is"
        )
    return fold_schemes.factors(checkpoint.architecture, scheme, checkpoint.tensors)


def factors_of(checkpoint: OLMoCheckpoint, scheme: Scheme) -> dict[str, float]:
    """Parameter -> the factor of its block, for all parameters that carry it when ``scheme`` is folded in."""
    layers = checkpoint.architecture.n_layers
    return block_factors(checkpoint.architecture.sites, layers, norm_factor(scheme, layers))


def plain(checkpoint: OLMoCheckpoint, rounding: Rounding, dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """All weights as a Pre-LN model needs them: the factor folded in, if it is not already."""
    return scaled(_without_gates(checkpoint), folding(checkpoint), rounding, dtype)


def _without_gates(checkpoint: OLMoCheckpoint) -> dict[str, LazyTensor]:
    """The weights that a stock model has, once the gates are folded in."""
    gates = set(fold_schemes.gates(checkpoint.architecture)) if checkpoint.record.active else set()
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in gates}


@dataclass(frozen=True)
class NewCheckpoint:
    """What is made of an OLMo checkpoint, in OLMo's format.

    :param record: of the weights written, and ``layer_norm_type`` what the config calls them.
    :param factors: parameter -> what it is multiplied by.
    :param layout: ``unsharded`` or ``sharded``; a sharded one needs a sharded source.
    :param dtype: of the weights, None as they are.
    :param moments: also keep what is not the model in a sharded checkpoint (the optimizer), and do
        this to its tensors; None: the model alone.
    """

    source: OLMoCheckpoint
    record: Record
    layer_norm_type: str
    layout: str
    rounding: Rounding
    factors: Mapping[str, Factor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    moments: Mapping[str, ChunkFunction] | None = None

    def write(self, out: Path) -> bool:
        """Weights, record, trainer's state and config.yaml into the folder ``out``.

        :returns: whether the source had a trainer's state.
        :raises LNSConfigError: sharded was asked for of an unsharded one.
        """
        if self.layout == "unsharded":
            self._unsharded(out)
        elif self.source.layout == "sharded":
            self._sharded(out)
        else:
            raise LNSConfigError(f"{self.source.folder} is unsharded: a sharded one can only be made of a sharded one")
        self.record.write(out)
        found = copy_trainer_state(self.source, out, self.layout, self.record)
        write_config(out / "config.yaml", self.source, self.layer_norm_type, self.record)
        return found

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        """Those of the source that are kept."""
        return _without_gates(self.source) if self.record.folded else self.source.tensors

    def _unsharded(self, out: Path) -> None:
        weights = scaled(self.tensors, self.factors, self.rounding, self.dtype)
        # A distributed checkpoint stores the model's names under "model."; a state dict does not.
        names = {name: stored.removeprefix("model.") for name, stored in self.source.stored_names.items()}
        write_archive(out / "model.pt", {names[name]: weights[name] for name in weights})

    def _sharded(self, out: Path) -> None:
        functions: dict[str, ChunkFunction] = {}
        for name, stored in self.source.stored_names.items():
            tensor = self.source.tensors[name]
            if name in self.factors or (self.dtype is not None and self.dtype != tensor.dtype):
                functions[stored] = chunk_scaler(name, self.factors.get(name, 1.0), self.rounding, self.dtype)
        functions.update(self.moments or {})
        kept = self.tensors
        gone = {stored for name, stored in self.source.stored_names.items() if name not in kept}
        model_only = self.moments is None
        self.source.sharded.rewrite(
            out / SHARDED, lambda n: n not in gone and (n.startswith("model.") or not model_only), functions
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
        trainer_mark.mark(path, record)
    return found


def chunk_scaler(name: str, factor: Factor, rounding: Rounding, dtype: torch.dtype | None) -> ChunkFunction:
    """A function for :meth:`DistributedCheckpoint.rewrite` that scales every chunk, by rows if the factor has rows."""

    def scale(_: Any, offsets: Any, chunk: torch.Tensor) -> torch.Tensor:
        part = factor if isinstance(factor, float) else factor[offsets[0] : offsets[0] + chunk.shape[0]]
        return rounding.scale(name, chunk, part, dtype or chunk.dtype)

    return scale


def write_config(path: Path, checkpoint: OLMoCheckpoint, layer_norm_type: str, record: Record) -> None:
    """The checkpoint's config.yaml with another norm type, and an ``init_fn`` that whoever runs it knows; everything
    else keeps its text."""
    changes, text = {"layer_norm_type": layer_norm_type}, checkpoint.text
    if "init_fn" in checkpoint.config["model"]:
        changes["init_fn"] = _init_fn(checkpoint.architecture.init_fn, record)
    for name, value in changes.items():
        text = re.sub(rf"(?m)^(\s+{name}:[ \t]*)\S+[ \t]*$", rf"\g<1>{value}", text)
    wanted = dict(checkpoint.config, model=checkpoint.config["model"] | changes)
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
