"""Every figure that ``scripts/golden.py`` measures again equals the committed one; the tolerance is for other CPUs."""

import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version
from support import forked

GOLDEN = Path(__file__).with_name("golden.npz")
SCRIPT = Path(__file__).parents[2] / "scripts" / "golden.py"


def compare(*options):
    """Compare the figures in a process of their own, and return what it printed and the number of committed figures."""
    with np.load(GOLDEN) as file:
        made_with, count = json.loads(file["versions"].tobytes()), len(file["statistics"])
    for name, version in made_with.items():
        pytest.importorskip({"ai2-olmo": "olmo", "megatron-core": "megatron.core"}.get(name, name))
        found = Version(importlib.metadata.version(name)).public
        if found != Version(version).public:
            pytest.skip(f"the golden figures were made with {name} {version}, here is {found}")
    ours = {key: None for key in os.environ if key.startswith("OLMO_LNS_")}
    code = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = forked.run(code, "compare", GOLDEN, *options, **ours)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return done.stdout, count


@pytest.mark.slow
def test_the_figures_of_every_two_settings_equal_their_committed_values():
    """Any two values of two settings of OLMo meet in a fifth of the cases. Exports and Megatron are complete."""
    text, count = compare("--pairs")
    compared = int(re.search(r"\n0 of (\d+) figures differ", text)[1])
    assert count / 6 < compared < count / 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_figure_equals_its_committed_value():
    text, count = compare()
    assert f"\n0 of {count} figures differ" in text
