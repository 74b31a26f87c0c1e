"""Launch a checkout's unmodified pretrain_gpt.py on the CPU (see megatron_site)."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: A model of 4 layers on mock data, six iterations, the local spec, everything that a CPU can run.
MODEL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 3e-3 --min-lr 3e-4
    --lr-decay-style cosine --lr-warmup-iters 1 --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4223 --make-vocab-size-divisible-by 64
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --log-interval 1 --eval-iters 0 --eval-interval 1000 --split 100,0,0 --attention-backend unfused
"""


def checkout():
    """The tree that MEGATRON_LM_SRC names; the test is skipped where the variable is not set."""
    if not (named := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    return Path(named).resolve()


def model_flags():
    """The flags of MODEL, as words."""
    return MODEL.split()


def environment():
    paths = [str(TESTS / "support" / "megatron_site"), str(TESTS), str(TESTS.parent)]  # this tree, not an installed one
    paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "olmo-lns-pycache"),
        "MEGATRON_ON_CPU": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(paths),
        # Some versions run make at every start; it would name the helpers after another Python.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "MAKEFLAGS": "e",
        "LIBEXT": str(sysconfig.get_config_var("EXT_SUFFIX")),
    }


def build_helpers(tree):
    """Megatron's data helpers, as Megatron builds them itself."""
    for name in ("pybind11", "psutil"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pretrain_gpt.py needs {name}, which is not installed")
    command = ["make", "-s", "-C", str(tree / "megatron" / "core" / "datasets")]
    subprocess.run(command, env=environment(), check=True, capture_output=True)


def pretrain(tree, *flags, script="pretrain_gpt.py", ranks=1):
    """pretrain_gpt.py, or another script, or ``-m olmo_lns`` and one, with the flags of MODEL; one pipeline stage a rank."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         *script.split(), *model_flags(), "--pipeline-model-parallel-size", str(ranks), *flags],
        cwd=tree, env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def losses(done):
    return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
