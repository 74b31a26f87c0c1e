"""Load an integration when its framework is imported, and wrap a framework's functions by name.

At interpreter start ``olmo_lns_autoload.pth`` puts one small finder on ``sys.meta_path`` and one function on
``sys.path_hooks``. They import nothing. At the first import of a name in :data:`INTEGRATIONS` they hand over to this
module, and the framework's ``register()`` runs: it asks for callbacks after the modules that it wraps functions of, by
:func:`on_import`, which also run when such a module is executed again. A missing function costs nothing until a scheme
is selected (:func:`require`).

A finder that somebody has put in front since (typeguard's, jaxtyping's, pytest's) answers first for the framework. Its
folder is new to the import system then, which asks the functions on ``sys.path_hooks`` for it: ours puts a finder of
this package in front again, for the submodules that follow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence

from olmo_lns.errors import UpstreamChangedError, one_line
from olmo_lns.settings import DISABLE, is_set, warn

log = logging.getLogger("olmo_lns")

#: Top-level name of a framework -> the package whose ``register()`` runs when something of it is first imported. The
#: start-up finder in ``olmo_lns_autoload.pth`` has the same names.
INTEGRATIONS: dict[str, str] = {
    "megatron": "olmo_lns.integrations.megatron",
    "olmo": "olmo_lns.integrations.olmo",
    "olmo_core": "olmo_lns.integrations.olmo_core",
    "transformers": "olmo_lns.integrations.transformers",
}
#: Module of a framework -> a module of this package, above the integrations, whose ``register()`` runs after it.
FOLLOWERS = {"olmo.train": "olmo_lns.diagnostics.monitor"}

#: Attribute of every function that stands in an upstream's place.
MARKER = "__olmo_lns_wrapped__"

_callbacks: dict[str, dict[Callable[[ModuleType], object], None]] = {}
_ran: dict[str, Any] = {}  # name -> the spec, new in each execution, that its callbacks ran after
_activated: set[str] = set()
_missing: dict[str, list[str]] = {}


def start_up(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Find ``name`` for the start-up finder by the others, and arrange that its callbacks run after it is executed."""
    if (framework := name.partition(".")[0]) in INTEGRATIONS:
        activate(framework)
    _catch_up()
    if name not in _callbacks:
        return None
    # Python 3.12 passes over a finder that has only the find_module of long ago; so does this one.
    others = [finder for finder in list(sys.meta_path) if hasattr(finder, "find_spec") and not _is_ours(finder)]
    specs = (finder.find_spec(name, path, target) for finder in others)
    spec = next((spec for spec in specs if spec is not None), None)
    execute = getattr(getattr(spec, "loader", None), "exec_module", None)
    if execute is not None and not is_wrapped(execute):

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _run_callbacks(module.__name__, module)  # pytest's loader is one for all modules

        setattr(exec_module, MARKER, True)
        # On the instance: the loader keeps its class, so inspect, pickle and runpy see nothing new. One that has no
        # room for it is caught up with.
        with contextlib.suppress(AttributeError):
            spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


def _run_callbacks(name: str, module: ModuleType) -> None:
    _ran[name] = _spec(module)
    done: set[Callable[[ModuleType], object]] = set()
    while todo := [callback for callback in _callbacks.get(name, ()) if callback not in done]:  # one may ask for others
        for callback in todo:
            done.add(callback)
            _run(callback, module)


def _run(callback: Callable[[ModuleType], object], module: ModuleType) -> None:
    """An error of a callback is one of :func:`require`: nobody has asked for a scheme yet."""
    try:
        callback(module)
    except Exception as error:
        _not_there(module.__name__, f"what olmo-lns wraps in {module.__name__} ({one_line(error)})")


def _not_there(name: str, text: str) -> None:
    _missing.setdefault(name.partition(".")[0], []).append(text)


def _catch_up() -> None:
    """Run the callbacks of modules that were executed by a loader that this finder has not seen."""
    for name in list(_callbacks):
        module = sys.modules.get(name)
        if module is not None and _is_executed(module) and _ran.get(name) is not _spec(module):
            _run_callbacks(name, module)


def _is_executed(module: Any) -> bool:
    """Return true for a module that its loader has executed; a stand-in of a test is not wrapped."""
    spec = _spec(module)
    return bool(getattr(spec, "loader", None)) and not getattr(spec, "_initializing", False)


def _spec(module: Any) -> Any:
    """The spec of a module. An attribute of it may be asked for by the class alone: a lazy one would execute itself."""
    return vars(ModuleType)["__dict__"].__get__(module).get("__spec__") if isinstance(module, ModuleType) else None


class _Finder:
    """The start-up finder where its file did not run (``-S``, ``pip --target``): it does the same."""

    olmo_lns_start_up = False  # the file's has True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _is_ours(sys.meta_path[0]):
            sys.meta_path.insert(0, self)
        return start_up(name, path, target)

    def path_hook(self, path: str) -> Any:
        """Come first again at the folder of a framework that is being imported; find nothing."""
        name = os.path.basename(path)
        if name in INTEGRATIONS and name in sys.modules:
            self.find_spec(name)
        raise ImportError


def _is_ours(finder: Any) -> bool:
    return hasattr(finder, "olmo_lns_start_up")


def install() -> None:
    """Put a finder in front, where the start-up hook did not run. Idempotent."""
    if not any(map(_is_ours, sys.meta_path)):
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        sys.path_hooks.insert(0, finder.path_hook)


def on_import(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call ``callback(module)`` after each execution of module ``name``, and now if it has been executed.

    :param callback: one function, not a lambda a call: asking twice for the same has no effect.
    """
    known = _callbacks.setdefault(name, {})
    if callback in known:
        return
    known[callback] = None
    install()
    if _is_executed(module := sys.modules.get(name)):
        _ran[name] = _spec(module)
        _run(callback, module)  # type: ignore[arg-type]


def activate(framework: str) -> None:
    """Run ``register()`` of a framework's integration, once; an error of it does not fail the framework's import."""
    if framework in _activated or is_set(DISABLE):
        return
    name = INTEGRATIONS[framework]
    if name in sys.modules and not hasattr(sys.modules[name], "register"):
        return  # somebody is importing it, and the next import asks again
    _activated.add(framework)
    warn()
    try:
        importlib.import_module(name).register()
        for followed in FOLLOWERS:
            if followed.partition(".")[0] == framework:
                on_import(followed, _register_follower)
    except Exception as error:
        _not_there(framework, f"olmo-lns in it ({one_line(error)})")
        log.warning("olmo-lns leaves this %s as it is: %s", framework, one_line(error))


def _register_follower(module: ModuleType) -> None:
    importlib.import_module(FOLLOWERS[module.__name__]).register()


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
            _not_there(module_name, f"{path} ({one_line(error)})")
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
    """Return true for a function (or the function of a classmethod) of this package."""
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
    """Return true if the start-up hook ran in this interpreter (it does not under ``-S`` or ``-I -S``)."""
    return any(getattr(finder, "olmo_lns_start_up", False) for finder in sys.meta_path)
