"""The command that installs an extra of this package, and what an extra cannot install on this Python."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import sys
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement


def install_command(extra: str, options: str = "") -> str:
    """Return the command that installs an extra from where this package was installed.

    pip records the source of a package that did not come from an index, such as a clone or a wheel.

    :param options: options of pip, such as ``--no-build-isolation``.

    Example: ``install_command("hf")`` is ``pip install '/home/me/olmo-lns[hf]'``.
    """
    try:
        recorded = json.loads(importlib.metadata.distribution("olmo-lns").read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        recorded = {}
    url = urlparse(recorded.get("url", ""))
    if url.scheme == "file":
        target = f"{unquote(url.path)}[{extra}]"
    elif url.scheme:
        version_control = recorded.get("vcs_info", {}).get("vcs")
        target = f"olmo-lns[{extra}] @ {version_control + '+' if version_control else ''}{url.geturl()}"
    else:
        target = f"olmo-lns[{extra}]"
    return " ".join(filter(None, ("pip install", options, shlex.quote(target))))


def unsupported(extra: str, python: str = "{}.{}".format(*sys.version_info)) -> str:
    """Return why a Python cannot install the framework of an extra, and what to do, or ``""`` if it can.

    The extra itself names the limit, by a marker such as ``python_version < "3.13"`` on a requirement.

    :param python: its version, by default that of this interpreter.

    >>> unsupported("olmo", "3.12")
    ''
    """
    environment = {"extra": extra, "python_version": python}
    try:
        requirements = importlib.metadata.requires("olmo-lns") or []
    except importlib.metadata.PackageNotFoundError:  # a clone on PYTHONPATH
        return ""
    for requirement in map(Requirement, requirements):
        text = str(marker := requirement.marker)
        limit = re.search(r'python_version < "([0-9.]+)"', text)
        if marker and limit and f'extra == "{extra}"' in text and not marker.evaluate(environment):
            return (
                f"{requirement.name} cannot be installed on Python {python}. It needs a Python before {limit[1]}. "
                f"Create an environment with such a Python, and run there: {install_command(extra)}"
            )
    return ""
