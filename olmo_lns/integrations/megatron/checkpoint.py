"""Wrappers around ``megatron.training.checkpointing``: restore the settings, refuse a mismatch.

Megatron saves its whole ``args`` but restores and compares fixed lists of names.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError
from olmo_lns.integrations.megatron.report import say
from olmo_lns.integrations.megatron.settings import Settings
from olmo_lns.record import Record, check_match

__all__ = ["load_args", "load_base", "load_modelopt"]


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
        _compare(args, state, result[1] or load_dir)
        return result

    return _load_base_checkpoint


def load_modelopt(original: Callable[..., Any]) -> Callable[..., Any]:
    """ModelOpt reads a distributed checkpoint by itself when it needs no optimizer."""
    parameters = inspect.signature(original)

    def load_modelopt_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.core import dist_checkpointing
        from megatron.post_training.checkpointing import get_sharded_load_dir
        from megatron.training.global_vars import get_args

        call = parameters.bind(*args, **kwargs).arguments
        running = get_args()
        folder, _ = get_sharded_load_dir(getattr(running, call.get("load_arg", "load")))
        if folder is not None and dist_checkpointing.check_is_distributed_checkpoint(folder):
            state = dist_checkpointing.load_common_state_dict(folder)
            _compare(running, state, folder, training=call.get("optimizer") is not None)
        return original(*args, **kwargs)

    return load_modelopt_checkpoint


def _restore(args: Any, saved_args: Any) -> None:
    saved, running = Settings.of(saved_args), Settings.of(args)
    # A user who allows a difference by name means the command line as it is.
    filled = running if environment.read(environment.ALLOW_MISMATCH) else running.filled_from(saved)
    _check(args, saved.record(saved_args), filled.record(), "the checkpoint to load")
    if filled != running:
        filled.store(args)
        say(f"from the checkpoint's arguments: {_words(filled)}")


def _compare(args: Any, state: Any, source: object, *, training: bool = True) -> None:
    if "args" in state:
        saved_args = state["args"]
        _check(
            args, Settings.of(saved_args).record(saved_args), Settings.of(args).record(args), source, training=training
        )
    elif (running := Settings.of(args)).active:
        title = running.scheme.definition.title
        say(f"{source} holds no arguments: nobody can tell whether it was trained with {title}")


def _check(args: Any, saved: Record, running: Record, source: object, *, training: bool = True) -> None:
    """``--finetune`` starts a new run from the weights, and folded ones are a Pre-LN model's."""
    training = training and not getattr(args, "skip_train", False)
    folded = saved.folded and not running.active
    if folded and training and getattr(args, "finetune", False):
        training = False
        say(f"{source} has the factor folded into its weights: they are trained on as plain Pre-LN (--finetune)")
    try:
        differences = check_match(saved, running, source=source, training=training)
    except CheckpointMismatchError as error:
        if folded:
            raise CheckpointMismatchError(f"{error} --finetune starts a new Pre-LN run from them.") from None
        raise
    for name in differences:
        say(f"going on in spite of {name}, allowed by {environment.ALLOW_MISMATCH}")


def _words(settings: Settings) -> str:
    exponent = f" (exponent {settings.exponent:g})" if settings.layernorm_scaling else ""
    words = [settings.flag + exponent] * settings.active
    words += ["--layernorm-scaling-keep-scaled-init"] * settings.layernorm_scaling_keep_scaled_init
    words += ["--no-scaled-init"] * settings.no_scaled_init
    return " ".join(words)
