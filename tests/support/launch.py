"""Launch programs as a user does: in processes of their own, with fresh environments; for OLMo with tiny configs."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from support import olmo_models

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = REPOSITORY / "tests" / "upstream" / "olmo" / "programs"
#: Environment variable that names an OLMo checkout; without it only the pip package is used.
OLMO_SRC = "OLMO_SRC"

#: A model and data that train 30 steps on a CPU in seconds. Each test names its norm type.
TINY = {
    "run_name": "tiny",
    "seed": 6198,
    "dry_run": False,
    "model": {
        **olmo_models.TINY,
        "alibi": False,
        "vocab_size": 256,
        "embedding_size": 256,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "max_sequence_length": 32,
    },
    "optimizer": {"name": "adamw", "learning_rate": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": 3, "alpha_f": 0.1},
    "data": {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None},
    "max_duration": 4,
    "stop_at": 4,
    "global_train_batch_size": 4,
    "device_train_microbatch_size": 2,
    "precision": "fp32",
    "distributed_strategy": "ddp",
    "ddp": {"grad_sync_mode": "batch", "find_unused_params": False},
    "max_grad_norm": 1.0,
    "eval_interval": 10000,
    "console_log_interval": 1,
    "save_interval": None,
    "save_overwrite": True,
    "gen1_gc_interval": 100,
}


def write_config(folder, **changes):
    """Write ``config.yaml`` and its data into ``folder``; dotted names change nested keys (``**{"model.x": 1}``)."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    values = json.loads(json.dumps(TINY))
    # The data must hold more than noise: with nothing to learn, every run has the same loss.
    ids = (np.arange(8192) % 17 * 3 + np.random.default_rng(0).integers(0, 2, 8192)).astype(np.uint16)
    ids.tofile(folder / "data.npy")
    values["data"]["paths"] = [str(folder / "data.npy")]
    values["save_folder"] = str(folder / "run")
    for name, value in changes.items():
        *parents, key = name.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@dataclass(frozen=True)
class Result:
    """The end of a launch. ``text`` is stdout and stderr together."""

    code: int
    text: str

    def losses(self):
        """The losses in the log of OLMo, OLMo-core or Megatron, as printed, in order."""
        named = r"(?:train/CrossEntropyLoss=|train/CE loss=|lm loss: )([0-9.]+(?:E[+-][0-9]+)?)"
        return [float(value) for value in re.findall(named, self.text)]

    def last_line(self):
        return self.text.strip().splitlines()[-1] if self.text.strip() else ""

    def ok(self):
        assert self.code == 0, self.text[-4000:]
        return self


def environment(**changes):
    """The tests' environment without our own variables; None removes a name."""
    values = {k: v for k, v in os.environ.items() if not k.startswith(("OLMO_LNS_", "PYTHONPATH"))}
    values.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", WANDB_MODE="disabled", HF_HUB_OFFLINE="1")
    # A wide console: OLMo's rich handler wraps log lines, and a wrapped number cannot be read back.
    values.update(COLUMNS="400", PYTHONUNBUFFERED="1")
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def run(command, *, cwd, env=None):
    """Run ``command`` in ``cwd`` (never the repository: it would put ``olmo_lns`` on the path)."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment() if env is None else env,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    return Result(done.returncode, done.stdout)


def fork_command(words, printed):
    """Start ``olmo-lns`` with ``words`` in a fork of this process, which has imported OLMo; return the fork.

    What the command starts are new interpreters. :param printed: the file of its output.
    """

    def command():
        from olmo_lns.cli import main

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
        with open(printed, "w") as sys.stdout, sys.stdout as sys.stderr:
            sys.exit(main(words))

    process = multiprocessing.get_context("fork").Process(target=command)
    process.start()
    return process


def torchrun(ranks, *command, **kwargs):
    """``torchrun --standalone`` on this machine; ``command`` starts with a script or ``-m module``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([sys.executable, *launcher, *command], **kwargs)
