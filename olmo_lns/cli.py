"""``olmo-lns <command>``: a table of commands. The module of a command is imported only when it runs."""

from __future__ import annotations

import gc
import importlib.util
import os
import pkgutil
import sys
import warnings
from typing import NamedTuple, Sequence

import yaml

from olmo_lns import __version__, environment
from olmo_lns.errors import LNSError, did_you_mean, one_line
from olmo_lns.frameworks import FRAMEWORKS


class Command(NamedTuple):
    """Entry of the table of commands.

    :param run: ``module:function`` in this package. :param extra: extras that the command needs, comma-separated.
    :param help: description in one line.
    """

    run: str
    extra: str
    help: str


COMMANDS = {
    "doctor": Command("doctor:main", "", "check that LayerNorm Scaling can run here, list what is installed"),
    "demo": Command("demo:main", "olmo,analysis", "train a small model with and without LNS and compare"),
    "train": Command("train:main", "olmo", "run OLMo's Trainer on a config, from the pip package alone"),
    "config": Command("study.bundled_configs:main", "", "list and copy the configs of the pack"),
    "data": Command("study.data.commands:main", "study", "make and check tokenized data"),
    "megatron-args": Command("study.engines.megatron:main", "megatron", "expand a Megatron YAML config to flags"),
    "study": Command("study.cli:main", "olmo,study", "plan, launch, collect and report a scaling study"),
    "analyze": Command("diagnostics.cli:main", "analysis,olmo", "draw the paper's diagnostics for a model"),
    "export": Command("export.cli:main", "hf", "fold the factor into the weights for stock software"),
    "verify": Command("export.cli:verify", "hf", "compare a checkpoint with its export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 success, 1 a check or a run failed, 2 wrong usage."""
    # torch, OLMo and transformers make half a million permanent objects. With Python's threshold of 700, a sixth of
    # their import time goes into garbage collection.
    gc.set_threshold(10_000, 10, 10)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # prints ? for a character that the locale lacks
    name, *rest = list(sys.argv[1:] if argv is None else argv) or ["help"]
    if name in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version"):
        print(f"olmo-lns {__version__}")
        return 0
    if (command := COMMANDS.get(name)) is None:
        hint = did_you_mean(name, COMMANDS)
        print(f"olmo-lns: unknown command {name!r}{hint}. The commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    # OLMo calls a function that OmegaConf 2.4 renamed. A user cannot act on the warning.
    warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)
    try:
        if name != "doctor":  # doctor reports unknown settings itself
            environment.check()
        code: int = pkgutil.resolve_name(f"olmo_lns.{command.run}")(rest)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # `olmo-lns config list | head` closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # lets the interpreter flush at exit
        return 141  # the shell's exit code for SIGPIPE
    except KeyboardInterrupt:
        print(f"olmo-lns {name}: interrupted", file=sys.stderr)
        return 130
    except (LNSError, ModuleNotFoundError, OSError, yaml.YAMLError) as error:
        message = _user_message(command, error)
        if message is None:
            raise
        print(f"olmo-lns {name}: {message}", file=sys.stderr)
        return 1


def _user_message(command: Command, error: Exception) -> str | None:
    """Return the one-line message for a user, or None for a bug, whose traceback is shown."""
    if isinstance(error, LNSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").partition(".")[0]
        if not module or not command.extra or importlib.util.find_spec(module) is not None:
            return None
        extra = command.extra
        if module in FRAMEWORKS and module != "transformers":  # which is in each extra whose command needs it
            extra = FRAMEWORKS[module].extra
        from olmo_lns.pip_extras import install_command, unsupported

        remedy = unsupported(extra) or f"Run: {install_command(extra)}"
        return f"The package {module} is not installed, and this command needs it. {remedy}"
    if isinstance(error, OSError):  # a read-only folder, a full disk, a model missing from the hub
        source = "writing" if error.filename is None else error.filename
        return f"{source}: {error.strerror}" if error.strerror else one_line(error)
    return f"A file cannot be read as YAML. Correct this place: {' '.join(str(error).split())}"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    hint = "`olmo-lns <command> --help` lists its options."
    return f"usage: olmo-lns <command> [options]\n\n{rows}\n\n{hint}\n\n{environment.describe()}"
