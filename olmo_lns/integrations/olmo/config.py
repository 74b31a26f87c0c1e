"""``layer_norm_type`` at config load: what a bare scheme means, and errors that name the value."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

import torch
from omegaconf import OmegaConf

from olmo_lns import environment
from olmo_lns.errors import LNSConfigError, did_you_mean, one_line
from olmo_lns.integrations import patching
from olmo_lns.integrations.olmo import types, upstream

__all__ = ["MOST_LAYERS", "check_sizes", "require_supported", "wrap_load"]

log = logging.getLogger("olmo_lns")

#: Whether a scheme was asked for in this process.
selected = False

#: Blocks are built one by one: more than this is minutes of silence, and then no memory.
MOST_LAYERS = 10_000


def check_sizes(config: Any) -> None:
    """What would divide by zero, or build for minutes before it fails, in an OLMo ``ModelConfig``.

    :raises LNSConfigError: a number that makes no model.
    """
    from olmo.exceptions import OLMoConfigurationError

    for name in ("n_heads", "n_layers", "d_model", "vocab_size", "max_sequence_length"):
        if (value := getattr(config, name)) < 1:
            raise LNSConfigError(f"model.{name}: expected at least 1, got {value}")
    try:
        kv_heads = config.effective_n_kv_heads
    except OLMoConfigurationError as error:
        raise LNSConfigError(f"model.n_kv_heads: {one_line(error)}") from None
    for name, number, whole in (("n_heads", config.n_heads, "d_model"), ("n_kv_heads", kv_heads, "n_heads")):
        if number < 1 or getattr(config, whole) % number:
            raise LNSConfigError(
                f"model.{name}: expected a divisor of {whole}, which is {getattr(config, whole)}, got {number}"
            )
    if config.n_layers > MOST_LAYERS:
        raise LNSConfigError(
            f"model.n_layers: {config.n_layers:,} blocks; more than {MOST_LAYERS:,} is taken for a slip"
        )


def require_supported(config: Any) -> None:
    """:raises OLMoConfigurationError: a scheme in a model whose norms follow the sub-layers, or an unknown one."""
    from olmo.exceptions import OLMoConfigurationError

    if not types.has_scheme(config.layer_norm_type):
        return
    global selected
    selected = True
    patching.require_verified(upstream.NAME)
    environment.check()
    check_sizes(config)
    scheme, problem = types.scheme_of(config.layer_norm_type), ""
    if config.norm_after:
        problem = (
            " with norm_after=true: a scheme says itself where the norms sit. Set norm_after: false, or a stock "
            "layer_norm_type."
        )
    elif scheme.name == "lnsvalue" and config.clip_qkv is not None:
        problem = (
            f" with clip_qkv={config.clip_qkv:g}: lnsvalue is LNS but for the attention logits, a clipped v is not. "
            "Set clip_qkv: null."
        )
    else:
        from olmo_lns.integrations.olmo.block import unsupported  # made of OLMo's classes: see integrations.olmo.model

        for number, sub_layer, plan in scheme.plans(config.n_layers):
            if reason := unsupported(plan, config.d_model):
                problem = f", block {number}, {sub_layer}: {reason}."
                break
    if problem:
        raise OLMoConfigurationError(f"layer_norm_type={config.layer_norm_type!s}{problem}")


def _require_no_decay(config: Any) -> None:
    """:raises OLMoConfigurationError: an OLMo ``TrainConfig`` that would decay the learned factors of its scheme."""
    from olmo.exceptions import OLMoConfigurationError

    scheme, optimizer = types.scheme_of(config.model.layer_norm_type), config.optimizer
    if optimizer is None or not any(plan.learned for _, _, plan in scheme.plans(config.model.n_layers)):
        return
    found = "decay_norm_and_bias=true" if optimizer.decay_norm_and_bias else ""
    if optimizer.no_decay_norm_and_bias is False:  # its old name, which the launcher obeys after this load
        found = "no_decay_norm_and_bias=false"
    if found:
        raise OLMoConfigurationError(
            f"layer_norm_type={config.model.layer_norm_type!s} with optimizer.{found}: weight decay would pull the "
            f"learned factors of {scheme.definition.title} towards 0. Set optimizer.decay_norm_and_bias: false, and "
            "leave no_decay_norm_and_bias out."
        )


#: OLMo's sharded checkpointers that do not work under the torch versions this package takes, with a scheme or without.
_CHECKPOINTERS = {
    "local": "cannot save (NotImplementedError in its _fsdp_handles)",
    "torch_new": "saves, but OLMo cannot load what it saved (its RemoteFileSystemReader is abstract)",
    "torch_legacy": "saves, but this OLMo loads it with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 only (ai2-olmo from PyPI)",
}


def _warn_of_checkpointer(config: Any) -> None:
    """Before training starts, not at the first save or at the resume."""
    import olmo

    name, problem = str(config.sharded_checkpointer), _CHECKPOINTERS.get(str(config.sharded_checkpointer))
    if name == "torch_legacy" and "weights_only=False" in Path(olmo.__file__).with_name("checkpoint.py").read_text():
        problem = None  # main's
    if problem and str(config.distributed_strategy) == "fsdp" and config.save_interval:
        line = "sharded_checkpointer: %s %s under torch %s; take olmo_core, or save_interval_unsharded"
        log.warning(line, name, problem, torch.__version__)


def wrap_load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``BaseConfig.load`` so that the loaded config names the resolved type, parameters included."""

    def wrapped(
        cls: Any, path: Any, overrides: list[str] | None = None, key: str | None = None, validate_paths: bool = True
    ) -> Any:
        model_key = {"TrainConfig": "model.", "ModelConfig": ""}.get(cls.__name__)
        if model_key is None:
            return load(cls, path, overrides, key, validate_paths)
        named, override = _written_types(path, list(overrides or []), key, f"{model_key}layer_norm_type")
        for value in (named, override):
            _reject_unknown(value)
        config = load(cls, path, overrides, key, validate_paths)
        model = config.model if model_key else config
        if types.has_scheme(model.layer_norm_type):
            _resolve(model, named, overridden=override is not None)
            require_supported(model)
            if model_key:
                _require_no_decay(config)
                _warn_of_checkpointer(config)
        return config

    return wrapped


def _written_types(path: Any, overrides: list[str], key: str | None, name: str) -> tuple[str | None, str | None]:
    """The type that is in the file, and the one that the command line asks for, as written.

    Of several overrides of the type the last counts, and what the others make of the file names the base norm.
    """
    written = OmegaConf.load(str(path))
    if key is not None:
        written = OmegaConf.select(written, key) or OmegaConf.create()

    def after(count: int) -> str | None:
        merged = OmegaConf.merge(written, OmegaConf.from_dotlist(overrides[:count]))
        named = OmegaConf.select(merged, name, throw_on_missing=False)
        return None if named is None else str(named)

    keys = (name, name.rpartition(".")[0])
    last = max((i for i, text in enumerate(overrides) if text.partition("=")[0].strip() in keys), default=None)
    return (after(0), None) if last is None else (after(last), after(len(overrides)))


def _reject_unknown(value: str | None) -> None:
    from olmo.config import LayerNormType
    from olmo.exceptions import OLMoConfigurationError

    known = [str(member) for member in LayerNormType if not types.has_parameters(member)]
    if value is None or value in known:
        return
    if types.has_scheme(value):
        try:
            types.scheme_of(value)
        except LNSConfigError as error:
            raise OLMoConfigurationError(f"layer_norm_type {value!r}: {error}") from None
        return
    suffixes = tuple(f"_{base}" for base in types.BASES)
    short = [name for name in known if not name.endswith(suffixes)]
    raise OLMoConfigurationError(
        f"unknown layer_norm_type {value!r}{did_you_mean(value, known)}. Known: {', '.join(short)}; "
        f"the schemes among them also with {', '.join(suffixes)}"
    )


def _resolve(model: Any, named: str | None, *, overridden: bool) -> None:
    from olmo.config import LayerNormType, ModelConfig

    asked = str(model.layer_norm_type)
    # Written in the file itself there is nothing to keep; over a file that is silent, OLMo's default is kept.
    kept = (named or str(ModelConfig.layer_norm_type)) if overridden else "rms"
    # What the environment adds is written down: a resumed run has the config, not the variable.
    scheme = types.asked_record(model).scheme
    bare = asked.partition(":")[0] == scheme.name
    spelled = types.spell(scheme, types.base_type(kept if bare else asked))
    if spelled == asked:
        return
    model.layer_norm_type = LayerNormType[spelled]
    if not bare:
        reason = "with the parameters in force"
    elif overridden:
        reason = f"keeps the config's base norm {types.base_type(kept)!r}"
    else:
        reason = "means RMSNorm when a file names it"
    log.info("layer_norm_type=%s %s: using %s", asked, reason, spelled)
