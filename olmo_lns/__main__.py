"""``python -m olmo_lns script.py args…`` (also ``torchrun … -m olmo_lns script.py args…``).

Run a training script with the plugin where the start-up hook is off: under ``-S`` or ``-I``, from a
``pip --target`` folder, or with the hook removed. ``python -m olmo_lns <command>`` equals
``olmo-lns <command>``.
"""

from __future__ import annotations

import os
import runpy
import sys

from olmo_lns.cli import COMMANDS
from olmo_lns.cli import main as run_command


def main() -> int:
    """Run a command or a script. :returns: the exit code of a command; a script exits by itself."""
    args = sys.argv[1:]
    if not args or args[0].startswith("-") or args[0] in COMMANDS:
        return run_command(args)
    script = args[0]
    if not os.path.isfile(script):
        print(
            f"olmo_lns: {script!r} is neither a script nor a command. `olmo-lns --help` lists the commands.",
            file=sys.stderr,
        )
        return 2
    from olmo_lns import environment, hook
    from olmo_lns.errors import LNSError
    from olmo_lns.frameworks import FRAMEWORKS
    from olmo_lns.integrations.megatron.cuda import cuda_environment

    try:
        environment.check()
        environment.refuse_disabled("the launcher needs the plugin")
        if any(arg.split("=")[0] == "--lns-config" for arg in args):
            from olmo_lns.study.engines.megatron import expand

            args = [script, *expand(args[1:])]
    except LNSError as error:
        print(f"olmo_lns: {error}", file=sys.stderr)
        return 2
    for name, value in cuda_environment(args).items():
        os.environ.setdefault(name, value)  # before CUDA starts
    sys.argv = args
    # As with `python script.py`, the script's real folder comes first, not the folder of a link to it.
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    hook.install()
    for framework in FRAMEWORKS:
        hook.activate(framework)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        for row in FRAMEWORKS.values():
            options = [arg for arg in args[1:] if row.option and arg.startswith(row.option)]
            if options and row.module not in sys.modules:
                print(f"olmo_lns: {options[0]} had no effect: {script} did not import {row.title}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
