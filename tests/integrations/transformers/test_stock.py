"""Where no scheme is selected, each wrapped function of transformers does what it does without this package.

A program runs every function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, log, opened files and the random state are the same. There is one exception: the config.json beside
weights is read before they are loaded with another config or resumed, since only it tells whether they have a scheme.
"""

from pathlib import Path

import pytest
from support import observing

for needed in ("transformers", "accelerate"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'olmo-lns[hf]'")


@pytest.mark.slow
def test_every_wrapped_function_is_stock(tmp_path):
    program = Path(__file__).with_name("programs") / "stock.py"
    observing.run_both(program, tmp_path, also_opened=r"^open .*/config\.json$")
