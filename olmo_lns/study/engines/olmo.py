"""OLMo in a study: its ``TrainConfig``, its launcher's dot list, what it saves and logs."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo import types
from olmo_lns.schemes import Scheme
from olmo_lns.study.arms import Arm
from olmo_lns.study.engines.base import Curve, Engine, Machine, Run, Shape, number
from olmo_lns.study.files import placeholders

#: Initialization -> init_fn; ``upstream`` is whatever init_fn a config has, and so defines no arm.
INIT_FNS = {"plain": "normal"} | {ours: name for name, ours in types.INIT_FNS.items()}
LOSS = "train/CrossEntropyLoss"
STEP = re.compile(r"\[step=(\d+)/(\d+)(?:,epoch=\d+)?\]\s*$")
METRIC = re.compile(r"^ {4,}(\S+)=(\S+)\s*$")
#: Of the evaluator with this label, where a config has one.
HELDOUT = "eval/heldout/CrossEntropyLoss"


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """The ``TrainConfig`` of a file as ``scripts/train.py file --key=value`` gets it, data paths not required to exist.

    :raises LNSConfigError: OLMo's own complaint, with the file's name.
    """
    from omegaconf.errors import OmegaConfBaseException

    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError

    if not path.is_file():
        raise LNSConfigError(f"{path}: no such file")
    with placeholders(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)  # OLMo's, at every load
        try:
            return TrainConfig.load(str(path), _dot_list(overrides or {}), validate_paths=False)
        except (OLMoConfigurationError, OmegaConfBaseException, TypeError, ValueError) as error:
            raise LNSConfigError(f"{path}: OLMo refuses it: {one_line(error)}") from error


def _dot_list(overrides: Mapping[str, Any]) -> list[str]:
    words = {None: "null", True: "true", False: "false"}
    return [f"{k}={words[v] if v is None or isinstance(v, bool) else v}" for k, v in overrides.items()]


class OLMoEngine(Engine):
    name, title, file_key = "olmo", "OLMo", "model"
    loss = LOSS
    arm_keys = frozenset({"model.layer_norm_type", "model.init_fn"})
    bookkeeping: tuple[str, ...] = (
        "run_name", "save_", "remote_save_folder", "wandb", "load_path", "try_load_latest_save", "console_log_interval",
        "eval_", "evaluators", "device_eval_batch_size", "device_train_", "speed_monitor", "data.num_workers",
        "data.label_mask_paths", "data.pin_memory", "data.prefetch_factor", "data.persistent_workers", "data.timeout",
        "time_limit", "no_pre_train_checkpoint", "sharded_checkpointer", "canceled_check_interval",
        "extra_steps_after_cancel",
        "gen1_gc_interval", "python_profiling", "torch_profiling", "dry_run", "force_save_unsharded",
        "model.init_device", "model.flash_attention", "distributed_strategy", "fsdp", "ddp", "activation_checkpointing",
        "compile", "optimizer.metrics_log_interval", "tokenizer",
    )  # fmt: skip
    start: tuple[str, tuple[str, ...]] = ("load_path", ("save_folder", "remote_save_folder"))
    rate_keys: tuple[str, ...] = ("optimizer.learning_rate", "scheduler.warmup_min_lr")
    data_key = "data.paths"
    even = False

    def arm(self, arm: Arm) -> dict[str, Any] | None:
        init_fn = arm.init_fn or INIT_FNS.get(arm.initialization)
        if init_fn is None:
            return None
        return {"model.layer_norm_type": types.spell(arm.scheme, "rms"), "model.init_fn": init_fn}

    def scheme(self, settings: Mapping[str, Any]) -> Scheme:
        return types.scheme_of(settings.get("model.layer_norm_type", ""))

    def scaled(self, settings: Mapping[str, Any]) -> str | None:
        init_fn = settings.get("model.init_fn")
        if init_fn not in ("mitchell", "full_megatron", *types.INIT_FNS):
            return None
        return f"the scaled initialization {init_fn!r}: expected model.init_fn: normal"

    def identity(self, name: str, seed: int) -> dict[str, Any]:
        return {"run_name": name, "seed": seed}

    def load(self, path: Path, overrides: Mapping[str, Any]) -> Any:
        """OLMo's ``TrainConfig``."""
        return load(path, overrides)

    def _shape(self, settings: Mapping[str, Any]) -> Shape:
        width, heads = int(settings["model.d_model"]), int(settings["model.n_heads"])
        hidden = settings.get("model.mlp_hidden_size") or int(settings["model.mlp_ratio"]) * width
        batch, sequence = int(settings["global_train_batch_size"]), int(settings["model.max_sequence_length"])
        kv = settings.get("model.n_kv_heads") or (1 if settings.get("model.multi_query_attention") else heads)
        rate = float(settings["optimizer.learning_rate"])
        return Shape(
            layers=int(settings["model.n_layers"]),
            width=width,
            heads=heads,
            kv_heads=int(kv),
            inner=int(hidden) // 2,
            vocabulary=int(settings.get("model.embedding_size") or settings["model.vocab_size"]),
            tied=bool(settings["model.weight_tying"]),
            gain=bool(settings["model.layer_norm_with_affine"]),
            sequence=sequence,
            batch=batch,
            steps=_steps(settings["max_duration"], batch * sequence),
            warmup=int(settings["scheduler.t_warmup"]),
            learning_rate=rate,
            min_learning_rate=rate * float(settings["scheduler.alpha_f"]),
        )

    def machine(self, settings: Mapping[str, Any]) -> Machine:
        return Machine(
            strategy=str(settings["distributed_strategy"]),
            micro_batch=int(settings["device_train_microbatch_size"]),
            recompute=settings["activation_checkpointing"] is not None,
        )

    def count(self, path: Path, loaded: Any) -> tuple[int, float | None]:
        """By OLMo's own model on the meta device."""
        from olmo.model import OLMo

        types.check_sizes(loaded.model)
        model = OLMo(loaded.model.update_with(init_device="meta"), init_params=False)
        return model.num_params(), float(model.num_fwd_flops + model.num_bck_flops)

    def problems(self, settings: Mapping[str, Any], gpus: int) -> tuple[list[str], list[str]]:
        found = []
        stop, steps = settings["stop_at"], self.shape(settings).steps
        if stop is None:
            found.append(f"stop_at is not set: OLMo would run {steps + 10} steps; expected {steps}")
        elif stop != steps:
            found.append(f"stop_at {stop} is not max_duration {steps}: the schedule would be cut or idle")
        if settings["distributed_strategy"] == "ddp" and settings["model.init_device"] == "meta":
            found.append("distributed_strategy ddp needs model.init_device cuda, found meta")
        return found, []

    def trunk(self, steps: int, every: int) -> dict[str, Any]:
        return {
            "max_duration": steps,
            "scheduler.name": "constant_with_warmup",
            "save_interval_unsharded": every,
            "save_num_unsharded_checkpoints_to_keep": -1,
        }

    def branch(self, start: int, stop: int) -> dict[str, Any]:
        # A "warm-up" from the rate to the rate, and from its end a linear fall to alpha_f times the rate.
        return {
            "max_duration": stop,
            "scheduler.name": "linear_with_warmup",
            "scheduler.t_warmup": start,
            "scheduler.warmup_min_lr": "${optimizer.learning_rate}",
        }

    def checkpoint(self, step: int) -> str:
        return f"step{step}-unsharded"

    def words(self, run: Run, folder: Path) -> list[str]:
        start = {"load_path": str(folder.parent / run.start_checkpoint)} if run.start_checkpoint else {}
        own = {"save_folder": str(folder), "try_load_latest_save": True, "save_overwrite": True}
        return [str(run.config.resolve()), *(f"--{word}" for word in _dot_list({**run.overrides, **start, **own}))]

    def data_files(self, settings: Mapping[str, Any]) -> list[str]:
        heldout = [evaluator["data"] for evaluator in settings.get("evaluators") or []]
        training = {key: settings.get(f"data.{key}") for key in ("paths", "label_mask_paths")}
        return [path for data in (training, *heldout) for key in training for path in data.get(key) or []]

    def heldout(self, settings: Mapping[str, Any]) -> Any:
        named = [evaluator for evaluator in settings.get("evaluators") or [] if evaluator["data"].get("paths")]
        keys = ("label", "subset_num_batches", "device_eval_batch_size")
        seeds = [evaluator["data"].get("seed") for evaluator in named]
        return [[[str(each.get(key)) for key in keys] for each in named], seeds, settings.get("device_eval_batch_size")]

    def padding(self, settings: Mapping[str, Any]) -> float:
        """OLMo sums a row's loss over its labels and divides by all its positions.

        :raises LNSConfigError: masks that are not there, or of rows of which only a part is evaluated.
        """
        for evaluator in settings.get("evaluators") or []:
            masks = evaluator["data"].get("label_mask_paths")
            if evaluator["label"] == "heldout" and masks:
                if evaluator.get("subset_num_batches"):
                    raise LNSConfigError("evaluator heldout: with label masks all rows are needed, not a subset")
                return _positions_per_label(masks, int(settings["model.max_sequence_length"]))
        return 1.0

    def used(self, folder: Path) -> dict[str, Any]:
        saved = folder / "config.yaml"
        return self.settings(load(saved)) if saved.is_file() else {}

    def curve(self, path: Path, text: str) -> Curve | None:
        if "[step=" not in text:
            return None
        curve, total, step = Curve({}, None, str(path)), None, None
        for line in text.splitlines():
            if match := STEP.search(line):
                if step is not None and step not in curve.losses:
                    raise LNSConfigError(f"{path}: damaged: step {step} has no {LOSS}")
                step, total = int(match[1]), int(match[2])
            elif step is not None and (match := METRIC.match(line)):
                if match[1] == HELDOUT:
                    curve.heldout[step] = number(path, step, match[2])
                elif match[1] == LOSS:
                    curve.add(step, match[2])
        # The last step may have been cut by a kill: only an earlier one without a loss is damage.
        return replace(curve, total=total)


def _positions_per_label(masks: list[str], length: int) -> float:
    rows = labels = 0
    for path in masks:
        if not Path(path).is_file():
            raise LNSConfigError(f"label mask {path} is not there: set OLMO_DATA_DIR to the folder of the data")
        mask = np.fromfile(path, dtype=np.bool_)
        mask = mask[: len(mask) // length * length].reshape(-1, length)
        rows, labels = rows + len(mask), labels + int(mask[:, 1:].sum())
    return rows * (length - 1) / labels


def _steps(duration: Any, tokens_per_step: int) -> int:
    """OLMo's ``max_duration``: steps, or tokens as ``"20e9T"``."""
    text = str(duration).strip()
    if text.endswith("ep"):
        raise LNSConfigError(f"max_duration={duration!r} is in epochs: give steps or tokens ('20e9T')")
    if text.endswith("T"):
        return -(-int(float(text[:-1])) // tokens_per_step)
    return int(float(text))
