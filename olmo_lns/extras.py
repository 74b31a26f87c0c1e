"""What an extra of the package cannot install on this Python."""

from __future__ import annotations

import importlib.metadata
import platform
import re

from packaging.requirements import Requirement


def unsupported(extra: str) -> str:
    """Return why this Python cannot install the framework of an extra, and what to do, or ``""`` if it can.

    The extra itself names the limit, by a marker such as ``python_version < "3.13"`` on a requirement.

    >>> unsupported("hf")
    ''
    """
    for requirement in map(Requirement, importlib.metadata.requires("olmo-lns") or []):
        marker = requirement.marker
        limit = re.search(r'python_version < "([0-9.]+)"', str(marker))
        if marker and limit and f'extra == "{extra}"' in str(marker) and not marker.evaluate({"extra": extra}):
            return (
                f"{requirement.name} cannot be installed on Python {platform.python_version()}. It needs a Python "
                f"before {limit[1]}. Create an environment with such a Python, and install 'olmo-lns[{extra}]' there."
            )
    return ""
