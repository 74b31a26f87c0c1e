"""Run something right after a module has been imported, and load plugins for the frameworks.

At interpreter start ``olmo_lns_autoload.pth`` puts one small finder on ``sys.meta_path``, where it stays. It imports
nothing. At the first import of a name in :data:`WATCHED` it hands over to this module, which loads the framework's
group of entry points as soon as the framework is there. A plugin that fails, fails the import, and every later import
too: a launch must not go on without it. No finder is removed or replaced, so that threads that walk ``sys.meta_path``
meanwhile miss none.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence

from olmo_lns import environment
from olmo_lns.environment import DISABLE, is_set
from olmo_lns.errors import LNSError

#: Module whose import loads a group of entry points -> the group.
PLUGIN_GROUPS = {
    "olmo": "olmo.plugins",
    # Of transformers: what a converter of OLMo's imports instead of OLMo, the auto classes, which find a model type of
    # ours, what loads, and what resumes.
    "transformers.models.olmo.configuration_olmo": "transformers.plugins",
    "transformers.models.auto.configuration_auto": "transformers.plugins",
    "transformers.modeling_utils": "transformers.plugins",
    "transformers.trainer": "transformers.plugins",
}
#: The same, loaded before the module is executed: it holds what is to be guarded, or imports it while it runs.
EARLY_GROUPS = dict.fromkeys(
    ("hf_olmo", "convert_olmo_to_hf_new", "scripts.convert_olmo_to_hf_new"), "converters.plugins"
)
#: Groups of which only this package's own entry points run: others may use the names for something else.
OWN_GROUPS = ("transformers.plugins", "converters.plugins")
#: What the start-up finder looks for, in ``olmo_lns_autoload.pth`` by the same names.
WATCHED = ("olmo", "olmo_core", "megatron", "transformers", *EARLY_GROUPS)

_callbacks: dict[str, list[Callable[[ModuleType], object]]] = {}
_loaded_groups: set[str] = set()
_activated: set[str] = set()


class PluginError(LNSError):
    """A plugin raised while its framework was being imported."""


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Find ``name`` by the other finders, and arrange that its callbacks run after its ``exec_module``.

    The callbacks stay until all of them have run without an error: an import that failed with one of ours fails again.
    """
    if name in EARLY_GROUPS:
        load_plugins(EARLY_GROUPS[name])
    if name not in _callbacks:
        return None
    # Python 3.12 passes over a finder that has only the find_module of long ago; so do we.
    others = [finder for finder in sys.meta_path if hasattr(finder, "find_spec") and not _is_ours(finder)]
    specs = (finder.find_spec(name, path, target) for finder in others)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None or spec.loader is None:
        return spec
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for callback in _callbacks.get(name, ()):  # the list grows where a callback asks for another of this module
            callback(module)
        _callbacks.pop(name, None)

    # On the instance: the loader keeps its class, so inspect, pickle and runpy see nothing new.
    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


class _PostImportFinder:
    """The finder where the start-up hook does not run (``-S``, ``pip --target``)."""

    olmo_lns_start_up = False  # the hook's has True
    find_spec = staticmethod(find_spec)


def _is_ours(finder: Any) -> bool:
    return hasattr(finder, "olmo_lns_start_up")


def on_import(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Call ``callback(module)`` right after module ``name`` is executed, or now if it already is.

    An exception of the callback fails the import of ``name``.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _callbacks.setdefault(name, []).append(callback)
    importlib.import_module("olmo_lns.hook")  # whom the start-up finder asks
    if not any(map(_is_ours, sys.meta_path)):
        sys.meta_path.insert(0, _PostImportFinder())


def activate() -> None:
    """Arrange that each framework loads its plugins when it is imported. Idempotent."""
    for name, group in PLUGIN_GROUPS.items():
        if group not in _loaded_groups and name not in _activated:
            _activated.add(name)
            on_import(name, lambda module, group=group: load_plugins(group))  # type: ignore[misc]


def load_plugins(group: str) -> None:
    """Load and call every entry point of ``group``, once per process; of :data:`OWN_GROUPS` our own only.

    :raises PluginError: a plugin cannot be loaded or raised; the message names it.
    """
    if group in _loaded_groups or is_set(DISABLE) or _is_namesake(group):
        return
    environment.warn()
    _loaded_groups.add(group)
    found = {entry.value: entry for entry in importlib.metadata.entry_points(group=group)}
    for entry in found.values():
        own = entry.dist is not None and entry.dist.name.replace("_", "-") == "olmo-lns"
        if group in OWN_GROUPS and not own:
            continue
        try:
            entry.load()()
        except Exception as error:
            _loaded_groups.discard(group)
            raise PluginError(
                f"plugin {entry.name!r} ({entry.value}, group {group}) failed: {error} "
                f"[{DISABLE}=1 starts without olmo-lns]"
            ) from error


def _is_namesake(group: str) -> bool:
    """PyPI has other packages called ``olmo``; only AI2's has a model and a training config."""
    module = sys.modules.get("olmo") if group == "olmo.plugins" else None
    return module is not None and not (hasattr(module, "OLMo") or hasattr(module, "TrainConfig"))


def autoload_active() -> bool:
    """Whether the start-up hook ran in this interpreter (it does not under ``-S`` or ``-I -S``)."""
    return any(getattr(finder, "olmo_lns_start_up", False) for finder in sys.meta_path)


def start_up(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """What the start-up finder calls: from the first watched name on, and whenever this module is there already."""
    if name in WATCHED and not is_set(DISABLE):
        activate()
    return find_spec(name, path, target)
