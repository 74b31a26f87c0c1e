"""Launch a checkout's unmodified pretrain_gpt.py on the CPU (see megatron_site)."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from support import launch

TESTS = Path(__file__).parents[1]
#: What a launch imports when its interpreter starts.
SITE = Path(__file__).with_name("megatron_site")
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


def environment(**changes):
    paths = [SITE, TESTS, TESTS.parent]  # this tree, not an installed one
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    return launch.environment(
        PYTHONDONTWRITEBYTECODE=None,
        PYTHONPYCACHEPREFIX=os.path.join(tempfile.gettempdir(), "olmo-lns-pycache"),
        MEGATRON_ON_CPU="1",
        TORCHDYNAMO_DISABLE="1",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
        PYTHONWARNINGS="ignore",
        PYTHONPATH=path,
        # Some versions run make at every start; it would name the helpers after another Python.
        PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        MAKEFLAGS="e",
        LIBEXT=str(sysconfig.get_config_var("EXT_SUFFIX")),
        **changes,
    )


def build_helpers(tree):
    """Megatron's data helpers, as Megatron builds them itself."""
    for name in ("pybind11", "psutil"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"pretrain_gpt.py needs {name}, which is not installed")
    command = ["make", "-s", "-C", str(tree / "megatron" / "core" / "datasets")]
    subprocess.run(command, env=environment(), check=True, capture_output=True)


def pretrain(tree, *flags, script="pretrain_gpt.py", ranks=1, **variables):
    """pretrain_gpt.py, or another script, or ``-m olmo_lns`` and one, with the flags of MODEL; one pipeline stage a rank."""
    words = [*script.split(), *MODEL.split(), "--pipeline-model-parallel-size", ranks, *flags]
    return launch.torchrun(ranks, *words, cwd=tree, env=environment(**variables))
