"""What an export is asked for, what it is made of, and what every kind of checkpoint can be made into."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from olmo_lns import __version__
from olmo_lns.checkpoints.tensors import LazyTensor
from olmo_lns.errors import LNSConfigError
from olmo_lns.export.fold import Rounding, fold_record
from olmo_lns.export.transformers_folder import Stock, set_dtype
from olmo_lns.record import Record

OLMO, OLMO_UNSHARDED, OLMO_CORE, HF, MEGATRON = FORMATS = ("olmo", "olmo-unsharded", "olmo-core", "hf", "megatron")

#: Of a file of weights, where nothing else is asked for: what transformers took for long.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Options:
    """:param output: the folder to create. :param format: one of :data:`FORMATS`.

    :param dtype: of the weights written, None as they are.
    :param exponent: of the factor, only where the checkpoint does not say it.
    :param tokenizer: a file, folder or hub name, or ``none``; None: the checkpoint's own.
    :param max_shard_size: bytes of a file of weights, and of what an export holds of them; None: :data:`SHARD_BYTES`.
    :param drop_optimizer: ``--unfold`` leaves the optimizer's moments out.
    :param rounding: keeps account of what the export changes.
    """

    output: str
    format: str = OLMO
    dtype: torch.dtype | None = None
    exponent: float | None = None
    tokenizer: str | None = None
    max_shard_size: int | None = None
    drop_optimizer: bool = False
    rounding: Rounding = field(default_factory=Rounding)

    @property
    def shard_bytes(self) -> int:
        return self.max_shard_size or SHARD_BYTES

    def require_exponent(self, record: Record, folder: Path) -> None:
        """:raises LNSConfigError: another one than the checkpoint says, which would otherwise be passed over."""
        says = record.scheme.parameters.get("exponent")
        if self.exponent not in (None, says):
            found = "no exponent" if says is None else f"exponent {says:g}"
            raise LNSConfigError(
                f"{folder} is {record}, {found}; --exponent {self.exponent:g} is for what a checkpoint does not say"
            )


@dataclass(frozen=True)
class Target:
    """An export that can be made: what it is made of was read and checked, and nothing is written yet.

    :param write: writes it into an empty folder; returns what is worth telling, one line each.
    :param weights: what is written, each read when its turn comes; by the names that the export's reader gives them.
    :param config: of the model that is written, without its dtype.
    """

    write: Callable[[Path], list[str]]
    weights: Mapping[str, LazyTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def export_target(stock: Stock, record: Record, options: Options) -> Target:
    """The folder that stock software runs, its factors folded in."""
    # What tells later readers of a config that the factor is inside; stock code keeps and ignores it.
    said: dict[str, Any] = {"lns": "folded", "lns_record": record.as_dict()} if record.folded else {}

    def write(out: Path) -> list[str]:
        lines = [f"{stock.name}: {stock.why}", f"lns: {'folded' if said else 'none (a Pre-LN model)'}"]
        lines.append(stock.write_tokenizer(out, options.tokenizer))
        stock.write(out, options.shard_bytes, said)
        return lines

    return Target(write, stock.weights, stock.config)


def train_target(stock: Stock, saved: Record, options: Options) -> Target:
    """A model folder of ours to train on in transformers, its factors outside the weights.

    :param saved: of the checkpoint, from which ``stock`` was unfolded where it was folded.
    :raises LNSConfigError: Pre-LN, or a model or scheme that the transformers integration does not have.
    """
    from olmo_lns.integrations.transformers.families import FAMILIES
    from olmo_lns.integrations.transformers.sites import require_supported

    folder, kind = stock.beside, str(stock.config["model_type"])
    if saved.scheme.is_pre_ln:
        raise LNSConfigError(f"{folder} is Pre-LN: olmo-lns export --format hf makes a stock model of it")
    family = FAMILIES.get(kind)
    if family is None or not family.sub_layers:
        raise LNSConfigError(f"{folder}: becomes a {kind} model, which the transformers integration does not know")
    require_supported(family, saved.scheme, int(stock.config["num_hidden_layers"]))
    record = replace(saved, folded=False, plugin_version=__version__)

    def config() -> Any:
        from olmo_lns.integrations.transformers.configs import config_class

        values = {name: value for name, value in stock.config.items() if name != "model_type"}
        made = config_class(family)(**values, lns_record=record.as_dict())
        made.architectures = [f"LNS{stock.name}"]
        return made

    def write(out: Path) -> list[str]:
        made = config()
        set_dtype(made, stock.dtype)
        note = stock.write_tokenizer(out, options.tokenizer)
        stock.write(out, options.shard_bytes, {})
        made.save_pretrained(out)
        state = "unfolded: the factors are outside again" if saved.folded else "as trained, factors outside the weights"
        return [f"{made.model_type}: {record}", state, note]

    return Target(write, stock.weights, config().to_dict())


class Source:
    """A kind of checkpoint; :func:`olmo_lns.export.cli.source_of` has the table.

    Each method raises :class:`LNSConfigError` for a checkpoint that it cannot do this with.
    """

    name: str
    #: As a message calls it: "an OLMo checkpoint".
    kind: str
    #: What it can be written as; the first is its own.
    formats: tuple[str, ...]

    def recognises(self, folder: Path) -> bool:
        """Whether ``folder`` holds such a checkpoint."""
        raise NotImplementedError

    def open(self, folder: Path, exponent: float | None = None) -> Any:
        """The checkpoint, read and compared; its ``record`` says what it was trained with.

        :param exponent: of the factor, for a checkpoint that does not say it.
        """
        raise NotImplementedError

    def stock(self, checkpoint: Any, options: Options, *, trained: bool = False) -> Stock:
        """The model for transformers, folded; ``trained``: as it was trained, its factors outside the weights."""
        raise NotImplementedError

    def folded(self, checkpoint: Any, options: Options) -> Target:
        """The checkpoint in its own format with its factors inside the weights."""
        raise NotImplementedError

    def unfolded(self, checkpoint: Any, options: Options) -> Target:
        """A folded checkpoint in its own format with its factors outside again."""
        raise NotImplementedError

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        """The model with its factors, in fp32: a module that gives logits.

        :param exported: what its export says of it, for a checkpoint that says nothing itself.
        """
        raise NotImplementedError

    def fold(self, folder: Path, options: Options) -> Target:
        """The export in ``options.format``."""
        checkpoint = self.open(folder, options.exponent)
        options.require_exponent(checkpoint.record, folder)
        if options.format == HF:
            return export_target(self.stock(checkpoint, options), fold_record(checkpoint.record), options)
        return self.folded(checkpoint, options)

    def unfold(self, folder: Path, options: Options) -> Target:
        """A checkpoint to train on in the framework that wrote it."""
        if self.formats == (HF,):
            raise LNSConfigError(f"--unfold reads OLMo, OLMo-core and Megatron checkpoints, not --source {self.name}")
        checkpoint = self.open(folder)
        options.require_exponent(checkpoint.record, folder)
        return self.unfolded(checkpoint, options)

    def train(self, folder: Path, options: Options) -> Target:
        """A model folder of ours for transformers, to train on."""
        if self.formats == (HF,):
            raise LNSConfigError(f"hf import reads OLMo, OLMo-core and Megatron checkpoints, not {self.kind}")
        checkpoint = self.open(folder)
        return train_target(self.stock(checkpoint, options, trained=True), checkpoint.record, options)


def nothing_to_fold(record: Record, folder: Path, otherwise: str = "Pre-LN", note: str = "") -> LNSConfigError:
    """:param otherwise: what the checkpoint is where it is not folded."""
    state = "folded already" if record.folded else otherwise
    return LNSConfigError(f"{folder} is {state}: there is nothing to fold{note}")


def about_moments(count: int, options: Options, reset: str) -> str:
    """What became of the optimizer's moments. :param reset: what to do where they are gone."""
    if count:
        return f"{count} moments of the optimizer rescaled to match"
    if options.drop_optimizer:
        return f"warning: the optimizer's moments were dropped as asked: {reset}"
    return f"warning: the checkpoint holds no optimizer state: {reset}"
