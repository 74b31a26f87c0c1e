"""``olmo-lns train``: OLMo's Trainer from the pip package alone, for those without an OLMo checkout.

One process needs neither torchrun nor a network. For several:
``torchrun --standalone --nproc-per-node=2 -m olmo_lns train config.yaml --distributed_strategy=ddp``.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from olmo_lns import environment, hub
from olmo_lns.arguments import process_group
from olmo_lns.errors import LNSConfigError, LNSError
from olmo_lns.study import files

if TYPE_CHECKING:
    import torch

#: What OLMo's autocast knows.
PRECISIONS = ("amp_bf16", "amp_fp16", "fp32")
_EPILOG = """\
examples:
  olmo-lns train config.yaml --save_folder=runs/a --max_duration=100
  olmo-lns train config.yaml --model.layer_norm_type=lns          LayerNorm Scaling on
  olmo-lns train config.yaml --try_load_latest_save               continue the run in save_folder
  torchrun --standalone --nproc-per-node=2 -m olmo_lns train config.yaml --distributed_strategy=ddp
Ctrl-C saves a checkpoint after the current step; --try_load_latest_save continues from it.
"""


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """OLMo's and OmegaConf's complaints about a config as one line of ours."""
    from olmo.exceptions import OLMoConfigurationError

    try:
        yield
    except (OLMoConfigurationError, FileNotFoundError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = [line.removeprefix("full_key: ") for line in lines[1:] if line.startswith("full_key: ")]
        what = lines[0] if lines else type(error).__name__
        if unset := re.search(r"Environment variable '(\w+)' not found", what):
            what = f"environment variable {unset[1]} is not set: export {unset[1]}=..."
            what += f", or give --{where[0]} yourself" if where else ""
        # OmegaConf names its own machinery in front of what OLMo's resolver says.
        what = re.sub(r"^\w+ raised while resolving interpolation: ", "", what)
        raise LNSConfigError(": ".join([*where, what])) from error
    except IndexError as error:
        if "index out of range in self" not in str(error):  # torch's embedding, on CPU
            raise
        raise LNSConfigError(
            "the data hold a token id outside model.vocab_size: another tokenizer, or another data.memmap_dtype; "
            "`olmo-lns data check FOLDER --vocab-size N --dtype …` names the file"
        ) from error


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Any:
    """An OLMo ``TrainConfig`` from a YAML file and ``--key=value`` overrides, LNS types included.

    :param path: a file, or one of the pack by its name: ``60M-lns``.
    :raises LNSConfigError: one line that names the key and what is allowed.
    """
    environment.refuse_disabled()
    from olmo_lns.integrations.olmo import register

    register()
    from olmo.config import TrainConfig
    from olmo.util import clean_opt

    for text in overrides:
        if not text.startswith("--"):
            raise LNSConfigError(f"expected overrides as --key=value, got {text!r}")
    path = files.located(str(path), "olmo")
    optimizer = files.read(path).get("optimizer", {})  # OLMo looks into it before it compares it with what it knows
    if not isinstance(optimizer, dict) and not str(optimizer).startswith("${"):
        raise LNSConfigError(
            f"{path}: not an OLMo training config: optimizer is {optimizer}, expected keys of its own such as name and "
            "learning_rate; the header of a file of another framework says how that is launched"
        )
    with _one_line_errors():
        return TrainConfig.load(path, [clean_opt(text) for text in overrides])


def _check_data(data: Any, key: str, length: int, sequences: int) -> None:
    """Check that ``data`` names files with ``sequences`` sequences of ``length`` tokens; URLs are not opened."""
    from olmo.util import is_url

    paths = list(data.paths or [path for group in (data.datasets or {}).values() for path in group])
    if not paths:
        if getattr(data, "custom_dataset", None) is None:
            raise LNSConfigError(f"{key}: no data: set paths to tokenised .npy memmaps")
        return
    if any(is_url(path) for path in paths):
        return
    if missing := [path for path in paths if not Path(path).is_file()]:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise LNSConfigError(f"{key}.paths: no such file: {missing[0]}{more}; expected tokenised .npy memmaps")
    size = length * data.effective_memmap_dtype(0).itemsize
    if (found := sum(Path(path).stat().st_size // size for path in paths)) < sequences:
        raise LNSConfigError(f"{key}.paths: {found} sequences of {length} tokens, fewer than a batch of {sequences}")


def _check_folders(cfg: Any) -> None:
    """The save folder must be free or be continued; a local ``load_path`` must be a checkpoint.

    Without its files a checkpoint would be taken for one without a record.
    """
    from olmo.util import find_latest_checkpoint

    found = [name for name in ("config.yaml", "train_data") if (Path(cfg.save_folder) / name).exists()]
    if found and not (cfg.dry_run or cfg.save_overwrite or cfg.try_load_latest_save):
        raise LNSConfigError(
            f"save_folder {cfg.save_folder} already holds a run ({found[0]}): --try_load_latest_save continues it, "
            "--save_overwrite replaces it, --save_folder=... goes elsewhere"
        )
    if cfg.load_path is None or "://" in str(cfg.load_path) or (Path(cfg.load_path) / "config.yaml").is_file():
        return
    folders = [folder for folder in (cfg.save_folder, cfg.remote_save_folder) if folder is not None]
    if cfg.try_load_latest_save and any(find_latest_checkpoint(folder) for folder in folders):
        return  # that one is loaded: the config of a resumed run names a step that may be gone
    there = "has no config.yaml, as every checkpoint of OLMo has" if Path(cfg.load_path).exists() else "does not exist"
    raise LNSConfigError(
        f"load_path: {cfg.load_path} {there}: name a checkpoint folder of OLMo, such as RUN/step1000-unsharded"
    )


def _check_tokenizer(identifier: str) -> None:
    """OLMo's evaluators build it, from a file, from OLMo's own data, or from the hub.

    :raises LNSConfigError: it would have to come from a hub that cannot be reached.
    """
    from olmo.tokenizer import is_data_file

    if Path(identifier).is_file() or is_data_file(identifier):
        return
    try:
        hub.cached_only(identifier, "tokenizer.json")
    except LNSError as error:
        raise LNSConfigError(f"tokenizer.identifier, which the evaluators need: {error}") from None


def prepare(cfg: Any, device: torch.device) -> None:
    """Check ``cfg`` and fill in what OLMo's launcher fills in; on CPU also what only CPU needs.

    The process group must be up. Changes ``cfg`` in place and touches no file.

    :raises LNSConfigError: a value that cannot work, with what is allowed.
    """
    from olmo.torch_util import get_world_size

    from olmo_lns.integrations.olmo.types import check_sizes

    if cfg.run_name is None:
        raise LNSConfigError("run_name is not set: --run_name=NAME")
    duration = re.fullmatch(r"([0-9.]+(?:e[+]?[0-9]+)?)(?:T|ep)?", str(cfg.max_duration).strip())
    if duration is None or float(duration[1]) <= 0:
        raise LNSConfigError(
            f"max_duration: expected steps, tokens ('20e9T') or epochs ('1ep') above 0, got {cfg.max_duration!r}"
        )
    check_sizes(cfg.model)
    if cfg.precision not in PRECISIONS:
        raise LNSConfigError(f"precision {cfg.precision!r}: expected {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    length = cfg.model.max_sequence_length
    _check_data(cfg.data, "data", length, cfg.global_train_batch_size)
    for evaluator in cfg.evaluators:
        if str(evaluator.type) == "lm":  # the others bring their data with them
            _check_data(evaluator.data, f"evaluators.{evaluator.label}.data", length, 1)
    if cfg.evaluators:
        _check_tokenizer(cfg.tokenizer.identifier)
    _check_folders(cfg)
    ranks = get_world_size()
    if (batch := cfg.global_train_batch_size) % ranks:
        raise LNSConfigError(f"global_train_batch_size {batch} is not a multiple of {ranks} ranks")
    cfg.model.precision = cfg.precision
    cfg.device_train_batch_size = batch // ranks
    cfg.device_train_grad_accum = cfg.device_train_batch_size // cfg.device_train_microbatch_size
    if (no_decay := cfg.optimizer.no_decay_norm_and_bias) is not None:  # the deprecated name of the two below
        cfg.optimizer.decay_norm_and_bias = cfg.optimizer.decay_embeddings = not no_decay
        cfg.optimizer.no_decay_norm_and_bias = None
    strategy = str(cfg.distributed_strategy)
    if strategy == "single" and ranks > 1:
        raise LNSConfigError(f"distributed_strategy=single with {ranks} ranks: they would not synchronise; use ddp")
    if device.type == "cpu":
        _prepare_for_cpu(cfg, strategy)
    elif strategy == "ddp" and cfg.model.init_device != "cuda":
        raise LNSConfigError(f"ddp needs model.init_device=cuda, found {cfg.model.init_device}")


def _prepare_for_cpu(cfg: Any, strategy: str) -> None:
    unsharded = cfg.save_interval_unsharded is not None or cfg.force_save_unsharded
    if strategy == "fsdp" and (unsharded or cfg.save_num_checkpoints_to_keep == 0):
        raise LNSConfigError(
            "fsdp on CPU cannot save unsharded (it crashes inside torch): use distributed_strategy=ddp, or unset "
            "save_interval_unsharded and force_save_unsharded and keep sharded checkpoints "
            f"(save_num_checkpoints_to_keep={cfg.save_num_checkpoints_to_keep}: not 0)"
        )
    if strategy != "fsdp" or cfg.model.init_device != "meta":
        cfg.model.init_device = "cpu"
    for data in (cfg.data, *(evaluator.data for evaluator in cfg.evaluators)):
        data.pin_memory = False
    if cfg.precision != "fp32":
        logging.getLogger("olmo.lns.train").warning(
            "precision=%s on CPU: OLMo autocasts on CUDA only, activations stay in fp32", cfg.precision
        )


def _save_config(cfg: Any) -> None:
    from olmo.torch_util import barrier, get_global_rank

    barrier()  # every rank has looked into the folder before the first writes there
    if get_global_rank() == 0 and not cfg.dry_run:
        folder = Path(cfg.save_folder)
        if not (cfg.try_load_latest_save and (folder / "config.yaml").is_file()):
            folder.mkdir(parents=True, exist_ok=True)
            cfg.save(folder / "config.yaml")
    barrier()


def _launch(path: str, overrides: Sequence[str]) -> int:
    cfg = load_config(path, overrides)
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

        with _one_line_errors():
            result = run(cfg, device)
        rank = get_global_rank()
    if rank == 0:
        state = "done" if result.complete or cfg.dry_run else "stopped early; --try_load_latest_save continues"
        print(f"{cfg.run_name}: step {result.step}, {state}; checkpoints in {cfg.save_folder}")
    return 0 if result.complete or cfg.dry_run else 130


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns train``. Exit code 130 when a signal or a time limit ended the run early."""
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
    return _launch(args.config, args.overrides)
