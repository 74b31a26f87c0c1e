"""``olmo-lns train``: OLMo's Trainer from the pip package alone, for those without an OLMo checkout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from olmo_lns import settings
from olmo_lns.errors import LNSConfigError, one_line
from olmo_lns.processes import process_group
from olmo_lns.study import files

if TYPE_CHECKING:
    import torch

_EPILOG = """\
One process needs neither torchrun nor a network; several:
  torchrun --standalone --nproc-per-node=2 -m olmo_lns train config.yaml --distributed_strategy=ddp
Ctrl-C saves a checkpoint after the current step; --try_load_latest_save continues from it.
"""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Any:
    """An OLMo ``TrainConfig`` from a YAML file and ``--key=value`` overrides, with the types of this package.

    :param path: a file, or one of the pack by its name: ``60M-lns``.
    :raises LNSConfigError: OLMo refuses the config, in the first line of its own words.
    """
    settings.refuse_disabled()
    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import TrainConfig
    from olmo.exceptions import OLMoConfigurationError
    from olmo.util import clean_opt

    found = files.located(str(path), "olmo")
    try:
        return TrainConfig.load(found, [clean_opt(text) for text in overrides])
    except (OLMoConfigurationError, FileNotFoundError) as error:
        raise LNSConfigError(f"{path}: {one_line(error)}") from error
    except (AttributeError, TypeError) as error:  # a key that OLMo reads before it compares the config with its own
        raise LNSConfigError(f"{path}: not an OLMo training config ({one_line(error)})") from error


def prepare(cfg: Any, device: torch.device) -> None:
    """Fill in what OLMo's launcher fills in, and what a CPU needs. The process group must be up; no file is touched.

    :raises LNSConfigError: a value that cannot work here, with what is expected.
    """
    from olmo.torch_util import get_world_size

    ranks, strategy = get_world_size(), str(cfg.distributed_strategy)
    if cfg.run_name is None:
        raise LNSConfigError("run_name is not set: give --run_name=NAME")
    free = cfg.dry_run or cfg.save_overwrite or cfg.try_load_latest_save
    if not free and any((Path(cfg.save_folder) / name).exists() for name in ("config.yaml", "train_data")):
        raise LNSConfigError(
            f"save_folder {cfg.save_folder} holds a run already: --try_load_latest_save continues it, "
            "--save_overwrite replaces it, --save_folder=... goes elsewhere"
        )
    for path in cfg.data.paths or []:
        if "://" not in path and not Path(path).is_file():
            raise LNSConfigError(f"data.paths: {path}: no such file; expected tokenised .npy memmaps")
    if (batch := cfg.global_train_batch_size) % ranks:
        raise LNSConfigError(f"global_train_batch_size {batch} is not a multiple of {ranks} ranks")
    if strategy == "single" and ranks > 1:
        raise LNSConfigError(f"distributed_strategy=single with {ranks} ranks: they would not synchronise; use ddp")
    cfg.model.precision = cfg.precision
    cfg.device_train_batch_size = batch // ranks
    cfg.device_train_grad_accum = cfg.device_train_batch_size // cfg.device_train_microbatch_size
    if (no_decay := cfg.optimizer.no_decay_norm_and_bias) is not None:  # the deprecated name of the two below
        cfg.optimizer.decay_norm_and_bias = cfg.optimizer.decay_embeddings = not no_decay
        cfg.optimizer.no_decay_norm_and_bias = None
    if device.type == "cpu":
        if strategy != "fsdp" or cfg.model.init_device != "meta":
            cfg.model.init_device = "cpu"
    elif strategy == "ddp" and cfg.model.init_device != "cuda":
        raise LNSConfigError(f"ddp needs model.init_device=cuda, found {cfg.model.init_device}")


def _save_config(cfg: Any) -> None:
    from olmo.torch_util import barrier, get_global_rank

    barrier()  # every rank has looked into the folder before the first one writes there
    if get_global_rank() == 0 and not cfg.dry_run:
        path = Path(cfg.save_folder) / "config.yaml"
        if not (cfg.try_load_latest_save and path.is_file()):
            path.parent.mkdir(parents=True, exist_ok=True)
            cfg.save(path)
    barrier()


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns train``. Exit code 130 where a signal or a time limit ended the run early."""
    parser = argparse.ArgumentParser(
        prog="olmo-lns train",
        usage="%(prog)s [-h] config [--key=value ...]",
        description="Train an OLMo config with OLMo's own Trainer, from the pip package alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="OLMo training config (YAML), or one of the pack by its name: 60M-lns")
    parser.add_argument("overrides", nargs=argparse.REMAINDER, metavar="--key=value", help="as OLMo's own launcher")
    args = parser.parse_args(argv)
    cfg = load_config(args.config, args.overrides)
    import torch.multiprocessing as mp
    from olmo.torch_util import get_global_rank
    from olmo.util import add_cached_path_clients, prepare_cli_environment

    if cfg.data.num_workers > 0:
        mp.set_start_method("spawn", force=True)  # OLMo's launcher does: forking beside threads can hang
    with process_group() as device:
        prepare_cli_environment()
        add_cached_path_clients()
        prepare(cfg, device)
        _save_config(cfg)
        from olmo_lns.runs.trainer import run

        step, complete = run(cfg, device)
        rank = get_global_rank()
    if rank == 0:
        state = "done" if complete or cfg.dry_run else "stopped early; --try_load_latest_save continues"
        print(f"{cfg.run_name}: step {step}, {state}; checkpoints in {cfg.save_folder}")
    return 0 if complete or cfg.dry_run else 130
