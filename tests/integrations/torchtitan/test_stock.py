"""Without a selected scheme, each wrapped function of torchtitan does what it does without this package.

A program runs every function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, log, opened files and the random state are the same. There is one exception: a checkpoint's index is read
before its weights are, since only it tells whether they were trained under a scheme.
"""

from pathlib import Path

import pytest
from support import observing

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

#: Besides the index: torchtitan's structured logs, named by the time, and Hugging Face's cache, named by the folder.
OPENED = r"/\.metadata$|/structured_logs/|/datasets/.*c4_test"


@pytest.mark.slow
def test_every_wrapped_function_is_stock(tmp_path):
    program = Path(__file__).with_name("programs") / "stock.py"
    observing.run_both(program, tmp_path, also_opened=OPENED)
