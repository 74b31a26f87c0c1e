"""Run something right after a module has been imported, and load plugins for OLMo and Megatron.

At interpreter start ``olmo_lns_autoload.pth`` puts one small finder on ``sys.meta_path``. It
imports nothing; when ``olmo``, ``megatron`` or ``transformers`` is imported for the first time it
hands over to this module, which loads the entry points of ``olmo.plugins``, ``megatron.plugins``
or ``transformers.plugins`` as soon as the framework is there. A plugin that fails, fails the
import: a launch must not go on without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Sequence

from olmo_lns.errors import LNSError

__all__ = ["DISABLE", "PLUGIN_GROUPS", "PluginError", "activate", "autoload_active", "load_plugins", "on_import"]

#: Environment variable: set to 1 to keep the installed plugin out of every interpreter.
DISABLE = "OLMO_LNS_DISABLE"
#: Module whose import loads a group of entry points -> the group.
PLUGIN_GROUPS = {
    "olmo": "olmo.plugins",
    "megatron.core": "megatron.plugins",
    "megatron.training": "megatron.plugins",
    # A converter of OLMo's imports this and never OLMo (olmo_lns.export.guards).
    "transformers.models.olmo.configuration_olmo": "transformers.plugins",
}

_callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
_loaded_groups: set[str] = set()
_started_up = False


class PluginError(LNSError):
    """A plugin raised while its framework was being imported."""


class _PostImportFinder:
    """Meta-path finder that finds nothing itself, but runs callbacks after ``exec_module``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _callbacks:
            return None
        spec = self._real_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            while callbacks := _callbacks.pop(name, []):  # a callback may ask for another of this module
                for callback in callbacks:
                    callback(module)

        # On the instance: the loader keeps its class, so inspect, pickle and runpy see nothing new.
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _real_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if isinstance(finder, _PostImportFinder) or _is_start_up_finder(finder):
                continue
            if (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return None


def _is_start_up_finder(finder: Any) -> bool:
    return bool(getattr(finder, "olmo_lns_start_up", False))


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` right after module ``name`` is executed, or now if it already is.

    An exception of the callback fails the import of ``name``.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
        return
    _callbacks.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())


def activate() -> None:
    """Arrange that each framework loads its plugins when it is imported. Idempotent."""
    for name, group in PLUGIN_GROUPS.items():
        if group not in _loaded_groups:
            on_import(name, lambda module, group=group: load_plugins(group))  # type: ignore[misc]


def load_plugins(group: str) -> None:
    """Load and call every entry point of ``group``, once per process.

    :raises PluginError: a plugin cannot be loaded or raised; it names the plugin.
    """
    if group in _loaded_groups or os.environ.get(DISABLE) == "1" or _is_namesake(group):
        return
    _loaded_groups.add(group)
    for entry in {e.value: e for e in importlib.metadata.entry_points(group=group)}.values():
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
    if group != "olmo.plugins":
        return False
    module = sys.modules.get("olmo")
    return module is not None and not (hasattr(module, "OLMo") or hasattr(module, "TrainConfig"))


def autoload_active() -> bool:
    """Whether the start-up hook ran in this interpreter (it does not under ``-S`` or ``-I -S``)."""
    # The post-import finder is no sign of it: a plugin that is registered by hand brings one too.
    return _started_up or any(_is_start_up_finder(finder) for finder in sys.meta_path)


def start_up_find_spec(
    name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
) -> ModuleSpec | None:
    """What the start-up finder calls when it first sees one of the frameworks it watches for."""
    global _started_up
    _started_up = True
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_start_up_finder(finder)]
    if os.environ.get(DISABLE) == "1":
        return None
    activate()
    for finder in sys.meta_path:
        if isinstance(finder, _PostImportFinder):
            return finder.find_spec(name, path, target)
    return None
