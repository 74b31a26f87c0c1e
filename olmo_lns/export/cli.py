"""``olmo-lns export``, ``verify`` and ``hf``: checkpoints folded for stock software, and model folders to train on."""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from olmo_lns import hub
from olmo_lns.arguments import DTYPES, at_least, seed
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.export import FORMATS, HF
from olmo_lns.record import Record
from olmo_lns.schemes import parse
from olmo_lns.schemes.factor import check_exponent
from olmo_lns.schemes.initialization import resolve

if TYPE_CHECKING:
    from olmo_lns.export.sources import Source


#: Written out, because the sources import torch, which ``--help`` does not wait for.
SOURCES = ("auto", "olmo", "olmo-core", "megatron", "transformers", "authors")

_EXPORT = """\
examples:
  olmo-lns export runs/lns/step1000 folded --format olmo           run in stock OLMo
  olmo-lns export runs/lns/step1000 model --format hf --dtype bf16 transformers, vLLM
  olmo-lns export folded lns-again-unsharded --unfold              continue training under LNS
then compare: olmo-lns verify runs/lns/step1000 model
"""
_HF = """\
examples:
  olmo-lns hf init Qwen/Qwen2.5-0.5B --scheme lns -o qwen-lns         fresh weights in that shape
  olmo-lns hf init llama --set num_hidden_layers=12 --set hidden_size=768 --scheme lns -o out
  olmo-lns hf import runs/lns/step1000 -o model      an OLMo, OLMo-core or Megatron checkpoint, to train on
"""
_VERIFY = """\
Run a checkpoint and its export on the same prompts and compare.

The checkpoint runs with the factor: in OLMo with this plugin; a Megatron or the authors' checkpoint in a Llama whose
block norms a hook multiplies; a model folder of ours in our class of it. The export runs in stock software: in the
transformers class that its config names, or in OLMo in a process of its own without this plugin. A folder that
`olmo-lns hf import` made of the checkpoint can stand in its place; it runs in our class. Image models get random
images.

It passes when every weight is the checkpoint's, folded anew, within one rounding of its dtype; when the config says
the same of everything that changes a function; and when every logit is finite and, in an fp32 export, none is off by
more than 1e-5 of the largest; in a bf16 or fp16 export, by more than twice what running the checkpoint itself in that
dtype costs.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns export``.

    :raises LNSError: refused or failed; nothing is left behind.
    """
    parser = _export_parser()
    args = parser.parse_args(argv)
    if args.unfold and args.format == "hf":
        parser.error("--unfold writes a checkpoint to train on: --format olmo, olmo-core or megatron")
    _give_memory_back()
    with contextlib.suppress(ValueError):  # outside the main thread the caller handles signals
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's stop leaves nothing behind either
    print("\n".join(run(args)))
    return 0


def run(args: argparse.Namespace) -> list[str]:
    """Do what the parsed arguments say; returns the report, one line each."""
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.sources import Options
    from olmo_lns.norm import dtypes

    checkpoint = Path(args.checkpoint)
    source = source_of(checkpoint, args.source)
    formats = source.formats[:1] if args.unfold else source.formats
    if args.format not in (None, *formats) and (not args.unfold or formats != (HF,)):  # those Source.unfold refuses
        how = f"{'is unfolded into' if args.unfold else 'is written as'} {' or '.join(formats)}"
        raise LNSConfigError(f"--format {args.format}: {checkpoint} is {source.kind}, which {how}")
    options = Options(
        output=args.output,
        format=args.format or formats[0],
        dtype=dtypes.DTYPES.get(args.dtype),
        exponent=args.exponent,
        tokenizer=args.tokenizer,
        max_shard_size=args.max_shard_size,
        drop_optimizer=args.drop_optimizer,
    )
    if args.tokenizer not in (None, "none") and options.format != HF:
        raise LNSConfigError(f"--tokenizer is of --format hf; --format {options.format} has no place for it: omit it")
    if args.unfold and options.dtype is not None:
        raise LNSConfigError("--unfold keeps the dtype of the checkpoint: training continues from it")
    rounding = options.rounding
    planned = (source.unfold if args.unfold else source.fold)(checkpoint, options)
    with atomic_folder(options.output) as folder:
        lines = planned.write(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if changed := len(rounding.changed):
        where = f" ({rounding.where})" if rounding.worst else ""
        lines.append(f"{changed} tensors changed; largest relative error {rounding.worst:.2e}{where}")
    return [*lines, f"wrote {options.output}: {size / 1e6:,.1f} MB, SHA256SUMS"]


def source_of(folder: Path, name: str = "auto") -> Source:
    """The kind called ``name``, or the one that recognises ``folder``.

    :raises LNSConfigError: no folder, or no checkpoint.
    """
    from olmo_lns.checkpoints import record_in
    from olmo_lns.checkpoints.olmo import checkpoints_inside
    from olmo_lns.export.megatron import Megatron
    from olmo_lns.export.model_folder import Authors, ModelFolder
    from olmo_lns.export.olmo import OLMo
    from olmo_lns.export.olmo_core import OLMoCore

    if not folder.is_dir():
        raise LNSConfigError(f"{folder} is not a folder: give a checkpoint folder")
    for source in (OLMo(), OLMoCore(), Megatron(), ModelFolder(), Authors()):
        if source.name == name or (name == "auto" and source.recognises(folder)):
            return source
    if inside := checkpoints_inside(folder):
        raise LNSConfigError(f"{folder} is the folder of a run; give one of its checkpoints: {', '.join(inside)}")
    record = record_in(folder) if (folder / "config.json").is_file() else None
    if record is not None and record.folded:
        raise LNSConfigError(
            f"{folder} is a Hugging Face export ({record}), stock and final: expected a checkpoint, such as the one it "
            "was made from"
        )
    raise LNSConfigError(
        f"{folder} holds neither config.yaml (OLMo), config.json and model_and_optim (OLMo-core) nor an iter_* "
        "folder or metadata.json (Megatron): not a checkpoint (the paper's LLaMA: say --source authors)"
    )


def _give_memory_back() -> None:
    """Let glibc return every large block when it is freed; it would keep those of up to 32 MB for itself."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def exponent(text: str) -> float:
    """:raises argparse.ArgumentTypeError: not a number, or out of range."""
    try:
        return check_exponent(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def byte_size(text: str) -> int:
    """``5GB`` -> 5,000,000,000; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    power = "KMG".index(match[2].upper()) + 1 if match and match[2] else 0
    size = int(float(match[1]) * 1000**power) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 5GB")
    return size


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns export",
        description="Fold the factor into the weights, for software that knows nothing of it.",
        epilog=_EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder")
    add("output", help="folder to create; must not exist")
    add("--format", choices=FORMATS, help="default: the checkpoint's own, in its layout")
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="of the weights written")
    add("--source", choices=SOURCES, default="auto", help="what the checkpoint is; 'authors': the paper's LLaMA code")
    add(
        "--exponent",
        type=exponent,
        help="of the factor, only where the checkpoint does not say it (0.5 is the paper's)",
    )
    add(
        "--max-shard-size",
        type=byte_size,
        help="of a file of weights, and of the memory that they take meanwhile (default 5GB)",
    )
    hub = parser.add_argument_group("Hugging Face")
    hub.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: the checkpoint's own")
    inverse = parser.add_argument_group("the inverse")
    inverse.add_argument("--unfold", action="store_true", help="divide the factor out again, to train on under LNS")
    inverse.add_argument("--drop-optimizer", action="store_true", help="do not carry the optimizer's moments over")
    return parser


def verify(argv: Sequence[str]) -> int:
    """Exit code 0: the export computes what the checkpoint computes; 1: it does not."""
    args = _verify_parser().parse_args(argv)
    import torch

    from olmo_lns.checkpoints import record_in
    from olmo_lns.export.atomic import verify_checksums
    from olmo_lns.export.comparison import compare, differences, open_export

    if os.path.realpath(args.checkpoint) == os.path.realpath(args.export):
        raise LNSConfigError(f"{args.export} is the checkpoint itself: give what olmo-lns export made of it")
    files = verify_checksums(args.export)
    print(f"checksums               {f'{files} files match' if files else 'none in this folder'}")
    checkpoint, export = Path(args.checkpoint), Path(args.export)
    exported, vocabulary, longest = open_export(export)
    images = getattr(exported, "main_input_name", "") == "pixel_values"
    batches = _images(args, exported.config) if images else _prompts(args, vocabulary, longest)
    source, said = source_of(checkpoint, args.source), record_in(export)
    with torch.inference_mode():
        result = compare(source.model(checkpoint, said), exported, batches)
    count, different = differences(source, checkpoint, export, said)
    print(f"weights                 {count} compared with the checkpoint's, folded anew")
    text = args.text or f"random tokens (seed {args.seed})"
    result = replace(result, different=tuple(different), text=text)
    print(result)
    return 0 if result.passed else 1


def _images(args: argparse.Namespace, config: Any) -> Any:
    import torch

    if args.text:
        raise LNSConfigError(f"--text: {args.export} reads images: it is compared on random ones")
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randn(args.prompts, config.num_channels, config.image_size, config.image_size, generator=generator)


def _prompts(args: argparse.Namespace, vocabulary: int, longest: int) -> Any:
    import torch

    length = args.length or min(64, longest)
    if length > longest:
        raise LNSConfigError(f"--length {length}: the model takes at most {longest} tokens")
    if not args.text:
        generator = torch.Generator().manual_seed(args.seed)
        return torch.randint(0, vocabulary, (args.prompts, length), generator=generator)
    path = Path(args.export) / "tokenizer.json"
    if not path.is_file():
        raise LNSConfigError(f"{path} does not exist: --text needs an export with its tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    ids = tokenizer.encode(Path(args.text).read_text(encoding="utf-8"), add_special_tokens=False).ids
    count = min(args.prompts, len(ids) // length)
    if not count:
        raise LNSConfigError(f"{args.text} has {len(ids)} tokens, fewer than one prompt of {length}")
    return torch.tensor(ids[: count * length]).view(count, length)


def _verify_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="olmo-lns verify", description=_VERIFY, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", help="the LNS checkpoint")
    add("export", help="what olmo-lns export made of it")
    add("--source", choices=("auto", "authors"), default="auto", help="'authors': a LLaMA of the paper's code")
    add("--text", help="file to take the prompts from, with the export's tokenizer; default: random tokens")
    add("--prompts", type=at_least(1), default=8, help="how many (default 8)")
    add("--length", type=at_least(2), help="tokens of each (default 64, or what the model takes)")
    add("--seed", type=seed, default=0, help="of the random tokens")
    return parser


def hf(argv: Sequence[str]) -> int:
    """Run ``olmo-lns hf``. :raises LNSError: refused or failed; nothing is left behind."""
    args = _hf_parser().parse_args(argv)
    from olmo_lns.integrations.transformers import register

    register()
    lines = _init(args) if args.what == "init" else _import(args)
    print("\n".join([*lines, f"wrote {args.output}"]))
    return 0


def _import(args: argparse.Namespace) -> list[str]:
    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.sources import Options
    from olmo_lns.norm.dtypes import DTYPES

    options = Options(str(args.output), HF, DTYPES.get(args.dtype or ""), tokenizer=args.tokenizer)
    planned = source_of(args.checkpoint).train(args.checkpoint, options)
    with atomic_folder(args.output) as folder:
        return planned.write(folder)


def _init(args: argparse.Namespace) -> list[str]:
    """Config, tokenizer and fresh weights; returns the report."""
    import torch
    import transformers

    from olmo_lns.export.atomic import atomic_folder
    from olmo_lns.export.sources import set_dtype
    from olmo_lns.integrations.transformers.families import FAMILIES, stock_type
    from olmo_lns.integrations.transformers.models import record_of
    from olmo_lns.integrations.transformers.sites import require_supported
    from olmo_lns.norm.dtypes import DTYPES

    config, dtype = _lns_config(_stock_config(args.source, dict(args.set)), args), args.dtype or "fp32"
    record = record_of(config)
    require_supported(FAMILIES[stock_type(config.model_type)], record.scheme, config.num_hidden_layers)
    name = f"AutoModelFor{args.head}"
    if not hasattr(transformers, name):
        raise LNSConfigError(f"--head {args.head}: transformers has no {name}")
    lines = [f"{config.model_type}: {record}"]
    with atomic_folder(args.output) as folder:
        lines.append(_copy_tokenizer(args.source, folder))
        if not args.weights:
            set_dtype(config, DTYPES[dtype])
            config.save_pretrained(folder)
            return [*lines, f"no weights: build it with {name}.from_config, in {dtype}"]
        torch.manual_seed(args.seed)
        try:
            model = getattr(transformers, name).from_config(config)
        except ValueError as error:
            raise LNSConfigError(f"--head {args.head}: {one_line(error)}") from error
        model.to(DTYPES[dtype]).save_pretrained(folder)
        count = sum(parameter.numel() for parameter in model.parameters())
    return [*lines, f"{type(model).__name__}: {count:,} parameters, {dtype}, seed {args.seed}"]


def _stock_config(source: str, changes: dict[str, Any]) -> Any:
    """The config of a folder or hub name, or the default one of a model type."""
    from transformers import AutoConfig

    from olmo_lns.integrations.transformers.models import available, stock_config_class

    known = {family.model_type: family for family in available()}
    fresh = source in known and not Path(source).exists()
    try:
        if fresh:
            config = stock_config_class(known[source])()
        else:
            config = AutoConfig.from_pretrained(source, local_files_only=hub.cached_only(source, "config.json"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LNSConfigError(f"{source}: no config could be read: {one_line(error)}") from error
    with _values_judged():  # a fresh one is built again, so that what it derives from these values is right
        made = type(config)(**changes) if fresh else copy.deepcopy(config)
    for name, value in changes.items():
        # A class keeps an unknown name as an attribute of that name; a name that it converts, it does not keep.
        if (not fresh or name in vars(made)) and not hasattr(config, name):
            raise LNSConfigError(f"--set {name}: {type(config).__name__} has none{did_you_mean(name, vars(config))}")
        if not fresh:
            with _values_judged():
                setattr(made, name, value)
    return made


@contextlib.contextmanager
def _values_judged() -> Iterator[None]:
    """Turn what a config class raises for a value into one line; each class has errors of its own."""
    try:
        yield
    except Exception as error:
        raise LNSConfigError(f"--set: the config refuses a value: {one_line(error.__cause__ or error)}") from error


def _lns_config(config: Any, args: argparse.Namespace) -> Any:
    """A config of ours with the values of a stock one.

    :raises LNSConfigError: a family that the integration does not know, or a config that has a scheme.
    """
    from olmo_lns.integrations.transformers.families import stock_type
    from olmo_lns.integrations.transformers.models import available, config_class, record_of

    known = {family.model_type: family for family in available()}
    if (present := record_of(config)).active:
        raise LNSConfigError(
            f"{args.source} is of {present} already: start from the stock config that it was made from, such as a hub "
            f"name, or from the type {stock_type(config.model_type)} and --set"
        )
    if config.model_type not in known:
        raise LNSConfigError(
            f"model_type {config.model_type!r}{did_you_mean(config.model_type, known)}: "
            f"the transformers integration knows {', '.join(known)}"
        )
    wanted = parse(args.scheme)
    if wanted.is_pre_ln:
        raise LNSConfigError("scheme preln is the stock model: transformers' from_config makes it")
    record = Record(wanted, "", resolve(args.initialization, wanted))
    dropped = ("model_type", "architectures", "lns", "lns_record")  # of a folded folder, whose shape is taken
    values = {name: value for name, value in config.to_dict().items() if name not in dropped}
    with _values_judged():
        return config_class(known[config.model_type])(**values, lns_record=record.as_dict())


def _copy_tokenizer(source: str, folder: Path) -> str:
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    from olmo_lns.integrations.transformers.families import FAMILIES

    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if source in FAMILIES or not any(cached_file(source, name, **quiet) for name in names):
        return f"no tokenizer: {source} has none"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no tokenizer: {one_line(error)}"
    tokenizer.save_pretrained(folder)
    return f"tokenizer: {type(tokenizer).__name__} of {source}"


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected name=value, found {text!r}")
    return name, yaml.safe_load(value)


def _hf_parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = "Make model folders for transformers that carry a scheme."
    parser = argparse.ArgumentParser(prog="olmo-lns hf", description=about, epilog=_HF, formatter_class=raw)
    commands = parser.add_subparsers(dest="what", required=True, metavar="what")
    init = commands.add_parser("init", help="a model with fresh weights, to train from scratch")
    init.add_argument("source", help="folder or hub name with a config.json, or a model type such as llama")
    init.add_argument("--scheme", default="lns", help="such as lns or lns:exponent=0.25 (default %(default)s)")
    init.add_argument("--initialization", default="", help="plain (default), scaled, depth_scaled or upstream")
    init.add_argument("--set", type=_setting, action="append", default=[], metavar="name=value", help="of the config")
    init.add_argument("--head", default="CausalLM", help="CausalLM (default), SequenceClassification, …")
    init.add_argument("--seed", type=seed, default=0, help="of the fresh weights (default %(default)s)")
    init.add_argument("--no-weights", dest="weights", action="store_false", help="config and tokenizer only")
    brought = commands.add_parser("import", help="a checkpoint as it was trained, to train on in transformers")
    brought.add_argument("checkpoint", type=Path, help="of OLMo, OLMo-core or Megatron; a folded one is unfolded")
    brought.add_argument("--tokenizer", help="tokenizer.json, a folder, a hub name, or none; default: its own")
    for command in (init, brought):
        command.add_argument("-o", "--output", type=Path, required=True, help="folder to create; must not exist")
        command.add_argument("--dtype", choices=DTYPES, help="of the weights (default: fp32; import: as they are)")
    return parser
