"""Tests with Transformer Engine's own Python. They run in a process that imports it before Megatron."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_cases_pass_in_a_process_of_their_own():
    """PYTHONOPTIMIZE switches off TE's assertion that there is a GPU."""
    variables = {"PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-rs", str(Path(__file__).with_name("te_cases.py"))],
        cwd=Path(__file__).parents[3], env=os.environ | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if " passed" not in done.stdout and "SKIPPED" in done.stdout:
        pytest.skip(done.stdout.partition("SKIPPED")[2].splitlines()[0])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
