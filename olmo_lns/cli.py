"""``olmo-lns <command>``: a table of commands, each loaded only when it is called."""

from __future__ import annotations

import difflib
import importlib
import sys
import warnings
from typing import Sequence

from olmo_lns import __version__
from olmo_lns.errors import LNSError

__all__ = ["COMMANDS", "main"]

#: command -> (module whose ``main(argv) -> int`` runs it, one line of help).
COMMANDS = {
    "doctor": ("olmo_lns.doctor", "what is installed, what is supported, which norm backend would run"),
    "demo": ("olmo_lns.demo", "train a small model with and without LNS and compare"),
    "train": ("olmo_lns.train", "run OLMo's Trainer on a config, from the pip package alone"),
    "config": ("olmo_lns.study.config_check", "check OLMo and Megatron configs"),
    "data": ("olmo_lns.study.data_check", "check tokenised data"),
    "megatron-args": ("olmo_lns.study.megatron_args", "expand a Megatron YAML config to flags"),
    "study": ("olmo_lns.study.cli", "plan, launch, collect and report a scaling study"),
    "analyze": ("olmo_lns.diagnostics.cli", "draw the paper's diagnostics for a model"),
    "export": ("olmo_lns.export.cli", "fold the factor into the weights for stock software"),
    "verify": ("olmo_lns.export.verify", "compare a checkpoint with its export"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 fine, 1 a check or run failed, 2 wrong usage."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"olmo-lns {__version__}")
        return 0
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"olmo-lns: unknown command {command!r}.{hint} Known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # OLMo's use of an OmegaConf function that OmegaConf 2.4 renamed; nothing a user can act on.
    warnings.filterwarnings("ignore", message="register_new_resolver", category=UserWarning)
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(rest))
    except LNSError as error:
        print(f"olmo-lns {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"olmo-lns {command}: interrupted", file=sys.stderr)
        return 130


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: olmo-lns <command> [options]\n\n{rows}\n\n`olmo-lns <command> --help` tells more."
