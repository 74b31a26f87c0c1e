"""The code of CONTRIBUTING.md runs: it adds a toy scheme, a toy arm and a toy integration that work."""

import logging
import re
import sys

import pytest
import torch
from support.studies import REPOSITORY, Built

from olmo_lns import sites
from olmo_lns.integrations import norm_sites, patching
from olmo_lns.schemes import LNS, Scheme, registry, table
from olmo_lns.study import arms, cli


def code(section):
    """The Python of a section of CONTRIBUTING.md."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(.*?)```", text.partition(f"## {section}\n")[2].partition("\n## ")[0], re.DOTALL)
    return found


@pytest.fixture
def arm(monkeypatch):
    """Add the toy scheme and the toy arm for one test."""
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    exec(code("Add a scheme"), dict(vars(table)))
    exec(code("Add an arm"), dict(vars(arms)))
    yield arms.ARMS["toy_arm"]
    del arms.ARMS["toy_arm"]


@pytest.fixture
def study(arm, tmp_path, monkeypatch):
    pytest.importorskip("olmo", reason="needs ai2-olmo")
    monkeypatch.setenv("OLMO_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("OLMO_SAVE_DIR", str(tmp_path / "out"))
    (tmp_path / "train.npy").write_bytes(bytes(range(256)) * 64)
    settings = {"model.n_layers": 3, "model.d_model": 48, "max_duration": 20, "scheduler.t_warmup": 2}
    config = str(REPOSITORY / "configs" / "study" / "tiny-base.yaml")
    arms_and_sizes = {"sizes": {"a": settings}, "arms": ["preln", arm.name], "seeds": [1], "final_fraction": 0.1}
    built = Built(tmp_path / "study.yaml", tmp_path / "out", {"name": "growth", "config": config, **arms_and_sizes})
    built.save()
    return built


def test_the_toy_arm_is_planned_and_reported(study, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert cli.main(["plan", str(study.path)]) == 0
    assert "All 2 runs (Pre-LN, Toy + scaled init)" in capsys.readouterr().out
    for run in study.study.runs:
        study.finish(run.name, 2.0)
    for command in ("collect", "report"):
        assert cli.main([command, str(study.path), "--out", str(study.out)]) == 0
    assert "Toy + scaled init" in (study.out / "report" / "report.md").read_text()


def test_the_toy_scheme_is_in_the_start_up_line_and_read_back(study, caplog):
    from olmo.model import OLMo

    run = next(run for run in study.study.runs if run.arm == "toy_arm")
    with caplog.at_level(logging.INFO, logger="olmo_lns"):
        model = OLMo(run.loaded.model)
    (line,) = [record.getMessage() for record in caplog.records if " on: " in record.getMessage()]
    assert line.startswith("Toy norms on: 6 norms (toy_rms:base=3.0); alpha = 3 (block 1) to 27 (block 3); ")
    assert "norm after the addition in blocks 1 to 3; base 3; " in line and "initialization on, scaled" in line
    assert sites.read_back(model) == Scheme.of("toy", base=3)


TOYFRAME = """
import torch


class Norm(torch.nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


class Block(torch.nn.Module):
    def __init__(self, layer_number, n_layers):
        super().__init__()
        self.attn_norm, self.ff_norm = Norm(), Norm()

    def forward(self, x):
        return x + self.ff_norm(self.attn_norm(x))
"""


def test_the_toy_integration_scales_its_norms(tmp_path, monkeypatch):
    (tmp_path / "toyframe.py").write_text(TOYFRAME)
    monkeypatch.syspath_prepend(tmp_path)
    import toyframe

    found = patching.fingerprint(toyframe.Block.__init__)
    integration = {
        "Target": patching.Target,
        "Site": norm_sites.Site,
        "LNS": LNS,
        "toyframe": toyframe,
        "patching": patching,
    }
    integration |= {"norm_sites": norm_sites, "ScaledOutput": norm_sites.ScaledOutput, "give": norm_sites.give}
    exec(code("Add an integration").replace("FINGERPRINT", found), integration)
    plain = torch.nn.Sequential(*(toyframe.Block(number, 3) for number in (1, 2, 3)))
    integration["register"]()
    model = torch.nn.Sequential(*(toyframe.Block(number, 3) for number in (1, 2, 3)))
    monkeypatch.delitem(sys.modules, "toyframe")
    norm_sites.check(model, LNS, 3)
    line = norm_sites.start_up_line(norm_sites.read_back(model), 3, how="toyframe", initialization="plain")
    assert line.startswith("LayerNorm Scaling on: 6 norms; s = 1 (block 1) to 0.5774 (block 3)")
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(model[0](x), plain[0](x))
    branch = plain[1](x) - x  # it has only norms: the second decides its scale
    assert torch.allclose(model[1](x), x + branch / 2**0.5, rtol=1e-12)
