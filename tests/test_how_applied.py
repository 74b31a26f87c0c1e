"""A norm of known arithmetic whose gain cannot be multiplied says why its output is multiplied instead."""

import logging

import pytest
import torch
from torch import nn

from olmo_lns.measured import Measured
from olmo_lns.norm import DtypeRule, NormArithmetic
from olmo_lns.scaled import restore_class, scale

ARITHMETIC = NormArithmetic(dtypes=DtypeRule.INPUT)
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Renamed(nn.Module):
    """RMSNorm whose eps has another name than the arithmetic expects."""

    def __init__(self):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return torch.rms_norm(x, (8,), self.weight, self.epsilon)


class Centered(Renamed):
    """RMSNorm that adds 1 to its gain, which the arithmetic does not say."""

    eps = 1e-6

    def forward(self, x):
        return torch.rms_norm(x, (8,), 1 + self.weight, self.epsilon)


class Decorated(nn.RMSNorm):
    forward = torch.enable_grad()(nn.RMSNorm.forward)


def replaced():
    norm = nn.RMSNorm(8)
    norm.forward = lambda x: nn.functional.rms_norm(x, (8,), norm.weight, norm.eps)
    return norm


@pytest.mark.parametrize(
    ("make", "reason", "logged"),
    [
        (
            Renamed,
            "the norm could not be computed with a multiplied gain",
            "AttributeError: 'Renamed' object has no attribute 'eps'",
        ),
        (Centered, "the multiplied gain gave another result", "times the framework's own, expected 0.5 times"),
        (replaced, "the forward is replaced on the norm", ""),
        (lambda: Decorated(8), "the forward of the norm is wrapped", ""),
        (lambda: nn.RMSNorm(8), "", ""),
    ],
)
def test_the_reason_is_in_the_start_up_line_and_its_details_in_the_log(make, reason, logged, caplog):
    norm = make()
    norm.lns_of_another_module = True
    attributes = set(vars(norm))
    expected = 0.5 * norm(X)
    with caplog.at_level(logging.INFO, logger="olmo_lns"):
        assert scale(norm, 0.5, where="block 4", width=8, arithmetic=ARITHMETIC) == {
            Measured.OUTPUT,
            Measured.GRADIENT,
        }
    assert norm.lns_how_applied == (f"outputs multiplied ({reason})" if reason else "")
    assert logged in caplog.text and ("block 4" in caplog.text) == bool(logged)
    torch.testing.assert_close(norm(X), expected)
    restore_class(norm, type(norm).__dict__["lns_bases"][1])
    assert set(vars(norm)) == attributes
