"""LNS without the plugin in OLMo-core: its own group overrides carry the rates (docs/without-a-plugin.md)."""

import pytest

pytest.importorskip("olmo_core.nn", reason="needs ai2-olmo-core 2.5 to 3.0 (make test-olmo-core)")

from olmo_core.optim import AdamWConfig, OptimGroupOverride
from support import olmo_core_models as small

from olmo_lns.gains import block_gains, scale_

RATE, DECAY, EPS = 3e-3, 0.1, 1e-8
NORMS = ("attention_norm", "feed_forward_norm")


def overrides():
    """One group for each block: rate s·η, decay λ/s, ε/s. OLMo-core decays its gains unless told otherwise."""
    return [
        OptimGroupOverride(
            params=[f"blocks.{number - 1}.{norm}.weight" for norm in NORMS],
            opts={"lr": RATE * number**-0.5, "weight_decay": DECAY * number**0.5, "eps": EPS * number**0.5},
        )
        for number in range(1, small.LAYERS + 1)
    ]


def losses(model, optimizer):
    found = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = small.loss_of(model(small.TOKENS))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_stock_blocks_with_group_overrides_train_as_lns_does():
    config = small.config()
    lns, stock = small.model(small.with_scheme(config), seed=None), small.model(config, seed=None)
    scale_(stock, block_gains(stock, *(f"blocks.{{}}.{norm}.weight" for norm in NORMS)))
    plain = AdamWConfig(lr=RATE, weight_decay=DECAY, eps=EPS)
    scaled = AdamWConfig(lr=RATE, weight_decay=DECAY, eps=EPS, group_overrides=overrides())
    first, second = losses(lns, plain.build(lns)), losses(stock, scaled.build(stock))
    assert max(abs(one - other) for one, other in zip(first, second, strict=True)) < 2e-4
    assert first[-1] < first[0] - 1
    assert {group["initial_lr"] for group in scaled.build(stock).param_groups} > {RATE, RATE / 2}
