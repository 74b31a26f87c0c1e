"""``olmo-lns <command>``: a table of commands, each loaded only when it is called."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import os
import sys
import warnings
from typing import Callable, Sequence

import yaml

from olmo_lns import __version__, environment, extras
from olmo_lns.errors import LNSError, did_you_mean

#: command -> (module whose ``main(argv) -> int`` runs it, or module:function; one line of help; extras it may need).
COMMANDS = {
    "doctor": ("olmo_lns.doctor", "what is installed, what is supported, which norm backend would run", ()),
    "demo": ("olmo_lns.demo", "train a small model with and without LNS and compare", ("olmo", "analysis")),
    "train": ("olmo_lns.runs.train", "run OLMo's Trainer on a config, from the pip package alone", ("olmo",)),
    "config": ("olmo_lns.study.plan.check", "list and copy the configs of the pack, check anybody's", ("olmo",)),
    "data": ("olmo_lns.study.data.commands", "make and check tokenised data", ()),
    "megatron-args": ("olmo_lns.study.engines.megatron", "expand a Megatron YAML config to flags", ("megatron",)),
    "study": ("olmo_lns.study.cli", "plan, launch, collect and report a scaling study", ("olmo", "study")),
    "analyze": ("olmo_lns.diagnostics.cli", "draw the paper's diagnostics for a model", ("analysis", "olmo")),
    "hf": ("olmo_lns.export.cli:hf", "model folders for transformers that carry a scheme", ("hf",)),
    "export": ("olmo_lns.export.cli", "fold the factor into the weights for stock software", ("hf", "olmo")),
    "verify": ("olmo_lns.export.cli:verify", "compare a checkpoint with its export", ("hf", "olmo")),
}

#: command, or command and what it does -> lines that can be typed, printed under its help. The rest brings its own.
EXAMPLES = {
    "doctor": ("olmo-lns doctor", "olmo-lns doctor --require olmo --json"),
    "demo": ("olmo-lns demo", "olmo-lns demo --steps 50 --layers 8 --arms preln,lns --out /tmp/demo"),
    "config": ("olmo-lns config list", "olmo-lns config check 60M-lns.yaml"),
    "config list": ("olmo-lns config list",),
    "config copy": ("olmo-lns config copy olmo/60M-lns.yaml",),
    "config check": ("olmo-lns config check 60M-lns.yaml --gpus 64 --budget 20e9",),
    "data": ("olmo-lns data check /data/dolma --budget 20e9",),
    "data check": ("olmo-lns data check /data/dolma", "olmo-lns data check tokens.npy --vocab-size 50304 --budget 0"),
    "data fetch": ("olmo-lns data fetch dolma -o /data/dolma",),
    "data prepare": ("olmo-lns data prepare text notes/ --tokenizer my/tokenizer.json --eos '</s>' --out /data/notes",),
    "data megatron": ("olmo-lns data megatron /data/dolma -o /data/megatron",),
    "megatron-args": (
        "olmo-lns megatron-args 60M-lns --one-per-line",
        "torchrun --nproc-per-node=8 pretrain_gpt.py $(olmo-lns megatron-args 60M-lns)",
    ),
    "study": ("olmo-lns study plan paper", "olmo-lns study all tiny --out runs/tiny"),
    "study plan": ("olmo-lns study plan paper --gpu H100 --gpus 16 --time 24:00:00",),
    "study launch": (
        "olmo-lns study launch tiny --out runs/tiny --run",
        "olmo-lns study launch paper --out /runs/paper --slurm jobs --partition gpu --time 24:00:00",
    ),
    "study status": ("olmo-lns study status paper --out /runs/paper",),
    "study collect": ("olmo-lns study collect paper --out /runs/paper --allow-missing",),
    "study report": ("olmo-lns study report paper --out /runs/paper",),
    "study all": ("olmo-lns study all tiny --out runs/tiny",),
    "analyze": (
        "olmo-lns analyze variance --model runs/lns/step1000-unsharded --data heldout.npy --plot variance.png",
        "olmo-lns analyze compare preln/variance.json lns/variance.json -o variance.svg",
    ),
    "analyze variance": ("olmo-lns analyze variance --model runs/lns/step1000-unsharded --data heldout.npy",),
    "analyze angular": ("olmo-lns analyze angular --model Qwen/Qwen2.5-0.5B --data allenai/c4,en:validation",),
    "analyze layer-drop": ("olmo-lns analyze layer-drop --model exported --data text.jsonl --tasks arc_easy",),
    "analyze jacobian": ("olmo-lns analyze jacobian --model runs/lns/step1000-unsharded --data heldout.npy",),
    "analyze gradnorm": ("olmo-lns analyze gradnorm --model runs/lns/step1000-unsharded --data heldout.npy",),
    "analyze compare": ("olmo-lns analyze compare preln/variance.json lns/variance.json -o variance.svg",),
    "hf init": ("olmo-lns hf init Qwen/Qwen2.5-0.5B --scheme lns -o qwen-lns",),
    "hf import": ("olmo-lns hf import runs/lns/step1000 -o model",),
    "verify": ("olmo-lns verify runs/lns/step1000 model",),
}

#: Errors of files that a user can act on; said in one line with the file's name.
_FILE_ERRORS = "EACCES EDQUOT EEXIST EISDIR EFBIG EIO ENOENT ENOSPC ENOTDIR EPERM EROFS"
MACHINE = {getattr(errno, name) for name in _FILE_ERRORS.split()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 fine, 1 a check or run failed, 2 wrong usage."""
    # torch, OLMo and transformers make half a million objects that stay: with Python's 700 a sixth of their import
    # goes into looking for some to collect.
    gc.set_threshold(10_000, 10, 10)
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `olmo-lns config list | head`: nobody reads on, and the last flush must not try again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell says of a program that SIGPIPE ended


def _main(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"olmo-lns {__version__}")
        return 0
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS)
        print(f"olmo-lns: unknown command {command!r}{hint}. Known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # OLMo's use of an OmegaConf function that OmegaConf 2.4 renamed; nothing a user can act on.
    warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)
    try:
        if command != "doctor":  # which reports it among everything else that is wrong
            environment.check()
        return function_of(command)(rest)
    except SystemExit as stop:
        if stop.code == 0 and (examples := _examples(command, rest)):  # the command has printed its help
            print(f"\nexample{'s' if len(examples) > 1 else ''}:")
            print("\n".join(f"  {line}" for line in examples))
        raise
    except (LNSError, ModuleNotFoundError, OSError, yaml.YAMLError, RecursionError, KeyboardInterrupt) as error:
        if (text := _in_one_line(command, error)) is None:
            raise
        print(f"olmo-lns {command}: {text}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def function_of(command: str) -> Callable[[Sequence[str]], int]:
    """What runs ``command``; its module is imported now."""
    module, _, name = COMMANDS[command][0].partition(":")
    found: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), name or "main")
    return found


def _in_one_line(command: str, error: BaseException) -> str | None:
    """What a user is told of an error; None for a fault of the program, which is shown whole."""
    if isinstance(error, LNSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        # Which extra brings the module; none does, or it is installed but broken: a fault.
        module = (error.name or "").partition(".")[0]
        if not module or importlib.util.find_spec(module) is not None:
            return None
        extra = extras.extra_of(module, COMMANDS[command][2])
        return extra and f"needs {module}, which is not installed: {extras.advice(extra)}"
    if isinstance(error, OSError):  # a folder that cannot be written, a full disk
        where = error.filename if error.filename is not None else "writing"
        return f"{where}: {error.strerror}" if error.errno in MACHINE else None
    if isinstance(error, yaml.YAMLError):
        return f"not YAML: {' '.join(str(error).split())}"
    return (
        "interrupted" if isinstance(error, KeyboardInterrupt) else "an input is nested too deeply, or contains itself"
    )


def _examples(command: str, rest: Sequence[str]) -> tuple[str, ...]:
    """Of the command, or of its part where it has some: an example of `data check` is none of `data fetch`."""
    parts = any(name.startswith(f"{command} ") for name in EXAMPLES)
    return EXAMPLES.get(f"{command} {rest[0]}" if parts and not rest[0].startswith("-") else command, ())


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text, _) in COMMANDS.items())
    more = "`olmo-lns <command> --help` tells more."
    return f"usage: olmo-lns <command> [options]\n\n{rows}\n\n{more}\n\n{environment.describe()}"
