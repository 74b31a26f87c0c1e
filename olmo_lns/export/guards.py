"""OLMo's own converters to Hugging Face, stopped before they lose the factor.

``scripts/convert_olmo_to_hf_new.py`` never looks at the norms: it writes an ``OlmoForCausalLM``,
whose norms have neither factor nor gain, whatever the checkpoint holds. ``hf_olmo`` keeps the
name of the norm but not the exponent. A script runs as ``__main__`` and imports neither OLMo nor
this package, so the first is recognised by its file name when it imports transformers' Olmo, before it works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import sys
from dataclasses import replace as replace_fields
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

import yaml

from olmo_lns.environment import ALLOW_MISMATCH
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.autoload import on_import
from olmo_lns.integrations.olmo import types
from olmo_lns.integrations.patching import MARKER, Target, replace
from olmo_lns.record import Record, accepted, check_match

log = logging.getLogger("olmo_lns")

#: The module whose import betrays a converter script; imported by nothing else but Olmo's users.
TRIGGER = "transformers.models.olmo.configuration_olmo"
#: OLMo's script, and the copy of it that transformers ships.
CONVERTERS = ("convert_olmo_to_hf_new", "convert_olmo_weights_to_hf")
_VERIFIED = {"01810dd1b8a5ed6b": "ai2-olmo 0.5.0 to main (2025-09)"}


@functools.cache
def install() -> None:
    """Guard the converters that are imported from now on, or already are. Idempotent and inert.

    Call it before ``hf_olmo`` or a converter is imported, or when :data:`TRIGGER` is. Nothing happens unless a
    checkpoint that was trained under a scheme is about to be converted.

    :raises CheckpointMismatchError: (in the converter) the conversion would lose the factor.
    """
    on_import(TRIGGER, lambda module: _check_script())
    on_import("hf_olmo.configuration_olmo", _guard_hf_olmo)
    on_import("hf_olmo.modeling_olmo", _guard_hf_olmo_model)
    for module in (CONVERTERS[0], f"scripts.{CONVERTERS[0]}"):
        on_import(module, lambda m: replace(Target(f"{m.__name__}:write_model", _VERIFIED), _guarded))


def check_conversion(folder: str | Path, *, keeps_gains: bool) -> None:
    """Refuse to convert the checkpoint in ``folder`` without its factor.

    :param keeps_gains: whether the converter writes the gains of the norms; one that does not
        loses also a factor that was folded into them.
    :raises CheckpointMismatchError: it would, and the difference was not allowed.
    """
    model: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):  # the converter says it
        model |= yaml.safe_load((Path(folder) / "config.yaml").read_text(encoding="utf-8"))["model"]
    record = Record.read(folder) or Record(types.scheme_of(model.get("layer_norm_type", "")))
    in_gains = record.folded and model.get("layer_norm_with_affine", True) and not keeps_gains
    if in_gains:
        record = replace_fields(record, folded=False)
    try:
        allowed = check_match(record, Record(scaled_init=record.scaled_init), source=folder)
    except CheckpointMismatchError as error:
        why = "this converter drops the gains into which its factor was folded. " if in_gains else ""
        raise CheckpointMismatchError(f"{why}{error} Or: olmo-lns export {folder} OUT --format hf") from None
    for difference in allowed:
        log.warning("converting %s although its factor is lost (%s was allowed)", folder, difference)


def _check_script() -> None:
    """If the running script is one of the converters: check the checkpoint it was told to convert."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not {Path(p).stem for p in (main, sys.argv[0] if sys.argv else None) if p} & set(CONVERTERS):
        return
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--input_dir")
    folder = parser.parse_known_args(sys.argv[1:])[0].input_dir
    if folder:
        check_conversion(folder, keeps_gains=False)


def _guarded(write_model: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(model_path: Any, input_base_path: Any, *args: Any, **kwargs: Any) -> Any:
        check_conversion(input_base_path, keeps_gains=False)
        return write_model(model_path, input_base_path, *args, **kwargs)

    return wrapped


def _guard_hf_olmo(module: ModuleType) -> None:
    """``OLMoConfig.save_pretrained`` is what its converter calls first, with the checkpoint's folder."""
    config_class: Any = module.OLMoConfig
    original = config_class.save_pretrained
    if getattr(original, MARKER, False):
        return

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if types.has_scheme(self.layer_norm_type):
            if not (Path(save_directory) / "config.yaml").is_file():
                _require_allowed(self.layer_norm_type, str(save_directory))
            check_conversion(save_directory, keeps_gains=True)
        return original(self, save_directory, *args, **kwargs)

    setattr(save_pretrained, MARKER, True)
    config_class.save_pretrained = save_pretrained


def _guard_hf_olmo_model(module: ModuleType) -> None:
    """A model that hf_olmo builds under a scheme could be trained, and would be refused at its first save."""

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(config: Any) -> Any:
            _require_allowed(config.layer_norm_type, "OLMoForCausalLM")
            return make(config)

        return wrapped

    replace(Target(f"{module.__name__}:create_model_config_from_pretrained_config", {}), wrap, only_look=True)


def _require_allowed(layer_norm_type: Any, what: str) -> None:
    """:raises CheckpointMismatchError: ``what`` of hf_olmo is under a scheme, which was not allowed."""
    if not types.has_scheme(layer_norm_type):
        return
    name = f"{types.scheme_of(layer_norm_type).name}-to-preln"
    if name not in accepted():
        raise CheckpointMismatchError(
            f"{what}: this model has layer_norm_type {layer_norm_type!s}, but hf_olmo's files hold no record and not "
            "every parameter of a scheme. Train in OLMo, or in transformers from a folder of olmo-lns hf init or hf "
            "import. An OLMo checkpoint becomes a stock model by olmo-lns export CHECKPOINT OUT --format hf. Or set "
            f"{ALLOW_MISMATCH}={name}."
        )
