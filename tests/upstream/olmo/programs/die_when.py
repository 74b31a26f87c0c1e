"""Kills its own process at a chosen file operation: ``DIE_WHEN=event:end of the path``.

Loaded by a ``.pth`` line of a test environment. An audit hook sees the operation before it
happens, so that the death falls at the same place of a checkpoint each time.
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
