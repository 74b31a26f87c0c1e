"""Values, gradients, dtypes and shapes of the PyTorch backend, against a definition in fp64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import norm_reference as reference

from olmo_lns import lns_scale, norm
from olmo_lns.errors import LNSConfigError
from olmo_lns.norm import layer_norm, pytorch, rms_norm

EPS = 1e-6
SCALE = lns_scale(7)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Half units in the last place: one rounding of the result, plus what fp32 arithmetic may add to a 24-bit result.
ROUNDINGS = {torch.float64: 40.0, torch.float32: 24.0, torch.bfloat16: 1.01, torch.float16: 1.05}
GRADIENT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def tensors(x_dtype, p_dtype, *, affine="weight+bias", shape=(3, 5, 71), seed=0):
    torch.manual_seed(seed)
    x = (torch.randn(shape) * 3 + 0.5).to(x_dtype).requires_grad_()
    weight = (torch.rand(shape[-1]) + 0.5).to(p_dtype).requires_grad_() if "weight" in affine else None
    bias = torch.randn(shape[-1]).to(p_dtype).requires_grad_() if "bias" in affine else None
    return x, weight, bias


@pytest.fixture(
    params=[(10**6, 131_072), (0, 131_072), (0, 200), "cpp"], ids=["small", "one-block", "many-blocks", "compiled"]
)
def blocks(request, monkeypatch):
    """Every way that the size of an input picks, on inputs of one size; and the compiled norms."""
    if request.param == "cpp":
        request.getfixturevalue("compiled")
        monkeypatch.setattr(norm, "_chosen", {None: "cpp"})
        return
    monkeypatch.setattr(pytorch, "SMALL_ELEMENTS", request.param[0])
    monkeypatch.setattr(pytorch, "BLOCK_ELEMENTS", request.param[1])


@pytest.mark.parametrize("affine", ["none", "weight", "weight+bias"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("x_dtype", "p_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_rms_norm_equals_the_definition_rounded_once(x_dtype, p_dtype, zero_centered, affine, blocks):
    x, weight, bias = tensors(x_dtype, p_dtype, affine=affine)
    y = rms_norm(x, weight, EPS, SCALE, bias=bias, zero_centered=zero_centered)
    expected = reference.rms_norm(x, weight, EPS, SCALE, bias, zero_centered)
    wide = torch.float32 if x_dtype != torch.float64 else torch.float64
    if y.dtype == torch.float64 and wide == torch.float32:
        assert reference.relative_error(y, expected) < 1e-6  # statistics of an fp32 input are fp32
    elif affine == "weight+bias":  # the sum may cancel: no bound on each element's relative error
        assert reference.relative_error(y, expected) < torch.finfo(y.dtype).eps
    else:
        assert reference.worst_rounding(y, expected) <= ROUNDINGS[y.dtype]
    dy = torch.randn(x.shape, dtype=torch.float64).to(y.dtype)
    inputs = (x, weight, bias)
    for got, want, tensor in zip(
        reference.grads(y, inputs, dy),
        reference.grads(expected, inputs, dy),
        [t for t in inputs if t is not None],
        strict=True,
    ):
        coarsest = max(GRADIENT[tensor.dtype], 2e-6 if x_dtype != torch.float64 else 0.0)
        assert reference.relative_error(got, want) <= coarsest


@pytest.mark.parametrize("affine", ["none", "weight", "weight+bias"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "p_dtype"),
    [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_layer_norm_equals_the_definition(x_dtype, p_dtype, zero_centered, affine, blocks):
    x, weight, bias = tensors(x_dtype, p_dtype, affine=affine)
    y = layer_norm(x, weight, bias, EPS, SCALE, zero_centered=zero_centered)
    expected = reference.layer_norm(x, weight, bias, EPS, SCALE, zero_centered)
    assert y.dtype == x_dtype
    assert reference.relative_error(y, expected) < torch.finfo(x_dtype).eps
    dy = torch.randn(x.shape, dtype=torch.float64).to(y.dtype)
    inputs = (x, weight, bias)
    for got, want, tensor in zip(
        reference.grads(y, inputs, dy),
        reference.grads(expected, inputs, dy),
        [t for t in inputs if t is not None],
        strict=True,
    ):
        assert reference.relative_error(got, want) <= GRADIENT[tensor.dtype]


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_gradients_of_first_and_second_order(name, blocks):
    x, weight, bias = tensors(torch.float64, torch.float64, shape=(2, 3, 4))
    if name == "rms":
        function = lambda x, w, b: rms_norm(x, w, 1e-3, SCALE, bias=b, zero_centered=True)  # noqa: E731
    else:
        function = lambda x, w, b: layer_norm(x, w, b, 1e-3, SCALE, zero_centered=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight, bias))
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_with_a_graph_where_the_tensors_share_a_history(norm, dtype, blocks):
    """One weight in two norms, the second of what the first gave: the same gradients as without a graph, hooks run once."""
    x, weight, _ = tensors(dtype, dtype, affine="weight", shape=(6, 32))
    heard = []
    x.register_hook(lambda gradient: heard.append("x"))
    weight.register_hook(lambda gradient: heard.append("weight"))

    def twice(function, wide):
        inputs = (x.double(), weight.double()) if wide else (x, weight)
        return function(function(inputs[0], inputs[1]) * inputs[0], inputs[1]).sin().sum()

    definition = reference.rms_norm if norm == "rms" else lambda x, w, e, s: reference.layer_norm(x, w, None, e, s)
    expected = torch.autograd.grad(twice(lambda x, w: definition(x, w, EPS, SCALE), True), (x, weight))
    heard.clear()
    found = torch.autograd.grad(twice(lambda x, w: call(norm, x, w), False), (x, weight), create_graph=True)
    assert sorted(heard) == ["weight", "x"]
    for got, want in zip(found, expected, strict=True):
        assert got.requires_grad and reference.relative_error(got, want) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_only_the_gradients_asked_for_are_computed(blocks):
    x, weight, bias = tensors(torch.float32, torch.float32)
    y = rms_norm(x, weight.detach(), EPS, SCALE, bias=bias)
    y.sum().backward()
    assert weight.grad is None and x.grad is not None
    torch.testing.assert_close(bias.grad, torch.full_like(bias, SCALE * x.numel() / x.shape[-1]))
    frozen = rms_norm(x.detach(), weight, EPS, SCALE)
    frozen.sum().backward()
    assert weight.grad is not None


def test_the_factor_scales_value_and_gradients():
    """What a multiplication of the norm's output by the factor gives."""
    x, weight, _ = tensors(torch.float64, torch.float64)
    dy = torch.randn_like(x)
    plain, scaled = rms_norm(x, weight, EPS, 1.0), rms_norm(x, weight, EPS, 0.25)
    assert torch.equal(scaled, plain * 0.25)  # a power of two: exact
    for got, want in zip(
        torch.autograd.grad(scaled, (x, weight), dy), torch.autograd.grad(plain * 0.25, (x, weight), dy), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    rms=st.booleans(),
)
def test_any_shape(lead, width, dtype, rms):
    x = torch.randn(*lead, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.rand(width, dtype=torch.float64).to(dtype).requires_grad_()
    y = rms_norm(x, weight, 1e-3, SCALE) if rms else layer_norm(x, weight, None, 1e-3, SCALE)
    assert y.shape == x.shape and y.dtype == dtype
    y.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    expected = reference.rms_norm(x, weight, 1e-3, SCALE) if rms else reference.layer_norm(x, weight, None, 1e-3, SCALE)
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps * 4, atol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_inputs_that_are_not_contiguous(norm, blocks):
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    base = torch.randn(6, 5, 4, dtype=torch.float64)
    for view in (
        base.permute(2, 1, 0),
        base.permute(1, 2, 0),
        base.expand(6, 5, 4).permute(2, 1, 0)[::2],
        base[:, :1].permute(2, 1, 0).expand(4, 3, 6),
    ):
        x = view.detach().requires_grad_()
        y = rms_norm(x, weight, EPS, SCALE) if norm == "rms" else layer_norm(x, weight, None, EPS, SCALE)
        definition = reference.rms_norm if norm == "rms" else lambda x, w, e, s: reference.layer_norm(x, w, None, e, s)
        expected = definition(x, weight, EPS, SCALE)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        dy = torch.randn(y.shape[::-1], dtype=torch.float64).permute(2, 1, 0)  # not contiguous either
        for got, want in zip(
            torch.autograd.grad(y, (x, weight), dy), torch.autograd.grad(expected, (x, weight), dy), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8)])
def test_no_elements(shape, blocks):
    for function in (lambda x, w: rms_norm(x, w, EPS, SCALE), lambda x, w: layer_norm(x, w, None, EPS, SCALE)):
        x, weight = torch.empty(shape, requires_grad=True), torch.ones(8, requires_grad=True)
        function(x, weight).sum().backward()
        assert x.grad.shape == shape and torch.equal(weight.grad, torch.zeros(8))


def test_extreme_rows_stay_finite():
    x = torch.tensor([[0.0] * 8, [6e4] * 8, [1e-4] * 8], dtype=torch.float16, requires_grad=True)
    y = rms_norm(x, None, EPS, SCALE)
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    torch.testing.assert_close(y[1], torch.full((8,), SCALE, dtype=torch.float16))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "found"),
    [
        (torch.zeros(2, 8), torch.ones(1), None, r"weight has shape \(1,\), expected \(8,\)"),
        (torch.zeros(2, 8), torch.ones(2, 8), None, r"weight has shape \(2, 8\)"),
        (torch.zeros(2, 8), torch.ones(8), torch.zeros(4), r"bias has shape \(4,\)"),
        (torch.tensor(1.0), None, None, r"shape \(\.\.\., width\)"),
        (torch.zeros(2, 8, dtype=torch.int64), None, None, "floating-point"),
    ],
)
def test_shapes_that_broadcasting_would_hide_are_refused(x, weight, bias, found):
    with pytest.raises(LNSConfigError, match=found):
        rms_norm(x, weight, EPS, SCALE, bias=bias)
    with pytest.raises(LNSConfigError, match=found):
        layer_norm(x, weight, bias, EPS, SCALE)


def test_sixteen_bit_layer_norm_sums_parameter_gradients_in_fp32(blocks):
    """torch's own CPU kernel sums them in 16 bits and is 7 % off here."""
    x, weight, bias = tensors(torch.bfloat16, torch.float32, shape=(8192, 16))
    y = layer_norm(x, weight, bias, EPS, SCALE)
    dy = torch.randn_like(y)
    expected = reference.layer_norm(x, weight, bias, EPS, SCALE)
    for got, want in zip(
        reference.grads(y, (weight, bias), dy), reference.grads(expected, (weight, bias), dy), strict=True
    ):
        assert reference.relative_error(got, want) < 1e-5


@pytest.mark.parametrize(("norm", "numbers_a_row"), [("rms", 1), ("layer", 2)])
def test_the_backward_keeps_the_input_and_a_number_or_two_a_row(norm, numbers_a_row, monkeypatch):
    monkeypatch.setattr(pytorch, "SMALL_ELEMENTS", 0)
    x, weight, _ = tensors(torch.bfloat16, torch.float32, affine="weight", shape=(64, 256))
    assert kept(lambda: call(norm, x, weight), x, weight) == 64 * numbers_a_row * 4


def test_a_small_input_keeps_no_more_than_the_formula_needs():
    """The input in fp32 (a copy if it was 16-bit), the product that the weight's gradient needs, two numbers a row."""
    x, weight, _ = tensors(torch.float32, torch.float32, affine="weight", shape=(64, 256))
    assert kept(lambda: call("rms", x, weight), x, weight) <= 4 * x.numel() + 3 * 4 * 64
    low = x.detach().bfloat16().requires_grad_()
    assert kept(lambda: call("rms", low, weight), low, weight) <= 8 * x.numel() + 3 * 4 * 64


def call(norm, x, weight):
    return rms_norm(x, weight, EPS, SCALE) if norm == "rms" else layer_norm(x, weight, None, EPS, SCALE)


def kept(function, *own):
    """Bytes that autograd keeps besides the storages of ``own``."""
    found = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: found.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
    ):
        y = function()
    assert y.requires_grad
    return sum(size for where, size in found.items() if where not in {t.untyped_storage().data_ptr() for t in own})
