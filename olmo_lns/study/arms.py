"""The arms of the study, and the rule that two arms may differ in nothing else.

Every function takes *flat* settings: ``{"model.d_model": 512, …}`` for OLMo (dotted keys of its
``TrainConfig``), ``{"num_layers": 8, …}`` for Megatron (names of its argument namespace).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from olmo_lns.errors import LNSConfigError

__all__ = ["ARMS", "Arm", "arm_named", "arm_problems", "differences", "init_problems", "is_lns"]


@dataclass(frozen=True)
class Arm:
    """:param olmo: the OLMo keys that define the arm. :param megatron: Megatron's, None where there is no such arm.
    :param isolates: False for an arm that changes more than one thing, reported beside the others.
    """

    name: str
    label: str
    olmo: Mapping[str, Any]
    megatron: Mapping[str, Any] | None
    isolates: bool = True


ARMS = {
    arm.name: arm
    for arm in (
        Arm(
            "preln",
            "Pre-LN",
            {"model.layer_norm_type": "rms", "model.init_fn": "normal"},
            {"no_scaled_init": True},
        ),
        Arm(
            "preln_scaled_init",
            "Pre-LN + scaled init",
            {"model.layer_norm_type": "rms", "model.init_fn": "full_megatron"},
            {},
        ),
        Arm(
            "lns",
            "Pre-LN + LNS",
            {"model.layer_norm_type": "lns_rms", "model.init_fn": "normal"},
            {"layernorm_scaling": True},
        ),
        Arm(
            "preln_mitchell",
            "Pre-LN, OLMo's mitchell init",
            {"model.layer_norm_type": "rms", "model.init_fn": "mitchell"},
            None,
            isolates=False,
        ),
    )
}

#: What defines an arm, and so may differ between two arms of one size.
ARM_KEYS = {
    "olmo": {"model.layer_norm_type", "model.init_fn"},
    "megatron": {"layernorm_scaling", "no_scaled_init"},
}

#: Names, folders, logging, restarts and the machine: no effect on the loss but rounding.
BOOKKEEPING = {
    "olmo": (
        "run_name", "save_", "remote_save_folder", "wandb", "load_path", "try_load_latest_save", "console_log_interval",
        "eval_", "evaluators", "device_eval_batch_size", "device_train_", "speed_monitor", "data.num_workers",
        "data.pin_memory", "data.prefetch_factor", "data.persistent_workers", "data.timeout", "time_limit",
        "no_pre_train_checkpoint", "sharded_checkpointer", "canceled_check_interval", "extra_steps_after_cancel",
        "gen1_gc_interval", "python_profiling", "torch_profiling", "dry_run", "force_save_unsharded",
        "model.init_device", "model.flash_attention", "distributed_strategy", "fsdp", "ddp", "activation_checkpointing",
        "compile", "optimizer.metrics_log_interval", "tokenizer",
    ),
    "megatron": (
        "save", "load", "tensorboard", "wandb", "log_", "timing", "rank", "local_rank", "world_size", "master_",
        "data_parallel_size", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_",
        "transformer_pipeline_", "virtual_pipeline_", "num_layers_per_virtual", "context_parallel_size",
        "sequence_parallel", "use_distributed_optimizer", "overlap_", "recompute_", "exit_", "eval_", "num_workers",
        "one_logger", "app_tag", "non_persistent_", "ckpt_", "async_save", "distributed_", "decoder_", "encoder_",
        "lns_config", "norm_backend", "iteration", "consumed_",
    ),
}  # fmt: skip


def arm_named(name: str) -> Arm:
    """:raises LNSConfigError: an unknown arm, with the nearest known one."""
    if name in ARMS:
        return ARMS[name]
    near = difflib.get_close_matches(name, ARMS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise LNSConfigError(f"unknown arm {name!r}{hint}: expected one of {', '.join(ARMS)}")


def is_lns(settings: Mapping[str, Any], framework: str) -> bool:
    """Whether flat settings select LayerNorm Scaling."""
    if framework == "megatron":
        return bool(settings.get("layernorm_scaling"))
    return str(settings.get("model.layer_norm_type", "")).startswith("lns")


def arm_problems(name: str, settings: Mapping[str, Any], framework: str) -> list[str]:
    """What contradicts the arm's definition in flat settings; empty when nothing does."""
    arm = arm_named(name)
    wanted = arm.olmo if framework == "olmo" else arm.megatron
    if wanted is None:
        return [f"arm {name!r} exists for OLMo only"]
    found = dict(settings)
    if framework == "megatron":  # a flag that is not there is off
        wanted = {"layernorm_scaling": False, "no_scaled_init": False} | dict(wanted)
        found = {key: bool(settings.get(key)) for key in wanted}
    return [
        f"{key}={found.get(key)!r}, but arm {name!r} is {key}={value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]


def init_problems(settings: Mapping[str, Any], framework: str) -> list[str]:
    """LNS needs an unscaled initialization: the paper (footnote 1, section 6) finds the two together worse."""
    if not is_lns(settings, framework):
        return []
    if framework == "olmo" and settings.get("model.init_fn") in ("mitchell", "full_megatron"):
        return [f"LNS with the scaled initialization {settings['model.init_fn']!r}: expected model.init_fn: normal"]
    if framework == "megatron" and settings.get("layernorm_scaling_keep_scaled_init"):
        return ["LNS with --layernorm-scaling-keep-scaled-init: expected an unscaled initialization"]
    return []


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], framework: str, *, ignore: Iterable[str] = ()
) -> list[tuple[str, Any, Any]]:
    """Keys other than the arm's own, names and folders in which two runs differ: ``(key, first, second)``."""
    skip = ARM_KEYS[framework] | set(ignore)
    prefixes = BOOKKEEPING[framework]
    keys = sorted(key for key in {*first, *second} if key not in skip and not key.startswith(prefixes))
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]
