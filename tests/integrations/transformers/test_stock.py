"""Without a selected scheme, transformers and the programs on it do what they do without this package.

A program runs every wrapped function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, log, opened files and the random state are the same. There is one exception: the config.json beside
weights is read before they are loaded with another config or resumed, since only it tells whether they have a scheme.
"""

from pathlib import Path

import pytest
from support import observing

for needed in ("transformers", "accelerate"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'olmo-lns[hf]'")

PROGRAMS = Path(__file__).with_name("programs")
#: The config beside weights, which is read by design.
CONFIG = r"^open .*/config\.json$"


@pytest.mark.slow
def test_every_wrapped_function_is_stock(tmp_path):
    observing.run_both(PROGRAMS / "stock.py", tmp_path, also_opened=CONFIG)


@pytest.mark.slow
@pytest.mark.trl
@pytest.mark.parametrize("name", ["peft", "trl", "liger_kernel", "deepspeed"])
def test_programs_that_this_package_wraps_as_well_are_stock(name, tmp_path):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'olmo-lns[sft]' liger-kernel deepspeed")
    observing.run_both(PROGRAMS / f"stock_{name.removesuffix('_kernel')}.py", tmp_path, also_opened=CONFIG)
