"""The Transformer Engine operators on a strict CPU stand-in: calls, dtypes and gradients, not the real kernels."""

import inspect
import json
import pickle
from pathlib import Path

import pytest
import torch
from support import norm_reference as reference
from support import olmo_models, tex

from olmo_lns import lns_factor
from olmo_lns.norm import layer_norm, rms_norm
from olmo_lns.norm import transformer_engine as te
from olmo_lns.norm.backend import choose_backend

EPS, SCALE = 1e-6, lns_factor(58)  # rounding 1/sqrt(l) itself to bf16 would cost most at l = 58
SIGNATURES = json.loads((Path(tex.__file__).parent / "te_signatures.json").read_text())["versions"]


@pytest.fixture(autouse=True)
def backend():
    with tex.installed():
        yield choose_backend("te")


@pytest.mark.parametrize("version", list(SIGNATURES))
@pytest.mark.parametrize("name", tex.NAMES)
def test_the_stand_in_has_the_signatures_of_the_releases(version, name):
    real = SIGNATURES[version][name]
    ours = inspect.signature(getattr(tex, name)).parameters
    assert list(ours) == real["parameters"]
    if not real["keywords"]:
        assert all(parameter.kind is inspect.Parameter.POSITIONAL_ONLY for parameter in ours.values())
    versions = sorted(tuple(int(part) for part in each.split(".")[:2]) for each in SIGNATURES)
    assert versions[0] == te.SUPPORTED[0].release and versions[-1] < te.SUPPORTED[1].release


#: (dtype of x, dtype of the parameters, affine, autocast, zero-centered). Every pair of two values occurs.
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    (FP32, FP32, "none", False, False),
    (FP32, BF16, "weight", False, False),
    (FP32, FP16, "weight+bias", True, True),
    (BF16, FP32, "weight", True, True),
    (BF16, BF16, "weight+bias", False, False),
    (BF16, FP16, "none", False, False),
    (FP16, FP32, "weight+bias", False, True),
    (FP16, BF16, "none", True, True),
    (FP16, FP16, "weight", True, False),
]


@pytest.mark.parametrize(("x_dtype", "p_dtype", "affine", "autocast", "zero_centered"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_values_and_gradients_agree_with_fp64(kind, x_dtype, p_dtype, autocast, affine, zero_centered, backend):
    inputs = reference.tensors((3, 7, 71), x_dtype, p_dtype, affine)
    how = dict(zero_centered=zero_centered, autocast=autocast)
    y, expected, errors = reference.compared(kind, inputs, EPS, SCALE, backend=backend, **how)
    assert tex.CALLS[0][0] == f"{kind}norm_fwd"
    plain, *_ = reference.compared(kind, inputs, EPS, SCALE, backend="torch", **how)
    assert y.dtype == plain.dtype and y.shape == inputs[0].shape
    coarsest = max(torch.finfo(y.dtype).eps, torch.finfo(x_dtype).eps)  # gamma's own rounding included
    assert reference.relative_error(y, expected) < max(0.75 * coarsest, 1e-6)
    assert all(error < max(coarsest, torch.finfo(tensor.dtype).eps, 1e-6) for tensor, error in errors)


def test_the_backward_uses_the_weight_of_the_forward(backend):
    """TE's own modules read the weight again; the operator keeps the gamma that it used."""
    x, weight, _ = reference.tensors((3, 7, 71), torch.float32, torch.float32, "weight")
    y = rms_norm(x, weight, EPS, SCALE, backend=backend)
    expected = torch.autograd.grad(reference.norm("rms", x, weight, None, EPS, SCALE).sum(), x)[0]
    with torch.no_grad():
        weight.add_(5.0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_inputs_that_are_not_contiguous_give_the_same_values(kind, backend):
    base = torch.randn(16, 4, 6)
    for x in (base.transpose(0, 2), torch.randn(1, 16).expand(5, 16), base[0, 0, 0].expand(3, 16)):
        y = reference.ours(kind, x, None, None, EPS, SCALE, backend=backend)
        torch.testing.assert_close(y, reference.ours(kind, x.contiguous(), None, None, EPS, SCALE, backend="torch"))
    x = torch.randn(4, 16, requires_grad=True)
    reference.ours(kind, x, None, None, EPS, SCALE, backend=backend).sum().backward()  # an expanded gradient comes in


def test_fp64_and_empty_inputs_never_reach_the_kernel(backend):
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, 1e-3, SCALE, backend=backend), (x,))
    for shape in ((0, 8), (3, 0, 8)):
        x, weight = torch.empty(shape, requires_grad=True), torch.ones(8, requires_grad=True)
        y = rms_norm(x, weight, EPS, SCALE, backend=backend) + layer_norm(x, weight, None, EPS, SCALE, backend=backend)
        y.sum().backward()
        assert y.shape == shape
    assert not tex.CALLS


def test_functorch_runs_the_formula_and_second_derivatives_are_refused(backend):
    x, weight, _ = reference.tensors((4, 8), torch.float32, torch.float32, "weight")
    norm = lambda x: rms_norm(x, weight, EPS, SCALE, backend=backend)  # noqa: E731
    exact = lambda x: reference.norm("rms", x, weight, None, EPS, SCALE)  # noqa: E731
    both = [torch.func.jvp(function, (x.detach(),), (torch.ones(4, 8),)) for function in (norm, exact)]
    for got, want in zip(*both, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"te_norm_backward.* no autograd formula"):
        gradient.sum().backward()


def run(model, autocast=False):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(olmo_models.tokens()).logits
    logits.float().square().mean().backward()
    return logits.detach(), *(p.grad.clone() for p in model.parameters())


@pytest.mark.parametrize(
    ("kind", "autocast"), [("lns_rms", False), ("lns_rms", True), ("lns_default", True), ("lns_low_precision", False)]
)
def test_an_olmo_model_on_te_equals_it_on_torch_and_runs_where_te_does_not(kind, autocast):
    model = olmo_models.build(layer_norm_type=kind)
    norms = [module for module in model.modules() if hasattr(module, "lns_backend")]
    assert len(norms) == 8 and {norm.lns_backend.name for norm in norms} == {"te"}
    tex.CALLS.clear()  # of the measurement
    found = run(model, autocast)
    names = [call[0] for call in tex.CALLS]
    name = "rmsnorm" if kind == "lns_rms" else "layernorm"
    assert names.count(f"{name}_fwd") == names.count(f"{name}_bwd") == 8
    te.DEVICE_TYPES.discard("cpu")  # as on a machine without a GPU
    twin = pickle.loads(pickle.dumps(model))
    for norm in norms:
        norm.lns_backend = choose_backend("torch")
    for other in (twin, model):
        for got, want in zip(run(other, autocast), found, strict=True):
            assert reference.relative_error(got, want) < (2e-2 if autocast else 1e-4)


@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2]
)
def test_the_operators_pass_opcheck(dtype, out):
    x, gamma, beta = (torch.randn(s).to(dtype).requires_grad_() for s in ((6, 16), (16,), (16,)))
    row = torch.rand(6)
    for shift, mean in ((None, row.new_empty(0)), (beta, row)):
        torch.library.opcheck(te._norm_op, (x, gamma, shift, EPS, out))
        torch.library.opcheck(te._norm_backward_op, (x.detach().to(out), x.detach(), mean, row, gamma.detach()))
