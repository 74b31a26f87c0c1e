"""``plain_initialization`` takes real configs of OLMo and Megatron, and refuses settings that contradict it."""

import copy
from dataclasses import replace

import pytest
import torch
from support import megatron_tiny, olmo_models

import olmo_lns
from olmo_lns.errors import LNSConfigError

#: init_fn -> its factor on the residual outputs of block l of L.
DEPTH = {"mitchell": lambda l, L: (2 * l) ** -0.5, "full_megatron": lambda l, L: (2 * L) ** -0.5, "normal": lambda l, L: 1}  # noqa: E741  # fmt: skip


@pytest.mark.parametrize("kind", ["rms", "lns_rms"])
@pytest.mark.parametrize("init_fn", DEPTH)
def test_olmo_draws_residual_outputs_without_a_depth_factor(init_fn, kind):
    """The weights are stock OLMo's with the same seed; only the depth factor is divided out."""
    pytest.importorskip("olmo")
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    config = olmo_models.model_config(layer_norm_type=kind, init_fn=init_fn)
    assert olmo_lns.plain_initialization(config) is config and type(config) is ModelConfig
    torch.manual_seed(0)
    model = OLMo(copy.deepcopy(config))
    stock = olmo_models.build(perturb=False, layer_norm_type="rms", init_fn=init_fn).state_dict()
    for name, weight in model.state_dict().items():
        of_depth = DEPTH[init_fn](int(name.split(".")[2]) + 1, 4) if name.endswith(("attn_out.weight", "ff_out.weight")) and ".blocks." in name else 1  # fmt: skip
        torch.testing.assert_close(weight, stock[name] / of_depth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ["alone", "before apply", "after apply", "a copy"])
def test_megatron_draws_residual_outputs_at_the_plain_std(order):
    pytest.importorskip("megatron.core")
    from support.megatron_cpu import single_process

    from olmo_lns.integrations.megatron import apply

    config = megatron_tiny.config(hidden_size=64, ffn_hidden_size=256)
    if order == "after apply":
        apply(config)
    assert olmo_lns.plain_initialization(config) is config
    if order == "before apply":
        apply(config)
    if order == "a copy":
        config = replace(config)
    with single_process():
        layers = megatron_tiny.build(config).decoder.layers
    for layer in layers:
        for weight in (layer.self_attention.linear_proj.weight, layer.mlp.linear_fc2.weight):
            assert weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_settings_of_olmo_that_contradict_it_are_refused(monkeypatch):
    pytest.importorskip("olmo")
    for config, said in (
        (olmo_models.model_config(init_fn="normal_scaled"), "init_fn normal_scaled"),
        (olmo_models.build().config, "a model was built from this ModelConfig"),
        ({}, "found a dict"),
    ):
        with pytest.raises(LNSConfigError, match=said):
            olmo_lns.plain_initialization(config)
    monkeypatch.setenv("OLMO_LNS_INITIALIZATION", "upstream")
    with pytest.raises(LNSConfigError, match=r"INITIALIZATION=upstream and plain_initialization\(config\) contradict"):
        olmo_lns.plain_initialization(olmo_models.model_config())


def test_settings_of_megatron_that_contradict_it_are_refused():
    pytest.importorskip("megatron.core")
    from olmo_lns.integrations.megatron import apply

    first, then = megatron_tiny.config(), megatron_tiny.config()
    apply(first, keep_scaled_init=True)
    olmo_lns.plain_initialization(then)
    for action in (lambda: olmo_lns.plain_initialization(first), lambda: apply(then, keep_scaled_init=True)):
        with pytest.raises(LNSConfigError, match="contradict"):
            action()
