"""Checkpoints: a saved one names its scheme, and the built model is compared with it on every load.

Megatron's own launch saves its whole ``args``, but restores and compares fixed lists of names. A checkpoint without
``args`` (Megatron Bridge, a loop of one's own) gets the record of the built model, in the ``content_metadata`` of
Megatron Core's ``dist_checkpointing``. Megatron Bridge keeps the scheme of a Megatron-LM checkpoint that it reads, and
is refused where it would write a model with a scheme for stock classes.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any, Callable, Iterable

from olmo_lns import environment
from olmo_lns.errors import CheckpointMismatchError, LNSConfigError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.megatron.building import say
from olmo_lns.integrations.megatron.layers import layers_of
from olmo_lns.integrations.megatron.settings import ZERO_CENTRED, Settings, mark
from olmo_lns.integrations.megatron.upstream import CORE, TRAINING
from olmo_lns.integrations.patching import require_verified
from olmo_lns.record import Record, accepted, check_match

#: The key of the record in ``content_metadata``, and the attribute by which a sharded tensor carries it.
_KEY, _MARK = "olmo_lns", "lns_record"
_METADATA = "content_metadata"


#: What a model says of the tensors that it saves or loads: its record, and whether its gains are stored minus one.
Built = tuple[Record, bool]


def tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark every tensor that a layer or model saves or loads with the record of the built module."""

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        built: Built = (_record_of(self), _zero_centred(self.config))
        for value in result.values():
            if hasattr(value, "key") and not hasattr(value, _MARK):
                setattr(value, _MARK, built)
        return result

    return sharded_state_dict


def save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.save``: write the built model's record where there are no arguments to name the scheme."""
    signature = inspect.signature(original)

    def save(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        carried = _carried(sharded_state_dict)
        if carried is None or not carried[0].active or "args" in sharded_state_dict:
            return original(sharded_state_dict, *args, **kwargs)
        # A copy: Megatron would leave the metadata in the caller's.
        call = signature.bind(dict(sharded_state_dict), *args, **kwargs)
        call.arguments[_METADATA] = {**(call.arguments.get(_METADATA) or {}), _KEY: carried[0].as_dict()}
        return original(*call.args, **call.kwargs)

    return save


def load(original: Callable[..., Any]) -> Callable[..., Any]:
    """``dist_checkpointing.load``: compare the checkpoint with the model that was built to take its weights."""

    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        running = _carried(sharded_state_dict)
        result = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        state = result[0] if isinstance(result, tuple) else result
        saved = _saved_record(state, checkpoint_dir)
        if _KEY in (metadata := state.get(_METADATA) or {}):  # Megatron's alone goes on
            del metadata[_KEY]
            if not metadata:
                del state[_METADATA]
        if running is not None:
            record, zero_centred = running
            _check_gains(state.get("args"), zero_centred, checkpoint_dir)
            _compare_built(saved, record, checkpoint_dir)
        return result

    return load


def look(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a loader of a Megatron that is not verified: it runs as it is, unless the checkpoint names a scheme."""

    def load(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for part in result if isinstance(result, tuple) else (result,):
            state = part if isinstance(part, dict) else {"args": part}
            if (saved := _saved_record(state, "the checkpoint")) is not None and saved.active:
                require_verified(CORE, TRAINING)
        return result

    return load


def _record_of(module: Any) -> Record:
    """Of a built layer, or of a model; a pipeline stage without a layer has what its config says."""
    settings, config = Settings.of(module.config), module.config
    scheme = norm_sites.read_back(module) if layers_of(module) else settings.scheme
    plain = settings.scaled_init_off and config.output_layer_init_method is config.init_method
    return Record(scheme, scaled_init="plain" if plain else "upstream")


def _carried(state: Any) -> Built | None:
    """What the tensors in ``state`` were marked with; a scheme's mark goes before the Pre-LN of a vision tower.

    :raises LNSConfigError: two schemes in one checkpoint.
    """
    found: dict[Built, None] = {}
    waiting = [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif (built := getattr(value, _MARK, None)) is not None:
            found[built] = None
    active = [built for built in found if built[0].active]
    if len(names := sorted({str(record) for record, _ in active})) > 1:
        raise LNSConfigError(f"one checkpoint with {' and '.join(names)}: it can name one of them.")
    return next(iter(active or found), None)


def _saved_record(state: Any, source: object) -> Record | None:
    """The record from the arguments, else from the metadata; None where there is neither."""
    if isinstance(args := state.get("args"), argparse.Namespace):
        return Settings.of(args).record(args)
    metadata = state.get(_METADATA)
    record = metadata.get(_KEY) if isinstance(metadata, dict) else None
    return None if record is None else Record.from_dict(record, source=source)


def _compare_built(saved: Record | None, running: Record, source: object) -> None:
    """:raises CheckpointMismatchError: the checkpoint's scheme is not the built model's, or it names none."""
    if saved is not None:
        _say_allowed(check_match(saved, running, source=source))
    elif running.active and "missing-record" in accepted():
        _say_allowed(["missing-record"])
    elif running.active:
        raise CheckpointMismatchError(
            f"{source} holds neither Megatron's arguments nor a record, but this model has {running}: nobody can tell "
            f"whether its weights were trained so. Set {environment.ALLOW_MISMATCH}=missing-record if they were, or if "
            "they are to be."
        )


def _zero_centred(holder: Any) -> bool:
    return any(getattr(holder, name, False) for name in ZERO_CENTRED)


def _check_gains(saved_args: Any, running: bool, source: object) -> None:
    """Compare how the gains are stored; in exports of ``olmo-lns``, which are plain, and in weights of a scheme.

    :param running: whether this run reads gains as stored minus one.
    :raises CheckpointMismatchError: plain gains would be read as zero-centred, or the reverse. No variable allows it:
        nobody can mean that.
    """
    if not isinstance(saved_args, argparse.Namespace) or not any(hasattr(saved_args, name) for name in ZERO_CENTRED):
        return
    ours = hasattr(saved_args, "layernorm_scaling_folded") or Settings.of(saved_args).active
    if ours and (saved := _zero_centred(saved_args)) != running:
        kinds = {True: "zero-centred gains (1 + weight)", False: "plain gains"}
        raise CheckpointMismatchError(
            f"{source} holds {kinds[saved]}, but this run reads {kinds[running]}: "
            f"{'add' if saved else 'drop'} --apply-layernorm-1p (layernorm_zero_centered_gamma)."
        )


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


def _restore(args: Any, saved_args: Any) -> None:
    saved, running = Settings.of(saved_args), Settings.of(args)
    # A user who allows a difference by name means the command line as it is.
    filled = running if environment.read(environment.ALLOW_MISMATCH) else running.filled_from(saved)
    _check(args, saved_args, filled.record(), "the checkpoint to load")
    if filled != running:
        filled.store(args)
        say(f"from the checkpoint's arguments: {filled.words}")


def _compare(args: Any, state: Any, source: object) -> None:
    if "args" in state:
        _check_gains(state["args"], _zero_centred(args), source)
        _check(args, state["args"], Settings.of(args).record(args), source)
    elif (running := Settings.of(args)).active:
        title = running.scheme.definition.title
        say(f"{source} holds no arguments: nobody can tell whether it was trained with {title}")


def _check(args: Any, saved_args: Any, running: Record, source: object) -> None:
    settings = Settings.of(saved_args)
    saved = settings.record(saved_args)
    if saved.folded and not running.active:
        say(f"{source} has the factor folded into its weights: under Pre-LN they are a stock model's")
    _say_allowed(check_match(saved, running, source=source, remedy=settings.words))


def _say_allowed(differences: Iterable[str]) -> None:
    for name in differences:
        say(f"going on in spite of {name}, allowed by {environment.ALLOW_MISMATCH}")


def saved_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the config that the Bridge makes from saved arguments: it copies fields of ``TransformerConfig`` alone."""

    def _transformer_config_from_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        config = original(args, *rest, **kwargs)
        if (settings := Settings.of(args)) != Settings():
            mark(config, settings)
        return config

    return _transformer_config_from_args


def exported(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse to write a scheme's weights for a class of transformers that knows no factor."""
    signature = inspect.signature(original)

    def stream(*args: Any, **kwargs: Any) -> Any:
        for chunk in _chunks(signature.bind(*args, **kwargs).arguments["megatron_model"]):
            if not (scheme := norm_sites.read_back(chunk)).is_pre_ln:
                raise LNSConfigError(
                    f"Megatron Bridge writes this model's weights for a class without {scheme}: the result would run "
                    "as plain Pre-LN. Export the checkpoint with `olmo-lns export --format hf`, which folds it."
                )
        return original(*args, **kwargs)

    return stream


def imported(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compare weights of transformers' classes, which are Pre-LN's, with the scheme of the model that takes them."""
    signature = inspect.signature(original)

    def load_weights_hf_to_megatron(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        for chunk in _chunks(call["megatron_model"]):
            name = getattr(call["hf_pretrained"], "model_name_or_path", "the Hugging Face model")
            _compare_built(Record(), Record(norm_sites.read_back(chunk)), name)
        return original(*args, **kwargs)

    return load_weights_hf_to_megatron


def _chunks(model: Any) -> list[Any]:
    return list(model) if isinstance(model, (list, tuple)) else [model]
