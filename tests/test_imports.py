"""Every module of the package can be the first that a process imports, with the plugin active as in a launch."""

import subprocess
import sys

import pytest
from test_layout import SOURCES

#: Forks a process for each module; slow imports that trigger no hook of ours are done once, before.
PROGRAM = """
import contextlib, importlib, os, sys
for name in ("datasets", "numpy", "omegaconf", "torch._dynamo", "torch.distributed.fsdp", "torchmetrics", "wandb", "yaml"):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
from olmo_lns.hook import install
install()
failed = False
for name in sys.argv[1:]:
    if pid := os.fork():
        failed |= os.waitpid(pid, 0)[1] != 0
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # a framework that is not installed here
        if (error.name or "olmo_lns").split(".")[0] == "olmo_lns":
            print(f"{name}: {error!r}")
            os._exit(1)
    except BaseException as error:
        print(f"{name}: {error!r}", flush=True)
        os._exit(1)
    os._exit(0)
sys.exit(failed)
"""
MODULES = [f"olmo_lns.{name}".removesuffix(".__init__") for name in SOURCES if not name.endswith("__main__")]


def first_imports(*modules):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *modules], capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_can_be_the_first_and_a_failing_import_is_seen():
    missing = "olmo_lns.no_such_module"
    assert first_imports(*MODULES, missing) == f"{missing}: ModuleNotFoundError(\"No module named '{missing}'\")\n"
