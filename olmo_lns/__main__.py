"""``python -m olmo_lns script.py args…`` (also ``torchrun … -m olmo_lns script.py args…``).

Runs a training script with the plugins active where the start-up hook is not: under ``-S`` or
``-I``, from a ``pip --target`` folder, or with the hook removed. ``python -m olmo_lns <command>``
is the same as ``olmo-lns <command>``.
"""

from __future__ import annotations

import os
import runpy
import sys
from itertools import pairwise

from olmo_lns.cli import COMMANDS
from olmo_lns.cli import main as run_command

#: A flag with a number above 1 -> Megatron asserts one connection for it, on GPUs up to Hopper.
_ONE_CONNECTION = ("--tensor-model-parallel-size", "--context-parallel-size")
#: With these it asserts more than one, or leaves the choice to the user.
_MORE_CONNECTIONS = ("--use-megatron-fsdp", "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm")


def _set_connections(args: list[str]) -> None:
    """``CUDA_DEVICE_MAX_CONNECTIONS=1`` where Megatron wants it and the user has not said; before CUDA starts."""
    words = [part for arg in args for part in arg.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag in _ONE_CONNECTION]
    if any(value.isdecimal() and int(value) > 1 for value in given) and not set(words) & set(_MORE_CONNECTIONS):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def main() -> int:
    """:returns: the exit code of a command; a script ends with its own."""
    args = sys.argv[1:]
    if not args or args[0].startswith("-") or args[0] in COMMANDS:
        return run_command(args)
    script = args[0]
    if not os.path.isfile(script):
        print(f"olmo_lns: no script {script!r}, and no such command; `olmo-lns --help` lists them", file=sys.stderr)
        return 2
    from olmo_lns import environment
    from olmo_lns.errors import LNSError
    from olmo_lns.integrations import autoload

    try:
        environment.check()
        if any(arg.split("=")[0] == "--lns-config" for arg in args):
            from olmo_lns.study.megatron_args import expand

            args = [script, *expand(args[1:])]
    except LNSError as error:
        print(f"olmo_lns: {error}", file=sys.stderr)
        return 2
    if environment.is_set(environment.DISABLE):
        print(
            f"olmo_lns: {environment.DISABLE}=1 is set, but the launcher was asked for: unset one of the two",
            file=sys.stderr,
        )
        return 2
    _set_connections(args)
    sys.argv = args
    # As `python script.py` would: the script's folder comes first, so that a checkout is importable.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    autoload.activate()
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
