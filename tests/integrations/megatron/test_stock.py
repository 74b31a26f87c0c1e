"""Without a selected scheme, each wrapped function of Megatron does what it does without this package.

A program runs every function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, output, log, opened files and the random state are the same.
"""

import shutil
import sys
from pathlib import Path

import pytest
from support import forked, launch, megatron_launch, observing

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).with_name("programs")


#: Where the two programs find what they wrap.
CORE_MODULES, TRAINING_MODULES = r"megatron\.core\.", r"megatron\.(training|post_training)\."


def run(program, folder, tree, **variables):
    """Run ``program``: of Megatron Core in a fork, of a checkout's training in an interpreter of its own."""
    folder.mkdir(exist_ok=True)
    # As a text, since Megatron's writer starts processes that would run a script again.
    code = f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import {program}"
    environment = megatron_launch.environment(RANK="0", WORLD_SIZE="1", **variables)
    if tree is None:
        start = f"import runpy\nrunpy.run_path({str(megatron_launch.SITE / 'sitecustomize.py')!r})\n"
        done = forked.run(start + code, folder, path=megatron_launch.TESTS, cwd=folder, **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return
    environment["PYTHONPATH"] = f"{tree}:{environment['PYTHONPATH']}"
    launch.run([sys.executable, "-c", code, folder], cwd=folder, env=environment).ok()


def compare(program, tmp_path, tree=None, *, elsewhere):
    """Run ``program`` with and without this package on copies of the same checkpoints; compare what was observed."""
    installed, stock = tmp_path / "installed", tmp_path / "stock"
    run(program, stock, tree, MEGATRON_NO_HOOK="1", ONLY_SAVE="1")
    shutil.copytree(stock, installed)
    run(program, installed, tree)
    run(program, stock, tree, MEGATRON_NO_HOOK="1")
    observing.compare(installed, stock, elsewhere=elsewhere)


def test_constructors_and_the_loader_of_megatron_core(tmp_path):
    compare("stock_core", tmp_path, elsewhere=TRAINING_MODULES)


def test_arguments_models_and_checkpoints_of_megatron_training(tmp_path):
    """Checkpoints: sharded, legacy, DCP, NeMo's, without arguments, none, damaged, of a broken tracker."""
    compare("stock_training", tmp_path, megatron_launch.checkout(), elsewhere=CORE_MODULES)
