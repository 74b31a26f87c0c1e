"""Launches of ``python -m torchtitan.train``, unmodified, on a CPU, on a text and a tokenizer of the test's own."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


@dataclass
class Result:
    """A finished launch. :param losses: of each step, as rank 0 or the last pipeline stage logs them."""

    log: str
    losses: list[float]
    status: int


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


class Launch:
    """A started launch; several run at once.

    :param installed: this package and its start-up hook are installed, as ``pip install -e`` does.
    :param hooks: the reference by hooks.
    """

    def __init__(self, path, name, *options, processes=1, installed=True, hooks=False, environment=None):
        self.losses = path / f"{name}.losses"
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        paths = [str(SUPPORT / "torchtitan_site")]
        paths += [source] if (source := os.environ.get("TORCHTITAN_SRC")) else []
        fake = ["--comm.mode", "fake_backend"] if processes == 1 else []
        options = [*OPTIONS, "--dump_folder", str(path / name), *fake, *options]
        common = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "NGPU": str(processes)}
        common |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        common |= {"TORCHTITAN_SITE": str(path / "site")} if installed else {}
        common |= {"TORCHTITAN_HOOKS": "1"} if hooks else {}
        common |= environment or {}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "torchtitan.train", *options],
                cwd=path,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                | ({"TORCHTITAN_LOSSES": str(self.losses)} if rank == processes - 1 else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(processes)
        ]

    def result(self, timeout=600):
        """Wait for the processes and return the log of all ranks."""
        try:
            logs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        losses = [float(line) for line in self.losses.read_text().split()] if self.losses.exists() else []
        return Result("\n".join(logs), losses, max(abs(process.returncode) for process in self.processes))
