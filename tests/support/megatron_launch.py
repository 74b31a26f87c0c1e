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
#: The script that holds the flags of the matrix's model.
SCRIPT = TESTS.parent / "scripts" / "upstream_megatron_matrix.sh"


def checkout():
    """The tree that MEGATRON_LM_SRC names; the test is skipped where the variable is not set."""
    if not (named := os.environ.get("MEGATRON_LM_SRC")):
        pytest.skip("MEGATRON_LM_SRC names no Megatron-LM checkout")
    return Path(named).resolve()


def model_flags():
    """The model's flags, read from the script of the matrix."""
    found = re.search(r'^model="(.*?)"', SCRIPT.read_text(), re.S | re.M)
    assert found is not None
    return found[1].split()


def environment():
    paths = [str(TESTS / "support" / "megatron_site"), str(TESTS), str(TESTS.parent)]  # this tree, not an installed one
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "olmo-lns-pycache"),
        "MEGATRON_ON_CPU": "1",
        "MEGATRON_PROBE": "1",
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


def pretrain(tree, *flags, script="pretrain_gpt.py"):
    """One rank of pretrain_gpt.py, or of another script, or of ``-m olmo_lns`` and one; with the matrix's model."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
         *script.split(), *model_flags(), *flags],
        cwd=tree, env=environment(), capture_output=True, text=True, timeout=900,
    )  # fmt: skip


def losses(done):
    return [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
