"""Megatron's checkpoints: compare the scheme in the saved arguments with the running one, or take it from them.

Only what Megatron itself has read is compared: no file is opened here.
"""

from __future__ import annotations

import inspect
import sys
from contextvars import ContextVar
from typing import Any, Callable

from olmo_lns.integrations.megatron.command_line import TEACHER_LOAD_ARGUMENT, launched_arguments
from olmo_lns.integrations.megatron.flags import FLAGS, LNS_FLAG, Selection
from olmo_lns.integrations.megatron.printing import print_once
from olmo_lns.records import require_same
from olmo_lns.schemes import Scheme
from olmo_lns.settings import ALLOW_MISMATCH, is_set

Function = Callable[..., Any]


def wrap_load_args(original: Function) -> Function:
    """Wrap ``load_args_from_checkpoint``: take the selection from the checkpoint if none was given."""

    def load_args_from_checkpoint(args: Any, *rest: Any, **kwargs: Any) -> Any:
        result = original(args, *rest, **kwargs)
        # Not a tuple: no checkpoint, or one without arguments. If a mismatch is allowed, the command line wins.
        saved = Selection.of_saved(result[1]) if isinstance(result, tuple) else Selection()
        has_flags = any(word.split("=")[0] in FLAGS for word in sys.argv[1:])
        if not has_flags and Selection.of(args) == Selection() != saved and not is_set(ALLOW_MISMATCH):
            saved.store(args)
            print_once(f"from the checkpoint's arguments: {saved.flags}")
        return result

    return load_args_from_checkpoint


def wrap_load_base(original: Function) -> Function:
    """Wrap ``_load_base_checkpoint``: compare the schemes, also with ``--finetune``, which Megatron does not."""
    signature = inspect.signature(original)

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        state, running, folder = result[0], call.get("args") or launched_arguments(), call.get("load_dir")
        if call.get("rank0") or not state:  # rank0: a first look at the common part; the weights are loaded later
            return result
        is_teacher = folder is not None and folder == getattr(running, TEACHER_LOAD_ARGUMENT, None)
        compare(state.get("args"), Selection() if is_teacher else Selection.of(running), result[1] or folder)
        return result

    return _load_base_checkpoint


#: Arguments in the checkpoints that ``dist_checkpointing.load`` has read during a call of ModelOpt's loader, else None.
_arguments_read: ContextVar[list[Any] | None] = ContextVar("_arguments_read", default=None)


def wrap_load_sharded(original: Function) -> Function:
    """Wrap ``dist_checkpointing.load``: keep the arguments that it reads, for :func:`wrap_load_modelopt`."""

    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (arguments_read := _arguments_read.get()) is not None:
            state = result[0] if isinstance(result, tuple) else result  # a tuple: with missing and unexpected keys
            arguments_read.append(state.get("args"))
        return result

    return load


def wrap_load_modelopt(original: Function) -> Function:
    """Wrap ``load_modelopt_checkpoint``: compare the schemes of a sharded checkpoint, which it reads by itself.

    A checkpoint that it reads by Megatron's loader is compared in :func:`wrap_load_base`.
    """
    signature = inspect.signature(original)

    def load_modelopt_checkpoint(*args: Any, **kwargs: Any) -> Any:
        arguments_read: list[Any] = []
        token = _arguments_read.set(arguments_read)
        try:
            result = original(*args, **kwargs)
        finally:
            _arguments_read.reset(token)
        if arguments_read:
            running = launched_arguments()
            load_arg = signature.bind(*args, **kwargs).arguments.get("load_arg", "load")
            selected = Selection() if load_arg == TEACHER_LOAD_ARGUMENT else Selection.of(running)
            saved = next((each for each in arguments_read if each is not None), None)
            compare(saved, selected, getattr(running, load_arg))
        return result

    return load_modelopt_checkpoint


def compare(saved: Any, running: Selection, source: object) -> None:
    """Compare the saved arguments with the running selection.

    :param saved: arguments in the checkpoint, None if it has none.
    :raises CheckpointMismatchError: the schemes differ.
    """
    selection = Selection.of_saved(saved)
    flags = selection.flags if selection.layernorm_scaling else f"without {LNS_FLAG}"
    scheme: Scheme | None = None if saved is None else selection.scheme
    require_same(scheme, running.scheme, source=source, setting=lambda scheme: flags)
