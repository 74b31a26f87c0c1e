"""The command lines of the guide for Llama 3 8B build their models on the meta device, and its tests exist."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan 0.3 (make test-torchtitan)")

import torch
from torchtitan.config import ConfigManager
from torchtitan.config.override import apply_overrides

GUIDE = Path(__file__).parents[3] / "docs" / "torchtitan.md"
COMMAND = re.compile(r"CONFIG=llama3_8b \./run_train\.sh((?:.*\\\n)*.*)")
#: Norms with a factor, and the standard deviation of the last block's output projections.
EXPECTED = {
    "olmo_lns.torchtitan.lns": (64, 0.02),
    "olmo_lns.torchtitan.plain_initialization": (0, 0.02),
    "": (0, 0.0025),
}


def commands():
    found = [
        shlex.split(arguments.replace("\\\n", " "), comments=True) for arguments in COMMAND.findall(GUIDE.read_text())
    ]
    assert len(found) == 3, "LNS and both baselines"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arguments", commands(), ids=lambda arguments: arguments[-1].rpartition(".")[2])
def test_a_command_of_the_guide_builds_its_model(arguments, monkeypatch):
    import torchtitan.tools.utils as utils

    monkeypatch.setattr(utils, "has_cuda_capability", lambda *_: True)  # its attention needs a Hopper
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_8b", *arguments])
    name = next((a for a in arguments if a.startswith("olmo_lns.")), "")
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    norms, std = EXPECTED[name]
    assert sum(hasattr(module, "lns_scale") for module in model.modules()) == norms
    assert model.layers["31"].attention.wo._param_init["weight"].keywords["std"] == pytest.approx(std)


def test_each_test_that_the_guide_names_exists():
    """By a part of its function's name, of its parameter, or of its file's name, as pytest's ``-k`` selects them."""
    tables = re.findall(r"^\|.*\|$", GUIDE.read_text().partition("## Supported models")[2], flags=re.M)
    guide = {name for row in tables for name in re.findall(r"`(\w+)`", row.rpartition(" | ")[2])}
    files = list(Path(__file__).parent.glob("test_*.py"))
    found = [re.findall(r'def (test_\w+)|^    "(.+)": \(', file.read_text(), flags=re.M) for file in files]
    tests = [file.stem for file in files] + [name for names in found for pair in names for name in pair]
    assert "inductor" in guide and not [name for name in guide if not any(name in test for test in tests)]
