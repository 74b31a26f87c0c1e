"""Load an integration when its framework is imported, and wrap a framework's functions by name.

At interpreter start ``olmo_lns_autoload.pth`` puts one small finder on ``sys.meta_path``. It imports nothing. At the
first import of a name in :data:`INTEGRATIONS` it hands over to this module, and the framework's ``register()`` runs:
it asks for callbacks after the modules that it wraps functions of, by :func:`on_import`, which also run when such a
module is executed again. A missing function costs nothing until a scheme is selected (:func:`require`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence

from olmo_lns.environment import DISABLE, is_set
from olmo_lns.errors import UpstreamChangedError, one_line
from olmo_lns.integrations import autoload  # what is not in INTEGRATIONS yet

log = logging.getLogger("olmo_lns")

#: Top-level name of a framework -> the package whose ``register()`` runs when something of it is first imported. The
#: start-up finder in ``olmo_lns_autoload.pth`` has the same names.
INTEGRATIONS: dict[str, str] = {
    "olmo_core": "olmo_lns.integrations.olmo_core",
}

#: Attribute of every function that stands in an upstream's place.
MARKER = "__olmo_lns_wrapped__"

_callbacks: dict[str, dict[Callable[[ModuleType], object], None]] = {}
_activated: set[str] = set()
_missing: dict[str, list[str]] = {}


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Find ``name`` by the other finders, and arrange that its callbacks run after its ``exec_module``."""
    if (framework := name.partition(".")[0]) in INTEGRATIONS:
        activate(framework)
    if name not in _callbacks:
        return autoload.start_up(name, path, target)
    # Python 3.12 passes over a finder that has only the find_module of long ago; so does this one.
    others = [finder for finder in list(sys.meta_path) if hasattr(finder, "find_spec") and not _is_ours(finder)]
    specs = (finder.find_spec(name, path, target) for finder in others)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for callback in list(_callbacks[name]):
            callback(module)

    # On the instance: the loader keeps its class, so inspect, pickle and runpy see nothing new.
    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


class _Finder:
    """The finder where the start-up hook does not run (``-S``, ``pip --target``)."""

    olmo_lns_start_up = False  # the hook's has True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return start_up(name, path, target)


def _is_ours(finder: Any) -> bool:
    return hasattr(finder, "olmo_lns_start_up")


def start_up(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Find ``name`` for the start-up finder.

    A finder that was put in front since answers first for the modules that it instruments (typeguard, jaxtyping,
    pytest). None is removed: one of this package is put in front again, for the submodules that follow.
    """
    if sys.meta_path and not _is_ours(sys.meta_path[0]):
        sys.meta_path.insert(0, _Finder())
        for framework in INTEGRATIONS:
            if isinstance(sys.modules.get(framework), ModuleType):
                activate(framework)
    return find_spec(name, path, target)


def on_import(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call ``callback(module)`` after each execution of module ``name``, and now if it has been executed.

    :param callback: one function, not a lambda a call: asking twice for the same has no effect.
    """
    known = _callbacks.setdefault(name, {})
    if callback in known:
        return
    known[callback] = None
    if not any(map(_is_ours, sys.meta_path)):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    # Not a stand-in that a test has put there: a module without a loader is no framework.
    if isinstance(module, ModuleType) and getattr(spec, "loader", None) and not getattr(spec, "_initializing", False):
        callback(module)


def activate(framework: str) -> None:
    """Run ``register()`` of a framework's integration, once; an error of it does not fail the framework's import."""
    if framework in _activated or is_set(DISABLE):
        return
    _activated.add(framework)
    try:
        importlib.import_module(INTEGRATIONS[framework]).register()
    except Exception as error:
        _missing.setdefault(framework, []).append(f"olmo-lns could not be loaded: {one_line(error)}")
        log.warning("olmo-lns leaves this %s as it is: %s", framework, one_line(error))


def wrap(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, needed: bool = True) -> bool:
    """Replace a function by ``make(function)``, which keeps its name, docstring and ``__wrapped__``.

    :param path: ``"package.module:Class.method"`` or ``"package.module:function"``.
    :param make: gets the plain function (out of its classmethod or staticmethod), returns one of the same signature.
    :param needed: a scheme cannot run without it: where it is missing, :func:`require` raises.
    :returns: whether it is wrapped now; wrapping twice has no effect.

    Example: ``wrap("olmo.model:OLMo.__init__", wrap_model_init)``.
    """
    module_name, _, qualname = path.partition(":")
    *parents, name = qualname.split(".")
    try:
        owner: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        original = inspect.getattr_static(owner, name)
    except (ImportError, AttributeError) as error:
        if needed:
            _missing.setdefault(path.partition(".")[0], []).append(f"{path} ({one_line(error)})")
        return False
    function = getattr(original, "__func__", original)
    if hasattr(function, MARKER):
        return True
    replacement = functools.wraps(function)(make(function))
    setattr(replacement, MARKER, True)
    kind = type(original) if isinstance(original, (classmethod, staticmethod)) else None
    setattr(owner, name, kind(replacement) if kind else replacement)
    log.debug("wrapped %s", path)
    return True


def is_wrapped(function: Any) -> bool:
    """Whether ``function`` (or the function of a classmethod) is one of this package."""
    return hasattr(getattr(function, "__func__", function), MARKER)


def require(framework: str) -> None:
    """Check that everything that a scheme needs of ``framework`` is wrapped; called where a scheme is selected.

    :param framework: its top-level name.
    :raises UpstreamChangedError: names of what is missing.
    """
    if missing := _missing.get(framework):
        raise UpstreamChangedError(
            f"a scheme was asked for, but this {framework} has no {', '.join(dict.fromkeys(missing))}. This version "
            f"may have moved it: install another version of {framework} or a newer olmo-lns, or set {DISABLE}=1 to "
            "start without a scheme."
        )


def autoload_active() -> bool:
    """Whether the start-up hook ran in this interpreter (it does not under ``-S`` or ``-I -S``)."""
    return any(getattr(finder, "olmo_lns_start_up", False) for finder in sys.meta_path)
