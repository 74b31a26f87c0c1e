"""``olmo-lns <command>``: a table of commands, each loaded only when it is called."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Sequence

import yaml

from olmo_lns import __version__, settings
from olmo_lns.arguments import short_error
from olmo_lns.errors import LNSError, did_you_mean, one_line
from olmo_lns.text import degrade


@dataclass(frozen=True)
class Command:
    """A command. :param run: ``module:function`` below this package. :param help: one line.

    :param extra: extras of this package that the command may need. :param examples: lines printed under its help.
    """

    run: str
    help: str
    extra: str
    examples: tuple[str, ...] = ()


COMMANDS = {
    "doctor": Command(
        "doctor:main", "check that LayerNorm Scaling can run here, list what is installed", "", ("olmo-lns doctor",)
    ),
    "demo": Command(
        "demo:main", "train a small model with and without LNS and compare", "olmo,analysis",
        ("olmo-lns demo", "olmo-lns demo --steps 50 --layers 8 --arms preln,lns --out /tmp/demo"),
    ),
    "train": Command(
        "train:main", "run OLMo's Trainer on a config, from the pip package alone", "olmo",
        ("olmo-lns train 60M-lns --save_folder=runs/a", "olmo-lns train my.yaml --model.layer_norm_type=lns"),
    ),
    "config": Command(
        "study.files:config", "list and copy the configs of the pack", "",
        ("olmo-lns config list", "olmo-lns config copy olmo/60M-lns.yaml"),
    ),
    "data": Command(
        "study.data.commands:main", "make and check tokenised data", "study",
        ("olmo-lns data prepare jsonl notes.jsonl --tokenizer my/tokenizer.json --eos '</s>' --out /data/notes",),
    ),
    "megatron-args": Command(
        "study.engines.megatron:main", "expand a Megatron YAML config to flags", "megatron",
        ("olmo-lns megatron-args 60M-lns --one-per-line",),
    ),
    "study": Command(
        "study.cli:main", "plan, launch, collect and report a scaling study", "olmo,study",
        ("olmo-lns study plan paper", "olmo-lns study launch tiny --out runs/tiny --run"),
    ),
    "analyze": Command(
        "diagnostics.cli:main", "draw the paper's diagnostics for a model", "analysis,olmo",
        (
            "olmo-lns analyze variance --model runs/lns/step1000-unsharded --data heldout.npy --plot variance.png",
            "olmo-lns analyze layer-drop --model stock-llama --scheme lns --data text.jsonl",
            "olmo-lns analyze compare preln/variance.json lns/variance.json -o variance.svg",
        ),
    ),
    "export": Command("export.cli:main", "fold the factor into the weights for stock software", "hf"),
    "verify": Command(
        "export.cli:verify", "compare a checkpoint with its export", "hf", ("olmo-lns verify runs/lns/step1000 model",)
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 fine, 1 a check or run failed, 2 wrong usage."""
    # torch, OLMo and transformers make half a million permanent objects. With Python's threshold of 700, a sixth of
    # their import time goes into garbage collection.
    gc.set_threshold(10_000, 10, 10)
    degrade()
    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = short_error  # type: ignore[method-assign, assignment]
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `olmo-lns config list | head` closes the pipe
        _close_stdout()
        return 141  # the shell's exit code for SIGPIPE
    except OSError as error:  # from the last flush
        _close_stdout()
        print(f"olmo-lns: standard output: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]


def _close_stdout() -> None:
    """Keep the interpreter's last flush from failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"olmo-lns {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if (command := COMMANDS.get(name)) is None:
        hint = did_you_mean(name, COMMANDS)
        print(f"olmo-lns: unknown command {name!r}{hint}. Known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # OLMo calls an OmegaConf function that OmegaConf 2.4 renamed; a user cannot act on the warning.
    warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)
    try:
        if name != "doctor":  # doctor reports unknown settings itself
            settings.check()
        module, _, function = command.run.partition(":")
        code: int = getattr(importlib.import_module(f"olmo_lns.{module}"), function)(rest)
        return code
    except SystemExit as stop:
        if stop.code == 0 and command.examples:  # the command has printed its help
            print("\n".join(["", "examples:", *(f"  {line}" for line in command.examples)]))
        raise
    except BrokenPipeError:
        raise
    except (LNSError, ModuleNotFoundError, OSError, yaml.YAMLError, RecursionError, KeyboardInterrupt) as error:
        if (text := _in_one_line(command, error)) is None:
            raise
        print(f"olmo-lns {name}: {text}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _in_one_line(command: Command, error: BaseException) -> str | None:
    """Return the message for a user; None for a fault of the program, whose traceback is shown."""
    if isinstance(error, LNSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if not (module and command.extra) or importlib.util.find_spec(module) is not None:
            return None
        extra = {"olmo": "olmo", "olmo_core": "olmo-core", "megatron": "megatron"}.get(module, command.extra)
        return f"needs {module}, which is not installed: pip install 'olmo-lns[{extra}]'"
    if isinstance(error, OSError):  # a read-only folder, a full disk, a model missing from the hub
        where = "writing" if error.filename is None else error.filename
        return f"{where}: {error.strerror}" if error.strerror else one_line(error)
    if isinstance(error, yaml.YAMLError):
        return f"not YAML: {' '.join(str(error).split())}"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "an input is nested too deeply or contains itself"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    more = "`olmo-lns <command> --help` lists its options."
    return f"usage: olmo-lns <command> [options]\n\n{rows}\n\n{more}\n\n{settings.describe()}"
