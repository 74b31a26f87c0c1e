"""Compare the scheme in the arguments that a Megatron checkpoint has saved with the scheme of the run.

With ``--use-checkpoint-args``, the run takes its scheme from these arguments instead. This module opens no file. It
wraps the functions with which Megatron reads its checkpoints.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any, Callable

from olmo_lns.environment import ALLOW_MISMATCH, is_set
from olmo_lns.integrations.megatron.command_line import TEACHER_LOAD_ARGUMENT, launched_arguments, passed_options
from olmo_lns.integrations.megatron.flags import FLAGS, LNS_FLAG, MegatronFlags
from olmo_lns.integrations.megatron.printing import print_once
from olmo_lns.records import require_same
from olmo_lns.schemes import Scheme

Function = Callable[..., Any]


#: True while ``--use-checkpoint-args`` reads arguments, which then replace those of the launch.
_arguments_are_replaced: ContextVar[bool] = ContextVar("_arguments_are_replaced", default=False)


def wrap_load_args(original: Function) -> Function:
    """Wrap ``load_args_from_checkpoint``: use the checkpoint's flags if the command line has no flag for one."""

    def load_args_from_checkpoint(args: Any, *rest: Any, **kwargs: Any) -> Any:
        token = _arguments_are_replaced.set(True)
        try:
            result = original(args, *rest, **kwargs)
        finally:
            _arguments_are_replaced.reset(token)
        # The result is no tuple if there is no checkpoint, or if it has no arguments. If a mismatch is allowed, the
        # command line decides.
        saved = MegatronFlags.of_saved(result[1]) if isinstance(result, tuple) else MegatronFlags()
        if (
            not passed_options(FLAGS)
            and MegatronFlags.of(args) == MegatronFlags() != saved
            and not is_set(ALLOW_MISMATCH)
        ):
            saved.store(args)
            print_once(f"from the checkpoint's arguments: {saved.command_line}")
        return result

    return load_args_from_checkpoint


def wrap_load_base(original: Function) -> Function:
    """Wrap ``_load_base_checkpoint``: compare the schemes as soon as the arguments of the checkpoint are known.

    This happens also with ``--finetune``, under which Megatron itself does not compare arguments. For a sharded
    checkpoint Megatron calls the function twice. The first call, with ``rank0``, reads the arguments, and the second
    one fills the weights of the model. For other formats it returns the weights with the arguments, and Megatron loads
    them into the model afterwards. For their FSDP format some versions return no arguments from the first call. The
    schemes are then compared after the second call, when the weights are in the model already.
    """
    signature = inspect.signature(original)

    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        call = signature.bind(*args, **kwargs).arguments
        state, running, folder = result[0], call.get("args") or launched_arguments(), call.get("load_dir")
        has_no_arguments = call.get("rank0") and (_arguments_are_replaced.get() or "args" not in (state or {}))
        if has_no_arguments or not state:
            return result
        is_teacher = folder is not None and folder == getattr(running, TEACHER_LOAD_ARGUMENT, None)
        compare(state.get("args"), MegatronFlags() if is_teacher else MegatronFlags.of(running), result[1] or folder)
        return result

    return _load_base_checkpoint


#: The arguments that ``dist_checkpointing.load`` has read from checkpoints while ModelOpt's loader runs, else None.
_arguments_read: ContextVar[list[Any] | None] = ContextVar("_arguments_read", default=None)


def wrap_load_sharded(original: Function) -> Function:
    """Wrap ``dist_checkpointing.load``: store the arguments that it reads for :func:`wrap_load_modelopt`."""

    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (arguments_read := _arguments_read.get()) is not None:
            state = result[0] if isinstance(result, tuple) else result  # a tuple also has missing and unexpected keys
            arguments_read.append(state.get("args"))
        return result

    return load


def wrap_load_modelopt(original: Function) -> Function:
    """Wrap ``load_modelopt_checkpoint``: compare the schemes if it calls ``dist_checkpointing.load`` directly.

    It does so for sharded checkpoints. Others it reads with Megatron's loader, so :func:`wrap_load_base` compares them.
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
            selected = MegatronFlags() if load_arg == TEACHER_LOAD_ARGUMENT else MegatronFlags.of(running)
            saved = next((each for each in arguments_read if each is not None), None)
            compare(saved, selected, getattr(running, load_arg))
        return result

    return load_modelopt_checkpoint


def compare(saved: Any, running: MegatronFlags, source: object) -> None:
    """Check that a checkpoint has the scheme of the run.

    :param saved: the arguments in the checkpoint, or None if it has none.
    :param running: the flags of the run.
    :param source: path of the checkpoint, for the message.
    :raises CheckpointMismatchError: if the schemes differ and ``OLMO_LNS_ALLOW_MISMATCH`` is not 1.
    """
    flags = MegatronFlags.of_saved(saved)
    words = flags.command_line if flags.layernorm_scaling else f"without {LNS_FLAG}"
    scheme: Scheme | None = None if saved is None else flags.scheme
    require_same(scheme, running.scheme, source=source, setting=lambda scheme: words)
