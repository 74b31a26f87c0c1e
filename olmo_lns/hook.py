"""Load an integration when its framework is imported, and wrap a framework's functions by name.

When Python starts, ``olmo_lns_autoload.pth`` adds one small finder to ``sys.meta_path`` and one function to
``sys.path_hooks``. Neither imports anything. When a framework of :mod:`olmo_lns.frameworks` is first imported, the
finder imports this module and calls the integration's ``register()``. ``register()`` calls :func:`on_import` for each
framework module whose functions it wraps. The wrapping happens when that module has been executed. If a function or a
module is missing, an error is raised only when a scheme is selected (:func:`require_wrapped`).

Other packages, such as typeguard, jaxtyping and pytest, may later insert a finder before this one. If that finder finds
the framework, Python does not call this package's finder. But Python also calls the functions on ``sys.path_hooks``
with the framework's folder. The function of this package then moves the finder back to the first place, so that Python
calls it for the submodules of the framework.
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
from typing import Any, Callable, Iterable, Sequence

from olmo_lns.environment import DISABLE, is_set, warn
from olmo_lns.errors import UpstreamChangedError, one_line
from olmo_lns.frameworks import FRAMEWORKS

log = logging.getLogger("olmo_lns")

#: Framework module -> a module of this package whose ``register()`` is called after the framework module was executed.
#: These modules are above the integrations, so no integration may import them.
LATE_REGISTRATIONS = {"olmo.train": "olmo_lns.diagnostics.monitor"}

#: Attribute of every function that replaces an upstream function.
MARKER = "__olmo_lns_wrapped__"

_callbacks: dict[str, dict[Callable[[ModuleType], object], None]] = {}
#: Modules of frameworks that a scheme needs, in the order of the requests.
_needed: dict[str, None] = {}
#: Name -> the spec of the module when its callbacks ran. Each execution of a module has a new spec.
_executed_specs: dict[str, Any] = {}
_activated: set[str] = set()
_problems: dict[str, list[str]] = {}


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Find a module with the other finders, and arrange that its callbacks run after it is executed.

    The finder in ``olmo_lns_autoload.pth`` calls this function by its name.

    :returns: None if no callback is requested for ``name``, so that the import system asks the other finders.
    """
    if (framework := name.partition(".")[0]) in FRAMEWORKS:
        activate(framework)
    _run_missed_callbacks()
    if name not in _callbacks:
        return None
    spec = _spec_of_others(name, path, target)
    execute = getattr(getattr(spec, "loader", None), "exec_module", None)
    if execute is not None and not is_wrapped(execute):

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _run_callbacks(module.__name__, module)  # pytest has one loader for all modules

        setattr(exec_module, MARKER, True)
        # On the instance, so that the loader keeps its class for inspect, pickle and runpy. Some loaders refuse the
        # attribute; _run_missed_callbacks covers them.
        with contextlib.suppress(AttributeError):
            spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
    return spec


def _spec_of_others(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    # Like Python 3.12, skip finders that only have the old find_module.
    finders = [finder for finder in list(sys.meta_path) if hasattr(finder, "find_spec") and not _is_ours(finder)]
    specs = (finder.find_spec(name, path, target) for finder in finders)
    return next((spec for spec in specs if spec is not None), None)


def _run_callbacks(name: str, module: ModuleType) -> None:
    _executed_specs[name] = _spec(module)
    done: set[Callable[[ModuleType], object]] = set()
    # A callback may request others.
    while pending := [callback for callback in _callbacks.get(name, ()) if callback not in done]:
        for callback in pending:
            done.add(callback)
            _run(callback, module)


def _run(callback: Callable[[ModuleType], object], module: ModuleType) -> None:
    """Run a callback. Its error is kept for :func:`require_wrapped`, because no scheme is selected yet."""
    try:
        callback(module)
    except Exception as error:
        _note_problem(module.__name__, f"{module.__name__} could not be wrapped: {one_line(error)}")


def _note_problem(name: str, text: str) -> None:
    _problems.setdefault(name.partition(".")[0], []).append(text)


def _run_missed_callbacks() -> None:
    """Run the callbacks of modules whose loader this finder did not see."""
    for name in list(_callbacks):
        module = sys.modules.get(name)
        if module is not None and _is_executed(module) and _executed_specs.get(name) is not _spec(module):
            _run_callbacks(name, module)


def _is_executed(module: Any) -> bool:
    """Return true if a loader has executed the module, and false for a stand-in that a test put into sys.modules."""
    spec = _spec(module)
    return bool(getattr(spec, "loader", None)) and not getattr(spec, "_initializing", False)


def _spec(module: Any) -> Any:
    """Return the spec of a module without attribute access, which would execute a lazy module."""
    return vars(ModuleType)["__dict__"].__get__(module).get("__spec__") if isinstance(module, ModuleType) else None


class _Finder:
    """The same finder as in the start-up hook, for interpreters without the hook (``-S``, ``pip --target``)."""

    #: Every finder of this package has this attribute. It is true for the one of the start-up hook.
    olmo_lns_finder = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not _is_ours(sys.meta_path[0]):
            sys.meta_path.insert(0, self)
        return find_spec(name, path, target)

    def path_hook(self, path: str) -> Any:
        """Move the finder to the front of ``sys.meta_path`` again while a framework is imported.

        Python calls this function when it first looks for modules in a folder, such as the folder of OLMo's package.
        Another package may have put its own finder in front by then. The function always raises ImportError, because
        it imports nothing itself. Python then asks its next path hook.
        """
        name = os.path.basename(path)
        if name in FRAMEWORKS and name in sys.modules:
            self.find_spec(name)
        raise ImportError


def _is_ours(finder: Any) -> bool:
    return hasattr(finder, "olmo_lns_finder")


def install() -> None:
    """Put a finder at the first place if the start-up hook did not run. A second call has no effect."""
    if not any(map(_is_ours, sys.meta_path)):
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        sys.path_hooks.insert(0, finder.path_hook)


def on_import(name: str, callback: Callable[[ModuleType], object], *, needed: bool = True) -> None:
    """Call ``callback(module)`` after each execution of module ``name``, and now if it has been executed.

    :param callback: a named function. A second request for the same function has no effect, whereas a new lambda would
        run again.
    :param needed: true if a scheme needs the module. :func:`require_wrapped` then raises an error if it is missing.
    """
    if needed:
        _needed[name] = None
    callbacks = _callbacks.setdefault(name, {})
    if callback in callbacks:
        return
    callbacks[callback] = None
    install()
    if _is_executed(module := sys.modules.get(name)):
        _executed_specs[name] = _spec(module)
        _run(callback, module)  # type: ignore[arg-type]


def activate(framework: str) -> None:
    """Run ``register()`` of a framework's integration once. If it fails, the framework is imported all the same."""
    if framework in _activated or is_set(DISABLE):
        return
    name = FRAMEWORKS[framework].integration
    if name in sys.modules and not hasattr(sys.modules[name], "register"):
        return  # the integration is being imported; the next import calls activate again
    _activated.add(framework)
    warn()
    try:
        importlib.import_module(name).register()
        for upstream_module in LATE_REGISTRATIONS:
            if upstream_module.partition(".")[0] == framework:
                on_import(upstream_module, _register_module_above)
    except Exception as error:
        _note_problem(framework, f"the integration of olmo-lns could not be loaded: {one_line(error)}")
        log.warning("olmo-lns could not load its %s integration, and changes nothing: %s", framework, one_line(error))


def _register_module_above(module: ModuleType) -> None:
    importlib.import_module(LATE_REGISTRATIONS[module.__name__]).register()


def wrap(path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, needed: bool = True) -> bool:
    """Replace a function by ``make(function)``, which keeps its name, docstring and ``__wrapped__``.

    :param path: ``"package.module:Class.method"`` or ``"package.module:function"``.
    :param make: receives the function, without its classmethod or staticmethod, and returns one of the same signature.
    :param needed: true if a scheme needs the function. :func:`require_wrapped` then raises an error if it is missing.
    :returns: true if the function is wrapped now. A second call has no effect.

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
            _note_problem(module_name, f"{path} was not found ({one_line(error)})")
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
    """Return true if :func:`wrap` made the function, or the function of the classmethod."""
    return hasattr(getattr(function, "__func__", function), MARKER)


def require_wrapped(framework: str, modules: Iterable[str] = ()) -> None:
    """Check that a framework has all functions and modules that a scheme needs. Call it when a scheme is selected.

    It is enough that a module can be found. Its functions are wrapped when it is imported, which may be later.

    :param framework: top-level name of the framework.
    :param modules: modules that a scheme needs in this kind of program only. Their :func:`on_import` has
        ``needed=False``.
    :raises UpstreamChangedError: if a function or a module is missing. The message has its name.
    """
    needed = [name for name in _needed if name.partition(".")[0] == framework]
    missing = [f"the module {name} was not found" for name in [*needed, *modules] if not _exists(name)]
    if problems := dict.fromkeys([*_problems.get(framework, ()), *missing]):
        raise UpstreamChangedError(
            f"A scheme was selected, but this version of {framework} lacks what olmo-lns needs: {'; '.join(problems)}. "
            f"Install another version of {framework} or a newer olmo-lns, or train without the scheme's flag."
        )


def _exists(name: str) -> bool:
    """Return true if a module can be found. Its packages are not imported, as importlib.util.find_spec would do."""
    return _locate(name) is not None


def _locate(name: str) -> list[str] | None:
    """Return the folders of a package, ``[]`` for another module, and None if there is no module of this name."""
    if name in sys.modules:
        module = sys.modules[name]
        return None if module is None else list(getattr(module, "__path__", ()))
    path = None
    if (package := name.rpartition(".")[0]) and not (path := _locate(package)):
        return None
    spec = _spec_of_others(name, path)
    return None if spec is None else list(spec.submodule_search_locations or ())


def autoload_active() -> bool:
    """Return true if the start-up hook ran in this interpreter (not under ``-S`` or ``-I -S``)."""
    return any(getattr(finder, "olmo_lns_finder", False) for finder in sys.meta_path)
