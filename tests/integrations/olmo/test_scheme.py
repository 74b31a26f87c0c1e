"""What is attached to a model is counted and read back; what cannot be built is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from olmo.exceptions import OLMoConfigurationError
from olmo.model import OLMo, OLMoSequentialBlock, RMSLayerNorm
from support.olmo_models import build, model_config

from olmo_lns import schemes
from olmo_lns.errors import LNSConfigError, UpstreamChangedError
from olmo_lns.integrations import norm_sites
from olmo_lns.integrations.norm_sites import Site
from olmo_lns.integrations.olmo import block, register
from olmo_lns.integrations.olmo.model import blocks_of, record_of
from olmo_lns.record import Record
from olmo_lns.schemes import LNS, PRE_LN, Definition, Plan, parse, registry

register()

GATE = schemes.Learned(per_channel=False, start=0.5)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(post=True), "expected one norm in a sub-layer, or one in front and one on the branch"),
        (Plan(pre=False), "expected one norm in a sub-layer"),
        (Plan(pre=False, post=True, alpha=2.0, gate=GATE), "expected factors of the shortcut or of the branch"),
        (Plan(pre=False, post=True, norm_scale=0.5), "a factor for a norm that is not there"),
        (Plan(groups=4, norm_scale=0.5), "grouped statistics in a plain Pre-LN block only"),
        (Plan(groups=5), "5 groups do not divide model.d_model=32"),
    ],
)
def test_a_scheme_that_this_integration_cannot_build_is_refused(monkeypatch, plan, message):
    monkeypatch.setattr(registry, "_table", dict(registry._table))
    schemes.define(Definition("other", "Other", "Other", lambda *_: plan, "a test"))
    with pytest.raises(OLMoConfigurationError, match=f"layer_norm_type=other_rms, block 1, attn: .*{message}"):
        OLMo(model_config(layer_norm_type="other_rms"))


def test_lnsvalue_says_both_factors_and_refuses_clipped_values(caplog):
    with caplog.at_level("INFO", logger="olmo_lns"):
        model = build(layer_norm_type="lnsvalue_rms")
    (line,) = [r.getMessage() for r in caplog.records if " on: " in r.getMessage()]
    assert "s = 1 (block 1) to 0.5 (block 4), ff only; branch_scale = 1 (block 1) to 0.5 (block 4), attn only" in line
    assert record_of(model) == Record(parse("lnsvalue"), "rms", "plain")
    with pytest.raises(
        OLMoConfigurationError, match="layer_norm_type=lnsvalue_rms with clip_qkv=8: .* Set clip_qkv: null"
    ):
        build(layer_norm_type="lnsvalue_rms", clip_qkv=8.0)


def test_a_norm_gets_one_scheme_and_is_one_of_olmos():
    norm = RMSLayerNorm(model_config())
    block.attach_norm(norm, Site(LNS, 2, 4, "ff"))
    before = dict(norm.__dict__)
    with pytest.raises(LNSConfigError, match=r"LNSRMSLayerNorm of block 2 has scheme lns already: a block gets its"):
        block.attach_norm(norm, Site(LNS, 3, 4, "ff"))
    assert norm.__dict__ == before and norm.lns_scale == 2**-0.5
    module = torch.nn.LayerNorm(8)
    with pytest.raises(TypeError, match="cannot scale a LayerNorm; expected OLMo's RMSLayerNorm or LayerNorm"):
        block.attach_norm(module, Site(LNS, 1, 4, "ff"))
    assert list(norm_sites.sites(module)) == []


def test_sites_in_order_and_scheme_read_back():
    quarter = parse("lns:exponent=0.25")
    model = build(layer_norm_type="lns_rms:exponent=0.25", block_group_size=2)
    found = [(name.split(".", 1)[1], s.layer_number, s.sub_layer, s.n_layers) for name, _, s in norm_sites.sites(model)]
    assert found[:3] == [
        ("block_groups.0.0.attn_norm", 1, "attn", 4),
        ("block_groups.0.0.ff_norm", 1, "ff", 4),
        ("block_groups.0.1.attn_norm", 2, "attn", 4),
    ]
    assert len(found) == 8 and norm_sites.read_back(model) == norm_sites.read_back(copy.deepcopy(model)) == quarter
    norm_sites.check(model, quarter, 4)
    assert norm_sites.read_back(build(layer_norm_type="rms")) == PRE_LN
    for asked in (LNS, PRE_LN, parse("lns:exponent=0")):
        with pytest.raises(UpstreamChangedError, match="was asked for .*, but lns:exponent=0.25 is on 8 sub-layers"):
            norm_sites.check(model, asked, 4)


def test_a_part_of_the_blocks_is_counted_as_a_part():
    blocks = torch.nn.ModuleList(blocks_of(build(layer_norm_type="lns_rms"))[2:])
    norm_sites.check(blocks, LNS, 4, layer_numbers=[3, 4])
    with pytest.raises(UpstreamChangedError, match="is on 4 sub-layers .*expected the 8 sub-layers of 4 blocks"):
        norm_sites.check(blocks, LNS, 4)


def test_two_schemes_in_one_model_are_found():
    both = torch.nn.ModuleList([build(layer_norm_type=kind) for kind in ("lns_rms", "lns_rms:exponent=0.25")])
    with pytest.raises(UpstreamChangedError, match="one model with the schemes lns, lns:exponent=0.25: expected one"):
        norm_sites.read_back(both)


def test_a_wrapper_that_answers_for_its_module_is_not_counted():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.inner = module

        def __getattr__(self, name):  # as FSDP's and torch.compile's
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    block = blocks_of(build(layer_norm_type="lns_rms"))[0]
    block.ff_norm = Wrapper(block.ff_norm)
    assert block.ff_norm.lns_scale == 1.0
    assert [s.sub_layer for _, _, s in norm_sites.sites(block)] == ["attn", "ff"]


def test_a_model_none_of_whose_norms_has_a_site_is_refused(monkeypatch):
    """It would train as Pre-LN under the name of LNS."""
    monkeypatch.setattr(OLMoSequentialBlock, "__init__", OLMoSequentialBlock.__init__.__wrapped__)
    with pytest.raises(
        UpstreamChangedError, match=r"LayerNorm Scaling was asked for .lns., but preln is on 0 sub-layers"
    ):
        OLMo(model_config(layer_norm_type="lns_rms"))


def test_the_start_up_line_of_other_forms(monkeypatch):
    line = norm_sites.start_up_line(LNS, 16, norm="RMSNorm", here="here blocks 5-8", how="te", initialization="plain")
    assert line == (
        "LayerNorm Scaling on: 32 norms (RMSNorm), here blocks 5-8; s = 1 (block 1) to 0.25 (block 16); exponent 0.5; "
        "te; plain"
    )
    monkeypatch.setattr(registry, "_table", dict(registry._table))

    def plan(layer_number, n_layers, sub_layer):
        return Plan(pre=layer_number > 2, post=layer_number <= 2, alpha=2.0, gate=schemes.Learned(True, 0.1))

    schemes.define(Definition("form", "Form", "Form", plan, "a test"))
    assert norm_sites.factors_in_words(parse("form"), 4) == [
        "alpha = 2 (block 1) to 2 (block 4)",
        "learned gate from 0.1 to 0.1",
        "norm after the addition in blocks 1 to 2",
    ]
