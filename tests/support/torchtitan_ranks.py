"""Run processes of torchtitan as forks of this one. Usage: ``main()``, with their requests as JSON in ``sys.argv[1]``.

Every process does what ``python -m torchtitan.train`` does in a new interpreter: it reads the site folder, then runs the
module. This process must not have imported torchtitan.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from support.start_up import remove_start_up_hook

SITE = Path(__file__).parent / "torchtitan_site"


def main():
    """Start all requested processes, wait for them, and print their exit statuses."""
    assert not {"torchtitan", "olmo_lns"}.intersection(sys.modules)
    sys.path[:0] = [str(SITE), *filter(None, [os.environ.get("TORCHTITAN_SRC")])]
    children = []
    for request in json.loads(sys.argv[1]):
        if not (child := os.fork()):
            os._exit(_run(request))
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


def _run(request):
    signal.alarm(850)  # before the time limit of support.forked, which would leave this process behind
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    sys.argv = ["torchtitan.train", *request["options"]]
    status = 0
    try:
        if "TORCHTITAN_SITE" not in os.environ:
            remove_start_up_hook()
        sys.modules.pop("sitecustomize", None)
        import sitecustomize  # noqa: F401

        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
    except BaseException as error:
        traceback.print_exc()
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    print("olmo_lns was imported:", "olmo_lns" in sys.modules)
    sys.stdout.flush()
    sys.stderr.flush()
    return status
