"""Kill this process at a chosen file operation: ``DIE_WHEN=event:end of the path``.

A ``.pth`` line of a test environment imports this module. An audit hook sees the operation
before it happens, so the process always dies at the same point of a checkpoint.
"""

import os
import signal
import sys


def install():
    event, _, ending = os.environ["DIE_WHEN"].partition(":")

    def hook(name, arguments):
        if name == event and str(arguments[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if "DIE_WHEN" in os.environ:
    install()
