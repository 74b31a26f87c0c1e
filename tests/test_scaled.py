"""A norm of unknown arithmetic has its output multiplied. Models: tests/integrations/test_any_model.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from olmo_lns.errors import MeasurementError
from olmo_lns.scaled import Scaled, ScaledOutput, scale

D = 32


def test_a_norm_without_what_its_mixin_reads_has_its_output_multiplied():
    norm, misread = nn.RMSNorm(D), {"forward": lambda self, x: x * self.variance_epsilon}
    scale(norm, 0.5, where="a", width=D, mixin=type("Misread", (Scaled,), misread))
    assert isinstance(norm, ScaledOutput)
    with pytest.raises(MeasurementError, match="rows of 16"):
        scale(nn.RMSNorm(D), 0.5, where="a", width=16)


class Stale(nn.Module):
    """Reads eps elsewhere than its old attribute says."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.variance_epsilon = nn.Parameter(torch.ones(D)), 1e-6, 1e-5

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight, self.eps)


class Clamped(Stale):
    def forward(self, x):
        return F.rms_norm(x.clamp(-1000, 1000), (D,), self.weight, self.variance_epsilon)


class MayAdd(Stale):
    def forward(self, x, residual=None):
        return F.rms_norm(x if residual is None else x + residual, (D,), self.weight, self.variance_epsilon)


class Asked(Scaled):
    """The arithmetic that is known for a norm of this name."""

    def forward(self, x):
        return F.rms_norm(x, (D,), self.weight * self.lns_scale_in_forward, self.variance_epsilon)


@pytest.mark.parametrize("kind", [Stale, Clamped, MayAdd])
def test_a_norm_that_computes_otherwise_than_is_known_has_its_output_multiplied(kind):
    norm, stock = kind(), kind()
    scale(norm, 0.5, where="a", width=D, mixin=Asked)
    assert isinstance(norm, ScaledOutput)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1.0], [1.0], [3e4]])
    torch.testing.assert_close(norm(x), 0.5 * stock(x))


class Promoting(Scaled):
    """Its arithmetic is right and its output is always fp32."""

    def forward(self, x):
        return (self.lns_scale_in_forward * super().forward(x.to(self.weight.dtype))).float()


def test_a_mixin_with_another_output_dtype_is_not_used():
    norm = nn.LayerNorm(D, dtype=torch.bfloat16)
    scale(norm, 0.5, where="a", width=D, mixin=Promoting)
    assert isinstance(norm, ScaledOutput) and norm(torch.ones(2, D, dtype=torch.bfloat16)).dtype is torch.bfloat16


class Forgetful(Scaled):
    """It has a factor and runs the stock forward without it."""

    lns_calls_forward = True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_missing_factor_shows_although_it_is_within_the_tolerance_of_1(dtype):
    factor = 0.994 if dtype is torch.bfloat16 else 0.99995
    norm = nn.LayerNorm(D, dtype=dtype)
    scale(norm, factor, where="a", width=D, mixin=Forgetful)
    assert isinstance(norm, ScaledOutput)


def test_a_norm_whose_output_is_always_zero_takes_a_factor():
    """LayerNorm of one channel subtracts its only number."""
    scale(norm := nn.LayerNorm(1, elementwise_affine=False), 0.5, where="a", width=1)
    assert isinstance(norm, ScaledOutput)
