"""Without a selected scheme, each wrapped function of OLMo does what it does without this package.

A program runs every function on inputs of every kind, in a process with the start-up hook and in one without it. Results,
errors, warnings, log, opened files and the random state are the same. There are two exceptions: a checkpoint's config.yaml
is read before its weights are, since only it tells whether they were trained under a scheme; and OLMo's error for an
unknown type lists the types of this package as well.
"""

from pathlib import Path

import pytest
from support import observing

from olmo_lns.integrations.olmo.norm_types import INIT_FNS
from olmo_lns.schemes import names


@pytest.mark.slow
def test_every_wrapped_function_is_stock(tmp_path):
    program = Path(__file__).with_name("programs") / "stock.py"
    types = "|".join(filter(lambda name: name != "preln", [*names(), *INIT_FNS]))
    added = rf", (?:{types})(?:_rms|_default|_low_precision)?\b"
    observing.run_both(program, tmp_path, also_opened=r"^open .*/config\.yaml$", added=added)
