"""What an extra of the package cannot install on this Python."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from packaging.requirements import Requirement


def unsupported(extra: str, python: str = "{}.{}".format(*sys.version_info)) -> str:
    """Return why a Python cannot install the framework of an extra, and what to do, or ``""`` if it can.

    The extra itself names the limit, by a marker such as ``python_version < "3.13"`` on a requirement.

    :param python: its version, by default that of this interpreter.

    >>> unsupported("olmo", "3.12")
    ''
    """
    environment = {"extra": extra, "python_version": python}
    for requirement in map(Requirement, importlib.metadata.requires("olmo-lns") or []):
        text = str(marker := requirement.marker)
        limit = re.search(r'python_version < "([0-9.]+)"', text)
        if marker and limit and f'extra == "{extra}"' in text and not marker.evaluate(environment):
            return (
                f"{requirement.name} cannot be installed on Python {python}. It needs a Python before {limit[1]}. "
                f"Create an environment with such a Python, and install 'olmo-lns[{extra}]' there."
            )
    return ""
