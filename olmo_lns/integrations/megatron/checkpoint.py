"""Wrappers around ``megatron.training.checkpointing``: restore the settings, refuse a mismatch.

Megatron saves its whole ``args`` but restores and compares fixed lists of names.
"""

from __future__ import annotations

import os
from typing import Any, Callable

from olmo_lns.integrations.megatron.report import say
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import OVERRIDE_VARIABLE, check_match

__all__ = ["load_args", "load_base"]


def load_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """``--use-checkpoint-args``: what was not given on the command line comes from the checkpoint."""

    def load_args_from_checkpoint(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        if isinstance(result, tuple):  # otherwise there is no checkpoint, or one without arguments
            _restore(args, result[1])
        return result

    return load_args_from_checkpoint


def load_base(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every load of weights, also with ``--finetune``, which skips Megatron's own comparison."""

    def _load_base_checkpoint(load_dir: Any, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any) -> Any:
        result = original(load_dir, args, rank0, *rest, **kwargs)
        state = result[0]
        if rank0 or not state:  # rank0: only the common part, to look at; the weights follow
            return result
        if "args" in state:
            _compare(args, state["args"], result[1] or load_dir)
        elif Settings.of(args).layernorm_scaling:
            say(f"{load_dir} holds no arguments: nobody can tell whether it was trained with LayerNorm Scaling")
        return result

    return _load_base_checkpoint


def _restore(args: Any, saved_args: Any) -> None:
    saved, running = Settings.of(saved_args), Settings.of(args)
    # A user who allows a difference by name means the command line as it is.
    filled = running if os.environ.get(OVERRIDE_VARIABLE) else running.filled_from(saved)
    _say_allowed(check_match(saved.record(saved_args), filled.record(), source="the checkpoint to load"))
    if filled != running:
        filled.store(args)
        say(f"from the checkpoint's arguments: {_words(filled)}")


def _compare(args: Any, saved_args: Any, source: object) -> None:
    training = not getattr(args, "skip_train", False)
    saved, running = Settings.of(saved_args).record(saved_args), Settings.of(args).record(args)
    _say_allowed(check_match(saved, running, source=source, training=training))


def _say_allowed(differences: list[str]) -> None:
    for name in differences:
        say(f"going on in spite of {name}, allowed by {OVERRIDE_VARIABLE}")


def _words(settings: Settings) -> str:
    words = [f"--layernorm-scaling (exponent {settings.exponent:g})"] * settings.layernorm_scaling
    words += ["--layernorm-scaling-keep-scaled-init"] * settings.layernorm_scaling_keep_scaled_init
    words += ["--no-scaled-init"] * settings.no_scaled_init
    return " ".join(words)
