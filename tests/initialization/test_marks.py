"""The marks that the search leaves on modules, after a refusal."""

import pytest
import torch
from support.drawn_models import nanogpt, wang, wide
from support.other_models import IDS, WIDTH
from torch import nn

import olmo_lns
from olmo_lns.errors import LNSConfigError, LNSError


def test_a_refusal_leaves_no_marks():
    model = wide(wang)
    with pytest.raises(LNSConfigError):
        olmo_lns.plain_initialization(model)
    assert not any({"lns_matrices", "lns_norm"} & vars(module).keys() for module in model.modules())


def test_a_refusal_leaves_the_marks_of_another_tower_alone():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = wide(nanogpt), wide(nanogpt)

    def marks():
        return [
            sorted({"lns_matrices", "lns_norm", "lns_sub_layers", "lns_scale"} & vars(m).keys())
            for m in model.modules()
        ]

    model = Towers()
    olmo_lns.apply(model, example=lambda model: model.one(IDS))
    before = marks()
    with torch.no_grad():
        model.two.layers["3"].n1.weight.mul_(torch.linspace(1, 2, WIDTH))
    for call in (olmo_lns.plain_initialization, olmo_lns.apply):
        with pytest.raises(LNSError, match="not at their start"):
            call(model, example=lambda model: model.two(IDS))
        assert marks() == before
