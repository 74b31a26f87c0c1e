"""Without a selected scheme, each wrapped function of OLMo-core does what it does without this package.

A program runs every function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, log, opened files and the random state are the same. There is one exception: a checkpoint's config.json
is read before its weights are, since only it tells whether they were trained under a scheme.
"""

from pathlib import Path

import pytest
from support import observing

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")


@pytest.mark.slow
def test_every_wrapped_function_is_stock(tmp_path):
    program = Path(__file__).with_name("programs") / "stock.py"
    observing.run_both(program, tmp_path, also_opened=r"^open .*/config\.json$")
