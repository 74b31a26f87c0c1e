"""Whether the Hugging Face hub can be reached. Asked once: the hub's client retries for 30 s."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from olmo_lns.errors import LNSError

#: Seconds after which a host that does not answer counts as one that cannot be reached.
PATIENCE = 3.0


def cached_only(name: str, *files: str) -> bool:
    """Whether ``name`` has to be loaded with ``local_files_only``: it is in the cache, and the hub cannot be reached.

    :param name: a folder or file, then nobody is asked, or a name on the hub.
    :param files: one of which is in the cache when ``name`` was ever loaded.
    :raises LNSError: it is neither here nor in the cache, and the hub cannot be reached.
    """
    if Path(name).exists() or reachable():
        return False
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except HFValidationError:
        cached = False
    if not cached:
        raise LNSError(
            f"{name}: no such file or folder, not in the cache of the Hugging Face hub ({constants.HF_HUB_CACHE}), and "
            f"the hub cannot be reached ({constants.ENDPOINT}): give a path, or load it once where there is a network"
        )
    return True


def reachable() -> bool:
    """Whether the hub answers; True where only a proxy could tell, False where ``HF_HUB_OFFLINE`` says so."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    return bool(urllib.request.getproxies()) or _connects(constants.ENDPOINT)


@functools.cache
def _connects(endpoint: str) -> bool:
    address = urlsplit(endpoint)
    place = (address.hostname or "", address.port or (80 if address.scheme == "http" else 443))
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(place, timeout=PATIENCE).close()
            answered.set()

    # In a thread of its own: looking up a name has no time limit.
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(PATIENCE)
