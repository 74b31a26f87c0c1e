"""The PyTorch backend has the values, gradients and shapes of a definition in fp64, and the dtypes of OLMo's norms."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("olmo", reason="needs ai2-olmo")

from olmo.config import ModelConfig
from olmo.model import RMSLayerNorm
from support import norm_reference as reference

from olmo_lns import lns_factor
from olmo_lns.errors import LNSConfigError
from olmo_lns.integrations.transformers.norms import arithmetic_of
from olmo_lns.norm import NormArithmetic, rms_norm
from olmo_lns.scaled import ScaledGainNorm, scale

EPS = 1e-6
SCALE = lns_factor(7)
FP64, FP32, BF16, FP16 = DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: In half units of the last place: one rounding of the result, plus what fp32 arithmetic may add to 24 bits.
ROUNDINGS = {FP64: 40.0, FP32: 24.0, BF16: 1.01, FP16: 1.05}
GRADIENT = {FP64: 1e-14, FP32: 2e-6, BF16: 2.5e-3, FP16: 4e-4}
#: (dtype of x, dtype of the parameters, which parameters, zero-centered): every pair of two values occurs.
CASES = [
    *((FP64, FP64, "weight+bias", True), (FP64, FP32, "weight", False), (FP64, FP16, "none", True)),
    *((FP64, BF16, "weight", True), (FP32, FP32, "none", False), (FP32, FP64, "weight", False)),
    *((FP32, BF16, "weight+bias", True), (FP32, FP16, "weight", True), (BF16, BF16, "weight", True)),
    *((BF16, FP32, "weight+bias", False), (BF16, FP16, "weight+bias", False), (BF16, FP64, "none", True)),
    *((FP16, FP16, "weight+bias", False), (FP16, FP32, "weight", True), (FP16, BF16, "none", False)),
    (FP16, FP64, "weight", False),
]
NORMS = pytest.mark.parametrize("norm", ["rms", "layer"])


def call(norm, x, weight, bias=None, zero_centered=False, *, eps=EPS):
    return reference.ours(norm, x, weight, bias, eps, SCALE, zero_centered=zero_centered)


def exact(norm, x, weight, bias=None, zero_centered=False, *, eps=EPS):
    return reference.norm(norm, x, weight, bias, eps, SCALE, zero_centered)


@NORMS
@pytest.mark.parametrize(("x_dtype", "p_dtype", "affine", "zero_centered"), CASES, ids=str)
def test_values_are_the_definition_rounded_once(norm, x_dtype, p_dtype, affine, zero_centered):
    inputs = reference.tensors((3, 5, 71), x_dtype, p_dtype, affine)
    y, expected, errors = reference.compared(norm, inputs, EPS, SCALE, zero_centered=zero_centered)
    assert norm == "rms" or y.dtype == x_dtype
    if y.dtype == FP64 != x_dtype:
        assert reference.relative_error(y, expected) < 1e-6  # statistics of an fp32 input are fp32
    elif norm == "layer" or affine == "weight+bias":  # the sum may cancel: no bound on each element's relative error
        assert reference.relative_error(y, expected) < torch.finfo(y.dtype).eps
    else:
        assert reference.worst_rounding(y, expected) <= ROUNDINGS[y.dtype]
    for tensor, error in errors:
        assert error <= max(GRADIENT[tensor.dtype], 2e-6 if x_dtype != FP64 else 0.0)


@NORMS
def test_first_and_second_derivatives_pass_gradcheck(norm):
    inputs = reference.tensors((2, 3, 4), FP64, FP64)
    function = lambda x, w, b: call(norm, x, w, b, True, eps=1e-3)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@NORMS
@pytest.mark.parametrize("shape", [(1,), (7, 1), (0, 8), (2, 0, 3, 8), (5, 40), (2, 3, 4, 33)], ids=str)
def test_any_shape_gives_the_definition(shape, norm):
    """eps is 1, so that rows of two nearly equal numbers do not magnify their rounding."""
    x, weight, _ = reference.tensors(shape, BF16, BF16, "weight")
    y = call(norm, x, weight, eps=1.0)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape and weight.grad.shape == weight.shape
    torch.testing.assert_close(y.double(), exact(norm, x, weight, eps=1.0), rtol=0.04, atol=0.04)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "found"),
    [
        (torch.zeros(2, 8), torch.ones(1), None, r"weight of a norm has shape \(1,\), .* of shape \(8,\)"),
        (torch.zeros(2, 8), torch.ones(8), torch.zeros(4), r"bias of a norm has shape \(4,\)"),
        (torch.tensor(1.0), None, None, r"the shape \(\.\.\., width\)"),
        (torch.zeros(2, 8, dtype=torch.int64), None, None, "Expected a floating dtype"),
    ],
)
@NORMS
def test_shapes_that_broadcasting_would_hide_are_refused(norm, x, weight, bias, found):
    with pytest.raises(LNSConfigError, match=found):
        call(norm, x, weight, bias)


def test_sixteen_bit_layer_norm_sums_parameter_gradients_in_fp32():
    """torch's own CPU kernel sums them in 16 bits and is 7 % off here."""
    x, weight, bias = reference.tensors((8192, 16), BF16, FP32)
    y, expected = call("layer", x, weight, bias), exact("layer", x, weight, bias)
    found, wanted = (reference.grads(value, (weight, bias), torch.ones_like(y)) for value in (y, expected))
    assert all(reference.relative_error(*pair) < 1e-5 for pair in zip(found, wanted, strict=True))


# The comparison with OLMo's own norms, with and without autocast

WIDTH = 96


def stock_rms(p_dtype, *, affine=True, bias=False):
    sizes = dict(d_model=WIDTH, layer_norm_eps=EPS, init_device="cpu")
    norm = RMSLayerNorm(ModelConfig(layer_norm_with_affine=affine, include_bias=bias, **sizes)).to(p_dtype)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


@pytest.mark.parametrize(("x_dtype", "p_dtype"), list(itertools.product(DTYPES[1:], repeat=2)), ids=str)
def test_the_dtype_is_that_of_olmos_norm_and_the_error_is_no_larger(x_dtype, p_dtype):
    for affine, bias in ((False, False), (True, False), (True, True)):
        stock = stock_rms(p_dtype, affine=affine, bias=bias)
        x = torch.randn(4, 33, WIDTH).to(x_dtype)
        theirs, ours = stock(x) * SCALE, rms_norm(x, stock.weight, EPS, SCALE, bias=stock.bias)
        assert ours.dtype == theirs.dtype
        wanted = exact("rms", x, stock.weight, stock.bias)
        assert reference.relative_error(ours, wanted) <= 1.05 * reference.relative_error(theirs, wanted) + 1e-7


@pytest.mark.parametrize("x_dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["OLMo", "Llama", "torch"])
def test_under_autocast_a_scaled_norm_has_the_dtype_and_values_of_the_stock_one(kind, x_dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    stock = {"OLMo": stock_rms(FP32), "Llama": llama.LlamaRMSNorm(WIDTH), "torch": torch.nn.LayerNorm(WIDTH)}[kind]
    scaled, x = copy.deepcopy(stock), torch.randn(4, 33, WIDTH).to(x_dtype)
    arithmetic = NormArithmetic() if kind == "OLMo" else arithmetic_of(scaled)
    scale(scaled, SCALE, where="", width=WIDTH, arithmetic=arithmetic)
    assert isinstance(scaled, ScaledGainNorm)
    with torch.autocast("cpu", dtype=BF16):
        theirs, ours = stock(x), scaled(x)
    assert ours.dtype == theirs.dtype and reference.relative_error(ours, theirs * SCALE) < torch.finfo(x_dtype).eps


def test_statistics_are_fp32_and_extreme_rows_stay_finite():
    with torch.autocast("cpu", dtype=FP16):  # the sum of squares would overflow fp16
        torch.testing.assert_close(rms_norm(torch.full((2, 4096), 300.0), None, EPS, 1.0), torch.ones(2, 4096))
    x = torch.tensor([[0.0] * 8, [6e4] * 8, [1e-4] * 8], dtype=FP16, requires_grad=True)
    y = rms_norm(x, None, EPS, SCALE)
    assert torch.isfinite(y).all() and torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()
