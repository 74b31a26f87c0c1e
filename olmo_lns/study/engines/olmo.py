"""The OLMo engine: OLMo's ``TrainConfig``, the arguments of its launcher, the config that it saves."""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import Any, Mapping

from olmo_lns.arms import Arm
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo import norm_types
from olmo_lns.study import yaml_files
from olmo_lns.study.engines.base import Engine, Run, dot_list
from olmo_lns.temporary_values import replaced_items

#: Initialization -> ``init_fn``. ``upstream`` keeps the ``init_fn`` of the config, which defines no arm.
INIT_FNS = {"plain": "normal", "scaled": "normal_scaled", "depth_scaled": "normal_depth_scaled"}


def load(path: Path, overrides: Mapping[str, Any] | None = None, variables: Mapping[str, str] | None = None) -> Any:
    """Load a ``TrainConfig`` as ``scripts/train.py file --key=value`` does. Data paths need not exist.

    :param variables: environment variables for the config.
    :raises LNSConfigError: if OLMo refuses the config. The message has the name of the file and OLMo's error.
    """
    from omegaconf.errors import OmegaConfBaseException

    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError

    yaml_files.read_text(path)  # raises for a repeated key
    missing = {name: f"/{name}-is-not-set" for name in yaml_files.required_variables(path) if name not in os.environ}
    with replaced_items(os.environ, {**missing, **(variables or {})}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)  # OLMo warns at every load
        try:
            return TrainConfig.load(str(path), dot_list(overrides or {}), validate_paths=False)
        except (OLMoConfigurationError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise LNSConfigError(f"OLMo refuses the config {path}: {one_line(error)}") from error


#: Stock model config as JSON -> number of parameters of the model, and of one of its norms.
_COUNTS: dict[str, tuple[int, int]] = {}


def _count_stock(model_config: Any) -> tuple[int, int]:
    from olmo.model import OLMo

    settings = yaml_files.flatten(model_config)
    key = json.dumps({name: value for name, value in settings.items() if not name.startswith("init_")}, sort_keys=True)
    if key not in _COUNTS:
        model = OLMo(model_config.update_with(init_device="meta"), init_params=False)
        norm_parameters = sum(parameter.numel() for parameter in model.transformer.ln_f.parameters())
        _COUNTS[key] = model.num_params(), norm_parameters
    return _COUNTS[key]


class OLMoEngine(Engine):
    name, title, identifying_key = "olmo", "OLMo", "model"
    arm_keys = frozenset({"model.layer_norm_type", "model.init_fn"})
    compared_keys = re.compile(
        r"model\.(?!init_device|flash_attention)|optimizer\.(?!metrics|record)|scheduler\."
        r"|data\.(paths|datasets|label_mask|memmap|pad_direction|generate|seed|instance_filter|custom_dataset|drop_last)"
        r"|global_train_batch_size|max_|stop_at|stop_after|precision|load_path$|seed|epoch|softmax_auxiliary_loss"
        r"|auxiliary_loss_multiplier|early_stopping|reset_|fast_forward|restore_dataloader"
    )
    ignored_keys = re.compile(
        r"run_name|dry_run|model\.(init_device|flash_attention)|optimizer\.(metrics|record)|evaluators|eval_|device_"
        r"|data\.(num_workers|pin_memory|prefetch|persistent|timeout)|save_|remote_|canceled_|force_save|no_pre_train"
        r"|load_path_|try_load|sharded_|new_style|wandb|speed_monitor|console|gen1|compile|distributed|fsdp|ddp|time_limit"
        r"|single|extra_steps|python_|torch_|activation_checkpointing|fused_loss|hf_datasets|module_outputs|tokenizer\."
    )
    workload_keys = {
        "layers": "model.n_layers", "hidden_size": "model.d_model", "heads": "model.n_heads",
        "sequence_length": "model.max_sequence_length", "batch_size": "global_train_batch_size",
        "warmup": "scheduler.t_warmup",
    }  # fmt: skip
    rate_keys: tuple[str, ...] = ("optimizer.learning_rate", "scheduler.warmup_min_lr")

    def arm_overrides(self, arm: Arm) -> dict[str, Any] | None:
        init_fn = arm.init_fn or INIT_FNS.get(arm.initialization)
        if init_fn is None:
            return None
        return {"model.layer_norm_type": norm_types.type_name(arm.scheme, "rms"), "model.init_fn": init_fn}

    def name_and_seed_overrides(self, name: str, seed: int) -> dict[str, Any]:
        return {"run_name": name, "seed": seed}

    def load(self, path: Path, overrides: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> Any:
        """Load OLMo's ``TrainConfig``."""
        return load(path, overrides, variables)

    def derived_fields(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        heads, hidden_size = int(settings["model.n_heads"]), int(settings["model.d_model"])
        mlp_hidden_size = settings.get("model.mlp_hidden_size") or int(settings["model.mlp_ratio"]) * hidden_size
        kv_heads = settings.get("model.n_kv_heads") or (1 if settings.get("model.multi_query_attention") else heads)
        duration = str(settings["max_duration"]).strip()
        if duration.endswith("T"):  # tokens, such as 20e9T
            tokens_per_step = int(settings["global_train_batch_size"]) * int(settings["model.max_sequence_length"])
            steps = -(-int(float(duration[:-1])) // tokens_per_step)
        else:
            steps = 0 if duration.endswith("ep") else int(float(duration))
        return {
            "kv_heads": int(kv_heads),
            "ffn_hidden_size": int(mlp_hidden_size) // 2,
            "vocab_size": int(settings.get("model.embedding_size") or settings["model.vocab_size"]),
            "has_tied_embeddings": bool(settings["model.weight_tying"]),
            "has_norm_weight": bool(settings["model.layer_norm_with_affine"]),
            "steps": steps,
        }

    def count(self, path: Path, loaded: Any) -> int:
        """Count the parameters of OLMo's model on the meta device, and add the norms and gates of the scheme.

        The model is built without its scheme, and once for all arms of a size.
        """
        from olmo.exceptions import OLMoConfigurationError

        model = loaded.model
        try:
            norm_types.require_supported(model)
            scheme, _ = norm_types.requested(model)
            with norm_types.stock_names(model):
                parameters, norm_parameters = _count_stock(model)
        except OLMoConfigurationError as error:
            raise LNSConfigError(f"OLMo refuses the config {path}: {one_line(error)}") from error
        except (ValueError, TypeError, ArithmeticError, AssertionError, RuntimeError) as error:
            raise LNSConfigError(f"OLMo could not build the model of {path}: {one_line(error)}") from error
        for _, _, plan in scheme.plans(model.n_layers):
            learned = [factor.elements(model.d_model) for factor in (plan.gate, plan.omega) if factor]
            parameters += (plan.norm_count - 1) * norm_parameters + sum(learned)
        return parameters

    def problems(self, settings: Mapping[str, Any], gpus: int) -> list[str]:
        stop_at, steps = settings["stop_at"], self.workload(settings).steps
        if steps and stop_at is None:
            return [
                f"stop_at is not set, so OLMo would run {steps + 10} steps instead of {steps}. Set stop_at to {steps}."
            ]
        if steps and int(stop_at) != steps:
            return [
                f"stop_at is {stop_at}, but max_duration is {steps} steps. The rate must decay until the last step. "
                "Set both to one number."
            ]
        return []

    def missing_data(self, settings: Mapping[str, Any]) -> str:
        sources = {"data.paths": settings.get("data.paths")}
        for evaluator in settings.get("evaluators") or []:
            sources[f"evaluator {evaluator['label']}"] = (evaluator.get("data") or {}).get("paths")
        for name, paths in sources.items():
            if paths == []:  # a pattern without a match
                return f"{name} matches no file."
            for path in paths or []:
                if "://" not in path and not Path(path).is_file():
                    return f"{path} of {name} was not found."
        return ""

    def arguments(self, run: Run, folder: Path) -> list[str]:
        checkpoints = {"save_folder": str(folder), "try_load_latest_save": True, "save_overwrite": True}
        return [str(run.config.resolve()), *(f"--{item}" for item in dot_list({**run.overrides, **checkpoints}))]

    def heldout_correction(self, settings: Mapping[str, Any]) -> float:
        """Return the ratio of positions to labels, because OLMo divides the loss of a row by all its positions.

        :raises LNSConfigError: if a label mask is missing, or the evaluator reads only a part of the rows.
        """
        import numpy as np

        sequence_length, positions, labels = int(settings["model.max_sequence_length"]), 0, 0
        for evaluator in settings.get("evaluators") or []:
            if evaluator["label"] != "heldout":
                continue
            masks = evaluator["data"].get("label_mask_paths") or []
            if masks and evaluator.get("subset_num_batches"):
                raise LNSConfigError(
                    "The evaluator heldout reads a subset of the rows. With label masks, a held-out loss can be "
                    "corrected for all rows only. Remove subset_num_batches, and train the runs again."
                )
            for path in masks:
                if not Path(path).is_file():
                    raise LNSConfigError(
                        f"The label mask {path} was not found. The held-out loss cannot be corrected without it. Set "
                        "OLMO_DATA_DIR to the folder of the data."
                    )
                mask = np.fromfile(path, dtype=np.bool_)
                rows = mask[: len(mask) // sequence_length * sequence_length].reshape(-1, sequence_length)
                predicted = rows[:, 1:]  # the first token of a row is not predicted
                positions += predicted.size
                labels += int(predicted.sum())
        return positions / labels if labels else 1.0

    def saved_settings(self, folder: Path) -> dict[str, Any]:
        path = folder / "config.yaml"
        return {**self.flat_settings(load(path)), "load_path": None} if path.is_file() else {}
