"""``olmo-lns train``: run OLMo's Trainer from the pip package, without an OLMo checkout.

OLMo's wheel lacks the launcher. :func:`run` assembles the same parts in the same order, also on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PosixPath
from typing import Any, Iterator, Sequence, cast

import numpy as np
import torch
import torch.multiprocessing as mp
import wandb
from olmo.config import CheckpointType, DDPConfig, FSDPConfig, TrainConfig
from olmo.data import build_train_dataloader
from olmo.eval import build_evaluators
from olmo.exceptions import OLMoConfigurationError
from olmo.model import OLMo
from olmo.optim import BoltOnWarmupScheduler, build_optimizer, build_scheduler
from olmo.torch_util import barrier, get_default_device, get_global_rank, get_world_size, seed_all, synchronize_flag
from olmo.train import Trainer
from olmo.util import add_cached_path_clients, clean_opt, find_latest_checkpoint, prepare_cli_environment
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from olmo_lns import environment
from olmo_lns.arguments import Parser
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.integrations.olmo import register
from olmo_lns.processes import process_group
from olmo_lns.study import bundled_configs
from olmo_lns.temporary_values import replaced_attribute

log = logging.getLogger("olmo.lns.train")

#: Types in train.pt and optim.pt besides tensors. ai2-olmo 0.6.0 loads these files with ``weights_only=True``.
_STATE_TYPES: list[Any] = [PosixPath, OrderedDict, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
# numpy's _reconstruct, whose module depends on the version
_STATE_TYPES.append(cast(Any, np.random.get_state(legacy=True))[1].__reduce__()[0])


@contextmanager
def _loadable_state() -> Iterator[None]:
    """Let the Trainer of ai2-olmo 0.6.0 load its own checkpoints, and save its random state without CUDA."""
    has_cuda, set_rng_state = torch.cuda.is_available(), torch.cuda.set_rng_state

    def set_if_saved(state: Any, *args: Any, **kwargs: Any) -> None:
        if has_cuda and state is not None:
            set_rng_state(state, *args, **kwargs)

    with torch.serialization.safe_globals(_STATE_TYPES), ExitStack() as stack:
        stack.enter_context(replaced_attribute(torch.cuda, "set_rng_state", set_if_saved))
        if not has_cuda:
            stack.enter_context(replaced_attribute(torch.cuda, "get_rng_state", lambda *args, **kwargs: None))
        yield


@dataclass
class LocalTrainer(Trainer):
    """OLMo's Trainer with a clean end after a signal."""

    stop_requested: bool = False

    def request_stop(self, *_: Any) -> None:
        """Handle a signal: end after this step, or immediately at the second signal."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        if get_global_rank() == 0:
            print("\nThe run saves a checkpoint after this step and ends. A second signal ends it at once.", flush=True)

    def check_if_cancelled(self) -> tuple[bool, int]:
        """End the run on every rank after a signal at rank 0: after this step, with a checkpoint."""
        if synchronize_flag(self.stop_requested, self.device):
            return True, 0
        return super().check_if_cancelled()


def _wrap(cfg: TrainConfig, model: OLMo, device: torch.device) -> torch.nn.Module:
    """Wrap the model in DDP or FSDP, by ``cfg.distributed_strategy``, and initialize its parameters."""

    def allocate(module: torch.nn.Module) -> None:
        module.to_empty(device=get_default_device())  # allocates only; reset_parameters below sets the values

    if str(cfg.distributed_strategy) == "ddp":
        cfg.ddp = cfg.ddp or DDPConfig()
        wrapped: torch.nn.Module = DDP(model.to(device), find_unused_parameters=cfg.ddp.find_unused_params)
    else:
        cfg.fsdp = cfg.fsdp or FSDPConfig()
        wrapped = FSDP(
            model,
            sharding_strategy=cfg.fsdp.sharding_strategy,
            mixed_precision=cfg.fsdp_precision,
            auto_wrap_policy=model.get_fsdp_wrap_policy(cfg.fsdp.wrapping_strategy),
            use_orig_params=cfg.fsdp.use_orig_params,
            limit_all_gathers=True,
            device_id=device,
            param_init_fn=allocate,
        )
    model.reset_parameters()
    return wrapped


def _checkpoint_type(cfg: TrainConfig) -> CheckpointType:
    """Return the checkpoint type. DDP saves unsharded checkpoints, by default at the interval of sharded ones."""
    if str(cfg.distributed_strategy) == "fsdp":
        return CheckpointType.sharded if cfg.save_num_checkpoints_to_keep != 0 else CheckpointType.unsharded
    cfg.save_interval_unsharded = cfg.save_interval_unsharded or cfg.save_interval
    if cfg.save_num_unsharded_checkpoints_to_keep == 0:
        cfg.save_num_unsharded_checkpoints_to_keep = cfg.save_num_checkpoints_to_keep
    return CheckpointType.unsharded


def run(cfg: TrainConfig, device: torch.device) -> tuple[int, bool]:
    """Train ``cfg`` with OLMo's Trainer in the current process group.

    Call :func:`prepare` first. ``cfg`` is completed in place as by OLMo's launcher, except that ``stop_at`` defaults to
    ``max_duration`` instead of ten steps more. After SIGINT or SIGTERM the run ends with a checkpoint: one rank after
    the current step, several ranks at the next ``canceled_check_interval``.

    :returns: total number of optimizer steps, and False if a signal or a time limit ended the run.
    """
    with ExitStack() as stack:
        stack.enter_context(_loadable_state())
        if cfg.wandb is not None and (get_global_rank() == 0 or not cfg.wandb.rank_zero_only):
            folder = Path(cfg.save_folder) / "wandb"
            folder.mkdir(parents=True, exist_ok=True)
            names = {key: getattr(cfg.wandb, key) for key in ("project", "entity", "group", "name", "tags")}
            wandb.init(dir=str(folder), config=cfg.asdict(exclude=["wandb"]), **names)
        barrier()
        seed_all(cfg.seed)
        resumable = cfg.update_with(save_overwrite=cfg.save_overwrite or cfg.try_load_latest_save)
        loader = build_train_dataloader(resumable)
        # Build evaluators only on request: they load the tokenizer, which may be on the hub.
        evaluators = build_evaluators(cfg, device) if cfg.evaluators else []
        model = OLMo(cfg.model)
        log.info("%s parameters (%s without embeddings)", model.num_params(), model.num_params(False))
        if cfg.compile is not None:
            for block in model.transformer.blocks:
                block.compile(**cfg.compile.asdict())
        model.set_activation_checkpointing(cfg.activation_checkpointing)
        dist_model = _wrap(cfg, model, device)
        trainer = stack.enter_context(
            LocalTrainer(
                cfg=cfg,
                epoch=cfg.epoch,
                model=model,
                dist_model=dist_model,
                optim=build_optimizer(cfg, dist_model),
                scheduler=build_scheduler(cfg),
                train_loader=loader,
                device=device,
                evaluators=evaluators,
            )
        )
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            previous_handler = signal.signal(signal_number, trainer.request_stop)
            stack.callback(signal.signal, signal_number, previous_handler)
        return _train(trainer, cfg)


def _train(trainer: LocalTrainer, cfg: TrainConfig) -> tuple[int, bool]:
    checkpoint_type = _checkpoint_type(cfg)
    if cfg.try_load_latest_save:
        folders = [folder for folder in (cfg.save_folder, cfg.remote_save_folder) if folder is not None]
        if (latest := next(filter(None, map(find_latest_checkpoint, folders)), None)) is not None:
            cfg.load_path = str(latest)
            # Resume fully: a reset state would overwrite the checkpoints of this run with those of another.
            cfg.restore_dataloader, cfg.reset_trainer_state, cfg.reset_optimizer_state = True, False, False
    if not cfg.dry_run and not cfg.no_pre_train_checkpoint and cfg.load_path is None:
        # Save and load a checkpoint first, so that a full disk or an unreadable state fails now, not in an hour.
        path, cache = trainer.save_checkpoint(checkpoint_type=checkpoint_type)
        trainer.restore_checkpoint(path, checkpoint_type=checkpoint_type, local_cache=cache)
    if cfg.load_path is not None:
        trainer.restore_checkpoint(
            cfg.load_path,
            load_optimizer_state=not cfg.reset_optimizer_state,
            load_trainer_state=not cfg.reset_trainer_state,
            sharded_checkpointer=cfg.load_path_sharded_checkpointer,
        )
        log.info("Loaded %s at step %d", cfg.load_path, trainer.global_step)
        if cfg.reset_optimizer_state and not cfg.reset_trainer_state:
            step = trainer.global_step
            trainer.scheduler = BoltOnWarmupScheduler.wrap(trainer.scheduler, step, int(step + cfg.scheduler.t_warmup))
    if cfg.force_save_unsharded and str(cfg.distributed_strategy) == "fsdp":
        trainer.save_checkpoint(checkpoint_type=CheckpointType.unsharded)
    cfg.stop_at = cfg.stop_at if cfg.stop_at is not None else trainer.max_steps
    if cfg.stop_at < trainer.max_steps:
        log.warning(
            "This run ends at step %d (stop_at), before max_duration (step %d).", cfg.stop_at, trainer.max_steps
        )
    last = cfg.stop_at if cfg.stop_after is None else min(cfg.stop_at, trainer.global_step + cfg.stop_after)
    if cfg.dry_run or trainer.global_step >= last:
        return trainer.global_step, not cfg.dry_run
    if get_world_size() == 1:
        cfg.canceled_check_interval = 1  # costs nothing with one rank; Ctrl-C acts after the step
    trainer.fit()
    return trainer.global_step, trainer.global_step >= last


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load an OLMo ``TrainConfig`` from a YAML file and ``--key=value`` overrides, with the norm types of this package.

    :param path: a file, or the name of a file in the pack, such as ``60M-lns``.
    :raises LNSConfigError: if OLMo refuses the config. The message has the first line of OLMo's error.
    """
    environment.refuse_disabled()
    register()
    file = bundled_configs.find_config(str(path), "olmo")
    for option, word in pairwise(["", *overrides]):
        if not word.startswith("-") and "=" not in word:
            meaning = f"{option}={word}" if option.startswith("--") and "=" not in option else f"--KEY={word}"
            raise LNSConfigError(
                f"The override {word!r} has no equals sign. OLMo reads --key=value in one word. Type {meaning}"
            )
    try:
        return TrainConfig.load(file, [clean_opt(override) for override in overrides])
    except (OLMoConfigurationError, AttributeError, TypeError) as error:  # OLMo reads some keys before it checks them
        message = f"OLMo could not load {path}: {one_line(error)}"
        if "Environment variable" in message or "does not match any files" in message:
            message += ". The pack's configs read $OLMO_DATA_DIR, with held-out text in its folder heldout/. "
            message += "docs/data.md has the commands that make these data."
        raise LNSConfigError(message) from error


def prepare(cfg: TrainConfig, device: torch.device) -> None:
    """Fill in the values that OLMo's launcher sets, and those for a CPU.

    The process group must exist. No file is written.

    :raises LNSConfigError: if a value cannot work. The message names the expected value.
    """
    ranks, strategy = get_world_size(), str(cfg.distributed_strategy)
    if cfg.run_name is None:
        raise LNSConfigError("run_name is not set. OLMo needs a name for each run. Add --run_name=NAME.")
    may_exist = cfg.dry_run or cfg.save_overwrite or cfg.try_load_latest_save
    if not may_exist and any((Path(cfg.save_folder) / name).exists() for name in ("config.yaml", "train_data")):
        raise LNSConfigError(
            f"save_folder {cfg.save_folder} already has a run. Add --try_load_latest_save to continue it, "
            "--save_overwrite to replace it, or --save_folder=FOLDER to use another folder."
        )
    for path in cfg.data.paths or []:
        if "://" not in path and not Path(path).is_file():
            raise LNSConfigError(
                f"The data file {path} was not found. data.paths must name files of token ids. docs/data.md makes them."
            )
    if (batch := cfg.global_train_batch_size) % ranks:
        raise LNSConfigError(
            f"global_train_batch_size is {batch}, which {ranks} processes cannot share evenly. Change one of the "
            "numbers."
        )
    if strategy not in ("ddp", "fsdp"):
        raise LNSConfigError(
            f"distributed_strategy is {strategy}. `olmo-lns train` supports ddp and fsdp. Set one of them."
        )
    cfg.model.precision = cfg.precision
    cfg.device_train_batch_size = batch // ranks
    cfg.device_train_grad_accum = cfg.device_train_batch_size // cfg.device_train_microbatch_size
    if (no_decay := cfg.optimizer.no_decay_norm_and_bias) is not None:  # deprecated name of the next two
        cfg.optimizer.decay_norm_and_bias = cfg.optimizer.decay_embeddings = not no_decay
        cfg.optimizer.no_decay_norm_and_bias = None
    if strategy == "ddp" or (device.type == "cpu" and cfg.model.init_device != "meta"):
        cfg.model.init_device = device.type  # DDP needs weights on the device


def _save_config(cfg: TrainConfig) -> None:
    barrier()  # all ranks check the folder before the first rank writes
    if get_global_rank() == 0 and not cfg.dry_run:
        path = Path(cfg.save_folder) / "config.yaml"
        if not (cfg.try_load_latest_save and path.is_file()):
            path.parent.mkdir(parents=True, exist_ok=True)
            cfg.save(path)
    barrier()


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns train``.

    :returns: the exit code: 0, or 130 if a signal or a time limit ended the run early.
    """
    parser = Parser(
        prog="olmo-lns train",
        usage="%(prog)s [-h] config [--key=value ...]",
        description="Train an OLMo config with OLMo's Trainer from the pip package alone. Start several processes with "
        "torchrun -m olmo_lns train. Ctrl-C saves a checkpoint, from which --try_load_latest_save continues.",
    )
    parser.add_argument("config", help="OLMo training config (YAML), or the name of a pack file: 60M-lns")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--key=value", help="as for OLMo's launcher")
    args = parser.parse_args(argv)
    cfg = load_config(args.config, args.overrides)
    if cfg.data.num_workers > 0:
        mp.set_start_method("spawn", force=True)  # as OLMo's launcher does: forking with threads can hang
    # OLMo's trainer collects garbage several times at each checkpoint, and would examine the half million objects of
    # the imported modules each time, which takes half a second.
    gc.freeze()
    with process_group() as device:
        prepare_cli_environment()
        add_cached_path_clients()
        prepare(cfg, device)
        _save_config(cfg)
        step, complete = run(cfg, device)
        rank = get_global_rank()
    if rank == 0:
        state = "done" if complete or cfg.dry_run else "stopped early; --try_load_latest_save continues"
        print(f"{cfg.run_name}: step {step}, {state}; checkpoints in {cfg.save_folder}")
    return 0 if complete or cfg.dry_run else 130
