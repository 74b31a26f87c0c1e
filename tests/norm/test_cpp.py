"""The compiled norms: values, gradients, what they take and what they hand back."""

from __future__ import annotations

import pytest
import torch
from support import norm_reference as reference
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from olmo_lns.norm import cpp, pytorch, pytorch_layer

EPS, SCALE = 1e-5, 7**-0.5
#: Of fp32, and of bf16: one rounding of the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3}
NORMS = pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
pytestmark = pytest.mark.usefixtures("compiled")


def run(centered, x, weight=None, bias=None, zero_centered=False, module=cpp):
    if centered:
        return (module if module is cpp else pytorch_layer).layer_norm(
            x, weight, bias, EPS, SCALE, zero_centered=zero_centered
        )
    return module.rms_norm(x, weight, EPS, SCALE, bias=bias, zero_centered=zero_centered)


def exact(centered, x, weight=None, bias=None, zero_centered=False):
    if centered:
        return reference.layer_norm(x, weight, bias, EPS, SCALE, zero_centered)
    return reference.rms_norm(x, weight, EPS, SCALE, bias, zero_centered)


def tensors(rows, width, dtype=torch.float32):
    torch.manual_seed(rows + width)
    x = (torch.randn(rows, width) * 3 + 1).to(dtype).requires_grad_()
    return x, *((torch.rand(width) + 0.5).to(dtype).requires_grad_() for _ in range(2))


@pytest.fixture
def taken(monkeypatch):
    """What each call gave: whether the compiled function took it."""
    kernel, found = cpp.load(), []

    def watched(*args):
        y = kernel(*args)
        found.append(y is not None)
        return y

    monkeypatch.setattr(cpp, "_norm", watched)
    return found


@NORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 5, 15, 16, 17, 64, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_values_and_gradients(width, dtype, centered, threads, taken):
    """Rows in blocks of 256 and in parts for threads, widths around the 16 chains of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = tensors(700 if width < 1000 else 300, width, dtype)
        y, expected = run(centered, *inputs), exact(centered, *inputs)
        dy = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        found, wanted = reference.grads(y, inputs, dy), reference.grads(expected, inputs, dy)
    finally:
        torch.set_num_threads(before)
    assert taken == [True] and y.dtype == dtype
    for got, want in zip((y, *found), (expected, *wanted), strict=True):
        if width > 1 or not centered:  # one channel, centred: nothing but rounding is left of the input
            assert reference.relative_error(got, want) <= TOLERANCE[dtype]


@NORMS
def test_sums_over_many_rows_round_as_little(centered):
    x, weight, bias = tensors(100_000, 4)
    dy = torch.rand(x.shape)
    found = reference.grads(run(centered, x, weight, bias), (weight, bias), dy)
    for got, want in zip(found, reference.grads(exact(centered, x, weight, bias), (weight, bias), dy), strict=True):
        assert reference.relative_error(got, want) < 1e-6


@NORMS
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x bias", "weight bias"])
def test_only_the_gradients_asked_for(centered, wanted, taken):
    inputs = dict(zip(("x", "weight", "bias"), tensors(40, 24), strict=True))
    given = {name: t if name in wanted.split() else t.detach() for name, t in inputs.items()}
    run(centered, **given).square().sum().backward()
    got = {name for name, t in inputs.items() if t.grad is not None}
    assert got == set(wanted.split()) and taken == [True]
    expected = torch.autograd.grad(exact(centered, **inputs).square().sum(), [inputs[name] for name in sorted(got)])
    for name, want in zip(sorted(got), expected, strict=True):
        assert reference.relative_error(inputs[name].grad, want) < 1e-5


@NORMS
def test_bias_without_weight(centered, taken):
    x, _, bias = tensors(40, 24)
    y, expected = run(centered, x, None, bias), exact(centered, x, None, bias)
    for got, want in zip(
        (y, *torch.autograd.grad(y.sin().sum(), (x, bias))),
        (expected, *torch.autograd.grad(expected.sin().sum(), (x, bias))),
        strict=True,
    ):
        assert reference.relative_error(got, want) < 2e-6
    assert taken == [True]


@NORMS
def test_gradients_of_gradients(centered, taken):
    inputs = tensors(6, 8)
    second = []
    for function in (run, exact):
        first = torch.autograd.grad(
            function(centered, *inputs, zero_centered=True).sin().sum(), inputs, create_graph=True
        )
        second.append(torch.autograd.grad(sum(g.double().cos().sum() for g in first), inputs))
    assert taken == [True]
    for got, want in zip(*second, strict=True):
        assert reference.relative_error(got, want) < 1e-5


@NORMS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_and_infinity_stay(centered, dtype):
    x = torch.randn(4, 32).to(dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y = run(centered, x)
    assert torch.isfinite(y[[0, 3]]).all() and y[1].isnan().all() and y[2].isnan().any()


@NORMS
def test_a_recomputed_forward_is_bit_for_bit_the_first(centered):
    x, weight, bias = tensors(64, 48)
    direct = run(centered, x, weight, bias)
    with torch.no_grad():
        assert torch.equal(run(centered, x, weight, bias), direct)
    found = [
        torch.autograd.grad(y.square().sum(), (x, weight, bias))
        for y in (direct, checkpoint(lambda *t: run(centered, *t), x, weight, bias, use_reentrant=False))
    ]
    assert all(map(torch.equal, *found))


@NORMS
def test_a_weight_changed_before_the_backward_is_an_error(centered):
    x, weight, _ = tensors(8, 16)
    y = run(centered, x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A subclass with its own methods only."""


@NORMS
def test_what_is_not_for_it_is_handed_back(centered, taken):
    x, weight, _ = (t.detach() for t in tensors(8, 16))
    elsewhere = {
        "fp64": lambda: (x.double(), weight.double()),
        "fp16": lambda: (x.half(), weight.half()),
        "another dtype": lambda: (x.bfloat16(), weight),
        "no elements": lambda: (x[:0], weight),
        "a lazy negative": lambda: (torch.view_as_complex(torch.randn(8, 16, 2)).conj().imag, weight),
        "a strided weight": lambda: (x, torch.rand(32)[::2]),
    }
    for what, make in elsewhere.items():
        given = make()
        assert reference.relative_error(run(centered, *given), exact(centered, *given)) < 4e-3, what
    assert taken == [False] * len(elsewhere)
    assert type(run(centered, x.as_subclass(Own), weight)) is Own
    assert len(taken) == len(elsewhere)  # not even asked


@NORMS
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_modes_and_transforms_see_torchs_operations(centered, taken):
    x, weight, _ = (t.detach() for t in tensors(8, 16))
    want = exact(centered, x, weight).float()

    with Seen() as mode:
        torch.testing.assert_close(run(centered, x, weight), want, rtol=1e-5, atol=1e-5)
    assert mode.count > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run(centered, x, weight).dtype == torch.bfloat16
    mapped = torch.vmap(lambda row: run(centered, row, weight))(x)
    torch.testing.assert_close(mapped, want, rtol=1e-5, atol=1e-5)
    _, tangent = torch.func.jvp(lambda t: run(centered, t, weight), (x,), (torch.ones_like(x),))
    _, expected = torch.func.jvp(lambda t: run(centered, t, weight, module=pytorch), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, expected)
    with FakeTensorMode() as fake:
        assert run(centered, fake.from_tensor(x), fake.from_tensor(weight)).shape == x.shape
    traced = torch.jit.trace(lambda t: run(centered, t, weight), (x,), check_trace=False)
    torch.testing.assert_close(traced(2 * x), run(centered, 2 * x, weight), rtol=1e-5, atol=1e-5)
    assert not any(taken[:-1]) and taken[-1]


@NORMS
def test_a_gradient_that_is_expanded_or_lazily_negative(centered, taken):
    x, weight, _ = tensors(8, 16)
    negative = torch.view_as_complex(torch.randn(8, 16, 2)).conj().imag
    assert negative.is_neg()
    for dy in (torch.tensor(0.5).expand(8, 16), negative):
        found = reference.grads(run(centered, x, weight), (x, weight), dy)
        for got, want in zip(found, reference.grads(exact(centered, x, weight), (x, weight), dy), strict=True):
            assert reference.relative_error(got, want) < 1e-5
    assert taken == [True, True]


@NORMS
def test_gradients_that_are_not_plain(centered, taken):
    """Of zeros that are not stored, with a tangent, several at once, and under a dispatch mode."""
    x, weight, _ = tensors(8, 16)
    dy, tangent = torch.randn(8, 16), torch.randn(8, 16)
    y = run(centered, x, weight)
    want = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    def gradients(given, **options):
        return torch.autograd.grad(y, (x, weight), given, retain_graph=True, **options)

    assert all(not t.any() for t in gradients(torch._efficientzerotensor((8, 16))))
    with forward_ad.dual_level():
        dual = gradients(forward_ad.make_dual(dy, tangent))
        found = [forward_ad.unpack_dual(t) for t in dual]
    for got, first, second in zip(found, want, gradients(tangent), strict=True):
        torch.testing.assert_close(got.primal, first, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.tangent, second, rtol=1e-5, atol=1e-5)  # linear in the gradient
    for got, first in zip(gradients(torch.stack([dy, 2 * dy]), is_grads_batched=True), want, strict=True):
        assert not got.requires_grad
        torch.testing.assert_close(got, torch.stack([first, 2 * first]), rtol=1e-5, atol=1e-5)
    with Seen() as mode:
        for got, first in zip(gradients(dy), want, strict=True):
            torch.testing.assert_close(got, first, rtol=1e-5, atol=1e-5)
    assert mode.count > 0 and taken == [True]


@NORMS
def test_captured_by_a_transform(centered, taken):
    x, weight, _ = tensors(8, 16)
    found = torch.func.grad(lambda p: (run(centered, x, weight) @ p).sum())(torch.rand(16))
    torch.testing.assert_close(found, exact(centered, x, weight).float().sum(0), rtol=1e-5, atol=1e-4)
    assert taken == [False]


@pytest.mark.parametrize("value", [1.1, 30.3, 1234.567, -12345.678])
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_layer_norm_of_a_constant_row_is_zero(value, width, taken):
    x = torch.full((2, width), value, requires_grad=True)
    weight = torch.rand(width).requires_grad_()
    y = run(True, x, weight)
    assert not y.any() and not torch.autograd.grad(y.sum(), weight)[0].any() and taken == [True]
    close = (torch.randn(2, width) + 1e4).requires_grad_()
    assert reference.relative_error(run(True, close), exact(True, close)) < 5e-4  # half a unit of 1e4 in fp32


@NORMS
def test_a_parameter_of_another_class_is_handed_back(centered, taken):
    x, weight, bias = (t.detach() for t in tensors(8, 16))
    for inputs in ((x, weight.as_subclass(Own), bias), (x, weight, bias.as_subclass(Own))):
        assert type(run(centered, *inputs)) is Own
    assert taken == []


@NORMS
def test_saved_tensors_that_come_back_with_other_strides(centered, taken):
    inputs = tensors(8, 16)
    dy = torch.randn(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, -t], -1)[..., 0]):
        y = run(centered, *inputs)
    for got, want in zip(
        reference.grads(y, inputs, dy), reference.grads(exact(centered, *inputs), inputs, dy), strict=True
    ):
        assert reference.relative_error(got, want) < 1e-5


@NORMS
def test_it_keeps_two_numbers_a_row_and_four_of_its_own(centered):
    x, weight, _ = tensors(64, 256)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(centered, x, weight)
    assert [t.numel() for t in kept if t.numel() not in (x.numel(), weight.numel())] == [2 * 64 + 4]
