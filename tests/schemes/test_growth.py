"""The code of CONTRIBUTING.md runs: it adds a toy scheme and a toy integration that work."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch

from olmo_lns import sites, start_up_line
from olmo_lns.hook import on_import, wrap
from olmo_lns.scaled import scale
from olmo_lns.schemes import LNS, Scheme, registry, table
from olmo_lns.sites import Site

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def code(section):
    """The Python of a section of CONTRIBUTING.md."""
    text = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(r"```python\n(.*?)```", text.partition(f"## {section}")[2].partition("\n## ")[0], re.DOTALL)
    return found


def test_the_toy_scheme_is_built_and_said(monkeypatch, caplog):
    pytest.importorskip("olmo.model", reason="needs ai2-olmo")
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    monkeypatch.setattr(registry, "_table", dict(registry._table))
    exec(code("Add a scheme"), dict(vars(table)))
    sizes = dict(n_layers=3, d_model=48, n_heads=2, vocab_size=64, embedding_size=128, include_bias=False)
    with caplog.at_level(logging.INFO, logger="olmo_lns"):
        model = OLMo(ModelConfig(layer_norm_type="toy_rms:base=3.0", **sizes))
    (line,) = [record.getMessage() for record in caplog.records if " on: " in record.getMessage()]
    assert line.startswith("Toy norms on: 6 norms") and "alpha = 3 (block 1) to 27 (block 3)" in line
    assert sites.read_back(model) == Scheme.of("toy", base=3)


TOYFRAME = """
import torch


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn_norm, self.ff_norm = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)

    def forward(self, x):
        x = x + self.attn_norm(x)
        return x + self.ff_norm(x)


class Model(torch.nn.Module):
    def __init__(self, n_layers, width):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(n_layers))
"""


def test_the_toy_integration_scales_its_norms(tmp_path, monkeypatch, caplog):
    (tmp_path / "toyframe.py").write_text(TOYFRAME)
    monkeypatch.syspath_prepend(tmp_path)
    names = {
        "sites": sites,
        "scale": scale,
        "start_up_line": start_up_line,
        "Site": Site,
        "LNS": LNS,
        "on_import": on_import,
        "wrap": wrap,
    }
    names["log"] = logging.getLogger("olmo_lns")
    exec(code("Add an integration"), names)
    names["register"]()
    import toyframe

    with caplog.at_level(logging.INFO, logger="olmo_lns"):
        model = toyframe.Model(3, 8)
    monkeypatch.delitem(sys.modules, "toyframe")
    assert "LayerNorm Scaling on: 6 norms; s = 1 (block 1) to 0.5774 (block 3)" in caplog.text
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    norm = lambda x: x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()  # noqa: E731
    y = x.double() + norm(x.double()) / 2**0.5
    torch.testing.assert_close(model.blocks[1](x).double(), y + norm(y) / 2**0.5, rtol=1e-5, atol=1e-6)
