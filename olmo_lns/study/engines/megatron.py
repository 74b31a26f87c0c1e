"""The Megatron-LM engine: configs of Megatron's flags, its parser, the arguments that it prints.

A config is a YAML file. Each key is a flag without its leading dashes. ``true`` is a flag without a value, a list is a
flag with several values, and ``false`` and ``null`` omit the flag. Megatron's ``--yaml-cfg`` reads another format.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Mapping, Sequence

from olmo_lns.arguments import Parser, as_path
from olmo_lns.arms import SCALED_BASELINE, Arm
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.megatron.cuda import cuda_environment
from olmo_lns.integrations.megatron.flags import MegatronFlags
from olmo_lns.schemes import DEFAULT_EXPONENT, LNS, PRE_LN
from olmo_lns.study.bundled_configs import find_config
from olmo_lns.study.engines.base import Engine, Run
from olmo_lns.study.logs import find_logs
from olmo_lns.study.yaml_files import VARIABLE, fill_variables
from olmo_lns.study.yaml_files import read as read_yaml
from olmo_lns.temporary_values import replaced_attribute, replaced_items

CONFIG_OPTION = "--lns-config"


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a file under Megatron's argument names (``num_layers``). Variables are not replaced.

    :raises LNSConfigError: if there is no such file, if it is not a flat mapping, or if a key has an underscore.
    """
    path = find_config(path, "megatron")
    flags = read_yaml(path)
    for key, value in flags.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
            raise LNSConfigError(
                f"{path}: the key {key!r} is not a flag of Megatron. Write the flag without its leading dashes, such "
                "as num-layers."
            )
        if any(isinstance(item, (dict, list)) for item in _as_list(value)):
            raise LNSConfigError(
                f"{path}: the key {key!r} has nested values. Write each flag of Megatron as a key with a value or a "
                "list of values."
            )
    return {key.replace("-", "_"): value for key, value in flags.items()}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_omitted(value: Any) -> bool:
    return value is None or value is False


def to_flags(settings: Mapping[str, Any], *, placeholder: bool = False) -> list[str]:
    """Return settings as a list of flags and their values.

    :param placeholder: replace an unset variable by ``/NAME-is-not-set`` instead of an error.
    :raises LNSConfigError: if a variable is not set.
    """
    flags: list[str] = []
    for key, value in settings.items():
        if _is_omitted(value):
            continue
        flag = "--" + key.replace("_", "-")
        flags.append(flag)
        values = [] if value is True else _as_list(value)
        for item in map(str, values):
            text = fill_variables(item, flag, placeholder=placeholder)
            # A variable may hold several words, as for --data-path.
            flags += shlex.split(text) if VARIABLE.fullmatch(item) else [text]
    return flags


def expand(argv: Sequence[str], *, placeholder: bool = False) -> list[str]:
    """Replace ``--lns-config FILE`` by the flags in the file. Explicit flags take precedence.

    :raises LNSConfigError: if two files are passed, or for the reasons of :func:`read` and :func:`to_flags`.

    >>> expand(["--lns-config", "60M-lns.yaml", "--micro-batch-size", "4"])   # doctest: +SKIP
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(CONFIG_OPTION, dest="files", type=as_path, action="append", default=[])
    args, explicit = parser.parse_known_args(argv)
    if not args.files:
        return explicit
    if len(args.files) > 1:
        raise LNSConfigError(
            f"{CONFIG_OPTION} was passed {len(args.files)} times. A launch reads one file. Pass other settings as "
            "flags."
        )
    explicit_keys = {flag[2:].split("=", 1)[0].replace("-", "_") for flag in explicit if flag.startswith("--")}
    settings = {key: value for key, value in read(args.files[0]).items() if key not in explicit_keys}
    return to_flags(settings, placeholder=placeholder) + explicit


def available() -> bool:
    """Return true if ``megatron.training`` is installed, or ``MEGATRON_LM_SRC`` names a checkout."""
    if os.environ.get("MEGATRON_LM_SRC"):
        return True
    return find_spec("megatron") is not None and find_spec("megatron.training") is not None


def parse(flags: Sequence[str], gpus: int = 8) -> argparse.Namespace:
    """Parse flags, including the plugin's, with Megatron's parser and ``validate_args``.

    A machine without a GPU is treated as one with an H100.

    :param gpus: number of GPUs, from which Megatron derives data parallelism.
    :raises LNSConfigError: if ``megatron.training`` cannot be imported, or Megatron refuses the flags.
    """
    import torch

    from olmo_lns.integrations.megatron import register

    if (source := os.environ.get("MEGATRON_LM_SRC")) and source not in sys.path:
        sys.path.insert(0, source)
    register()
    device = None if torch.cuda.is_available() else SimpleNamespace(major=9, minor=0)
    launch_environment = {"RANK": "0", "WORLD_SIZE": str(gpus)} | cuda_environment(flags)
    # A file, because Megatron 0.16 needs the descriptor of stderr.
    with tempfile.TemporaryFile("w+") as output, contextlib.ExitStack() as stack:
        stack.enter_context(replaced_items(os.environ, launch_environment))
        stack.enter_context(replaced_attribute(sys, "argv", ["pretrain_gpt.py", *flags]))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        if device:
            stack.enter_context(replaced_attribute(torch.cuda, "get_device_properties", lambda _=None: device))
        try:
            from megatron.training import arguments

            args: argparse.Namespace = arguments.validate_args(arguments.parse_args())
            return args
        except (ImportError, AssertionError, ValueError, SystemExit) as error:
            output.seek(0)
            messages = [line.strip() for line in output if "error:" in line]
            reason = messages[-1] if messages else error
            if isinstance(error, ImportError):
                raise LNSConfigError(
                    f"Megatron could not be imported: {reason}. Set MEGATRON_LM_SRC to a checkout of Megatron-LM."
                ) from error
            raise LNSConfigError(f"Megatron refuses the flags: {reason}. Correct them in the config.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``olmo-lns megatron-args``: print the flags of a config."""
    parser = Parser(prog="olmo-lns megatron-args", description="Print the Megatron flags of a config.")
    parser.add_argument("config", help="a file, or a name of the pack: 60M-lns")
    parser.add_argument("--one-per-line", action="store_true")
    args, explicit = parser.parse_known_args(argv)
    text = shlex.join(expand([CONFIG_OPTION, args.config, *explicit], placeholder=True))
    print(text.replace(" --", "\n--") if args.one_per_line else text)
    for name in dict.fromkeys(re.findall(r"/(\w+)-is-not-set", text)):
        print(f"note: {name} is not set. Export it, or pass the flag that reads it.", file=sys.stderr)
    return 0


ARGUMENT = re.compile(r"^(?:\[?\w*\d+\]?:\s*)? {2}([a-z0-9_]+) \.{2,} (.*)$", re.M)
#: The plugin's arguments with their defaults.
DEFAULTS = vars(MegatronFlags())


class MegatronEngine(Engine):
    name, title, identifying_key = "megatron", "Megatron", "num-layers"
    default_seed = 1234
    arm_keys = frozenset(DEFAULTS)
    compared_keys = re.compile(
        r"num_(layers|query_groups|attention_heads|experts)$|(ffn_)?hidden_size|kv_channels|group_query|seq_length|max_position"
        r"|(train|valid|test|per_split)_|data_path|split|mock_data|dataloader_type|reset_|eod_|seed|global_batch_size|rampup"
        r"|(min_)?lr|decoupled_|(start_|end_)?weight_decay|adam_|sgd_|muon_|optimizer$|clip_grad|override_opt|use_checkpoint"
        r"|(bf|fp)\d|params_dtype|main_|exp_avg|grad_reduce|accumulate_allreduce|loss_scale|initial_loss|min_loss"
        r"|attention_(dropout|softmax|output)|hidden_dropout|(norm|layernorm)_(eps|zero|scal)|normalization|apply_"
        r"|(no_)?rope|rotary|use_rot|use_rope|position_|no_scaled_init|init_method|use_cpu_init|embedding_init|use_mup|mup_"
        r"|swiglu|squared|glu_|quick|openai|onnx|activation_func|add_(bias|qkv|pos)|untie|vocab|padded_vocab|make_vocab|tokenizer"
        r"|moe_|mtp_|multi_latent|mla_|[qkv]+_(lora|head|norm|l2|layernorm)|v_head|mamba_|is_hybrid|hybrid_|heterogeneous"
        r"|experimental_attention|linear_|window_|softmax_type|spec$|finetune|label_smoothing|cross_entropy_loss(?!_fusion)|perform_|sft|fim_|skip_train"
        r"|(decoder|encoder)_(num_layers|seq_length)|enable_(hyper|mhc)_|first_last_layers|num_layers_at_|calculate_per_token|pretrained_checkpoint|qk_clip|mscale|head_lr|use_precision_aware"
    )
    ignored_keys = re.compile(
        r"(save|load|tensorboard|wandb|log_|timing|rank|local_rank|world_size|master_|data_parallel_size|one_logger|"
        r"micro_batch_size|tensor_model_parallel_size|(pipeline|virtual|context|transformer_pipeline)_|"
        r"num_layers_per_virtual|sequence_parallel|use_distributed_optimizer|overlap_|recompute_|exit_|eval_|app_tag|"
        r"num_workers|non_persistent_|ckpt_|async_save|distributed_|lns_config|norm_backend|iteration|consumed_)"
        r"|.*_fusion$|attention_backend|use_flash_attn|transformer_impl|expert_(model|tensor)_|num_dataset_builder|profile|in(process|ference)_|straggler|manual_gc"
        r"|tp_comm_|cp_comm|nccl|dist_ckpt_|ft_|fsdp_|ddp_|cuda_graph|check_|adlr_|no_(load|save)_|logging_level|.*memory"
        r"|(decoder|encoder)_((first|last)_)?(tensor|pipeline|context|expert)_|account_for_\w+_in_pipeline"
        r"|enable_(one_logger|ft_package|gloo|msc|cuda_graph|full_sharding|autotune)"
        r"|use_(dist_ckpt|persistent|pytorch_prof|ring|sharp|tp_pp|megatron_fsdp|torch_fsdp2)|data_cache_path|create_attention"
    )
    base_arm = SCALED_BASELINE  # the stock files, without a flag that would have to be removed
    save_variable, data_variable = "MEGATRON_SAVE_DIR", "MEGATRON_DATA"
    workload_keys = {
        "layers": "num_layers", "hidden_size": "hidden_size", "heads": "num_attention_heads",
        "ffn_hidden_size": "ffn_hidden_size", "sequence_length": "seq_length", "batch_size": "global_batch_size",
        "steps": "train_iters",
    }  # fmt: skip
    rate_keys: tuple[str, ...] = ("lr", "min_lr")

    def arm_overrides(self, arm: Arm) -> dict[str, Any] | None:
        """Return the arguments of an arm that differ from their defaults, or None if Megatron does not support it."""
        has_scaled_init = arm.initialization in ("scaled", "upstream")  # Megatron's default is scaled
        if arm.init_fn or arm.scheme.name not in (PRE_LN.name, LNS.name) or arm.initialization == "depth_scaled":
            return None
        if arm.scheme.is_pre_ln:
            return {} if has_scaled_init else {"no_scaled_init": True}
        overrides: dict[str, Any] = {"layernorm_scaling": True}
        exponent = arm.scheme.parameters["exponent"]
        if exponent != DEFAULT_EXPONENT:
            overrides["layernorm_scaling_exponent"] = exponent
        if has_scaled_init:
            overrides["layernorm_scaling_keep_scaled_init"] = True
        return overrides

    def arm_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = {key: default if settings.get(key) is None else settings[key] for key, default in DEFAULTS.items()}
        return values | {"layernorm_scaling_exponent": float(values["layernorm_scaling_exponent"])}

    def name_and_seed_overrides(self, name: str, seed: int) -> dict[str, Any]:
        return {"seed": seed}

    def rate_overrides(self, config: Path, rate: float) -> dict[str, Any]:
        settings = read(config)
        return {"lr": rate, "min_lr": float(f"{rate * float(settings['min_lr']) / float(settings['lr']):.6g}")}

    def load(self, path: Path, overrides: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Any:
        """Return the settings in a file with the overrides. Megatron's own parser reads the variables."""
        return read(path) | {key.replace("-", "_"): value for key, value in overrides.items()}

    def derived_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        query_groups = settings.get("num_query_groups") if settings.get("group_query_attention") else None
        tensor_parallel_size = int(settings.get("tensor_model_parallel_size") or 1)
        # Megatron pads the vocabulary to a multiple of make_vocab_size_divisible_by × TP.
        multiple = int(settings.get("make_vocab_size_divisible_by") or 128) * tensor_parallel_size
        return {
            "kv_heads": int(query_groups or settings["num_attention_heads"]),
            "vocab_size": -(-int(settings["vocab_size"]) // multiple) * multiple,
            "has_tied_embeddings": not settings.get("untie_embeddings_and_output_weights"),
            "has_norm_weight": True,
            "warmup": int(settings.get("lr_warmup_iters") or 0),
            "micro_batch_size": int(settings.get("micro_batch_size") or 1),
            "model_parallel_size": tensor_parallel_size * int(settings.get("pipeline_model_parallel_size") or 1),
        }

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        problems = []
        decay_steps, steps = settings.get("lr_decay_iters"), self.workload(settings).steps
        if decay_steps not in (None, steps):
            problems.append(
                f"lr-decay-iters is {decay_steps}, but train-iters is {steps}. The rate must decay until the last "
                "step. Set both to one number."
            )
        if available():
            try:
                parse(to_flags(settings, placeholder=True), gpus)
            except LNSConfigError as error:
                problems.append(str(error))
        return problems

    def skipped_check(self) -> str:
        if available():
            return ""
        return "Megatron did not check the configs, because it was not found. Set MEGATRON_LM_SRC to a checkout."

    def arguments(self, run: Run, folder: Path) -> list[str]:
        file_settings = read(run.config)
        for key, value in run.overrides.items():
            if _is_omitted(value) and not _is_omitted(file_settings.get(key.replace("-", "_"))):
                raise LNSConfigError(
                    f"Run {run.name} sets {key} to {value}, which cannot be written as a Megatron flag. Remove the key "
                    f"from {run.config}, and set it for the sizes or arms that need it."
                )
        flags = ["--lns-config", str(run.config.resolve()), *to_flags(run.overrides)]
        return [*flags, "--save", str(folder), "--load", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]

    def variables(self, run: Run) -> dict[str, str]:
        return cuda_environment(to_flags(run.settings, placeholder=True))

    def saved_settings(self, folder: Path) -> dict[str, Any]:
        """Return the arguments in the latest log with a whole ``arguments`` block."""
        arguments: dict[str, str] = {}
        for path in find_logs(folder):
            _, _, rest = path.read_text(encoding="utf-8", errors="replace").partition("- arguments -")
            block, end, _ = rest.partition("- end of arguments -")
            if end:
                arguments = dict(ARGUMENT.findall(block))
        constants = {"True": True, "False": False, "None": None}
        return {key: constants.get(value.strip(), value.strip()) for key, value in arguments.items()}
