"""Launches of ``python -m torchtitan.train``, unmodified, on a CPU, on a text and a tokenizer of the test's own.

The launches are forks of one interpreter that has imported what torchtitan imports (support/forked.py), but not torchtitan.
These imports take three quarters of the time of a launch.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support import forked

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parent.parent
HOOK = ROOT / "olmo_lns" / "integrations" / "olmo_lns_autoload.pth"
WORDS = [
    "the",
    "norm",
    "of",
    "block",
    "l",
    "is",
    "scaled",
    "by",
    "one",
    "over",
    "root",
    "l",
    "and",
    "depth",
    "has",
    "no",
    "curse",
]
#: Two sequences of 32 tokens. Releases after 0.3.0 count tokens of packed sequences.
IS_PACKED = importlib.util.find_spec("torchtitan.components.data") is not None
SEQUENCES = ("--training.seq_len", "32", "--training.local_batch_size", "2")
TOKENS = ("--training.max_context_length", "32", "--training.num_tokens_per_microbatch_per_dp_rank", "64")
#: Losses in fp32, so that two ways to multiply agree to the rounding of fp32.
OPTIONS = [
    *("--module", "llama3", "--config", "llama3_debugmodel", "--hf_assets_path", "tokenizer", "--debug.seed", "7"),
    *("--training.steps", "2", *(TOKENS if IS_PACKED else SEQUENCES)),
    *("--training.mixed_precision_param", "float32", "--metrics.disable_color_printing"),
]


#: What torchtitan imports, and support.forked does not. An optional module may be missing.
IMPORTS = """
import contextlib, importlib
for name in "triton tyro einops spmd_types torchdata.stateful_dataloader torch_checkpointing grain PIL.Image \\
        torch._inductor.compile_fx torch.utils.tensorboard torch.nn.attention.varlen torch.distributed.pipelining \\
        torch.distributed.tensor.experimental".split():
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
"""


@dataclass(frozen=True)
class Launch:
    """A launch that :func:`run` starts.

    :param name: name of its folder and of its log. :param options: more options of torchtitan.
    :param processes: how many processes. One process uses torchtitan's fake backend, several use gloo.
    :param installed: this package and its start-up hook are installed, as ``pip install -e`` does.
    :param hooks: llama3 is the reference by hooks on the stock model. This package is not installed.
    :param folder: the folder of checkpoints, if it is another launch's.
    """

    name: str
    options: tuple[str, ...] = ()
    processes: int = 1
    installed: bool = True
    hooks: bool = False
    folder: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """A finished launch. :param losses: of each step, as rank 0 or the last pipeline stage logs them."""

    name: str
    log: str
    losses: list[float]
    status: int

    def ok(self):
        assert self.status == 0, f"{self.name}\n{self.log[-4000:]}"
        return self


def run(path, *launches):
    """Run launches, all at once, in a folder that :func:`folder` has filled; return their results in order."""
    requests = [request for launch in launches for request in _requests(path, launch)]
    done = forked.run(
        "from support import torchtitan_ranks; torchtitan_ranks.main()",
        json.dumps(requests),
        path=SUPPORT.parent,
        cwd=path,
        first=IMPORTS,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    statuses = iter(json.loads(done.stdout.splitlines()[-1]))
    return [_result(path, launch, [next(statuses) for _ in range(launch.processes)]) for launch in launches]


def run_in_a_new_interpreter(path, launch):
    """Run a launch of one process in an interpreter of its own, by the command that a user types."""
    (request,) = _requests(path, launch)
    source = os.environ.get("TORCHTITAN_SRC", "")
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT / "torchtitan_site"), source]))}
    command = [sys.executable, "-m", "torchtitan.train", *request["options"]]
    with open(request["log"], "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **paths, **request["environment"]}
        status = subprocess.run(command, cwd=path, env=environment, stdout=log, stderr=log, timeout=900).returncode
    return _result(path, launch, [status])


def _requests(path, launch):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    fake = ["--comm.mode", "fake_backend"] if launch.processes == 1 else []
    common = {"NGPU": str(launch.processes), "WORLD_SIZE": str(launch.processes), **launch.environment}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    common |= {"TORCHTITAN_HOOKS": "1"} if launch.hooks else {}
    common |= {"TORCHTITAN_SITE": str(path / "site")} if launch.installed and not launch.hooks else {}
    losses = {"TORCHTITAN_LOSSES": str(path / f"{launch.name}.losses")}
    return [
        {
            "options": [*OPTIONS, "--dump_folder", str(path / (launch.folder or launch.name)), *fake, *launch.options],
            "environment": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            | (losses if rank == launch.processes - 1 else {}),
            "log": str(path / f"{launch.name}.{rank}.log"),
        }
        for rank in range(launch.processes)
    ]


def _result(path, launch, statuses):
    logs = [(path / f"{launch.name}.{rank}.log").read_text() for rank in range(launch.processes)]
    losses = path / f"{launch.name}.losses"
    found = [float(line) for line in losses.read_text().split()] if losses.exists() else []
    return Result(launch.name, "\n".join(logs), found, max(map(abs, statuses)))


def folder(path):
    """Fill ``path`` with a text and a tokenizer, where torchtitan's debug config looks for them."""
    data, tokenizer = path / "tests" / "assets" / "c4_test", path / "tokenizer"
    data.mkdir(parents=True)
    tokenizer.mkdir()
    texts = [" ".join(WORDS[(start * k) % len(WORDS)] for k in range(400)) for start in range(1, 60)]
    (data / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    special = [
        {"id": vocabulary[word], "content": word, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for word in ("<unk>", "<s>", "</s>")
    ]
    tokens = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None}
    tokens |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    tokens |= {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}}
    (tokenizer / "tokenizer.json").write_text(json.dumps(tokens))
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    site = path / "site"
    site.mkdir()
    (site / "olmo_lns_autoload.pth").write_text(HOOK.read_text())
    (site / "_olmo_lns.pth").write_text(str(ROOT))
    return path
