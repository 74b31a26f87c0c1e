"""The choice of backend: which one is chosen, why, and what is refused."""

import copy
import pickle
import re
import types

import pytest
import torch
from support import tex

from olmo_lns.environment import NORM_BACKEND
from olmo_lns.errors import BackendUnavailableError, LNSConfigError
from olmo_lns.norm import Backend, backend, choose_backend, layer_norm, rms_norm
from olmo_lns.norm import transformer_engine as te


@pytest.fixture(autouse=True)
def no_decision(monkeypatch):
    """Remove the setting, and the decision of another test."""
    monkeypatch.delenv(NORM_BACKEND, raising=False)
    backend._decide.cache_clear()
    yield
    backend._decide.cache_clear()


@pytest.fixture
def cuda(monkeypatch):
    """Make torch 2.13 see a GPU; a test may set its compute capability."""
    machine = types.SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    return machine


def test_te_is_chosen_where_it_works_and_else_torchs_fused_kernel(cuda, monkeypatch):
    with tex.installed("2.20.2"):
        assert choose_backend().name == "te" and "2.20.2" in choose_backend().reason
        monkeypatch.setenv(NORM_BACKEND, "torch")
        assert choose_backend().name == "torch-fused" and NORM_BACKEND in choose_backend().reason
        assert choose_backend("te").name == "te"  # an argument wins
        monkeypatch.delenv(NORM_BACKEND)
    chosen = choose_backend()
    assert chosen.name == "torch-fused" and "No module named 'transformer_engine'" in chosen.reason
    with pytest.raises(BackendUnavailableError, match="No module named 'transformer_engine'"):
        choose_backend("te")
    with pytest.raises(LNSConfigError, match=r"'tee' \(did you mean 'te'\?\)"):
        choose_backend("tee")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend._decide.cache_clear()
    assert choose_backend() == Backend("torch", "no CUDA device is visible")


@pytest.mark.parametrize(("version", "hip"), [("2.8.0", None), ("2.13.0", "6.2")])
def test_a_torch_without_the_fused_kernel_gives_the_backend_torch(version, hip, cuda, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert choose_backend().name == "torch" and version in choose_backend().reason


@pytest.mark.parametrize(
    ("version", "capability", "runs"),
    [
        *((version, (9, 0), True) for version in ("2.1.0", "2.20.2+cu13", "2.99.0")),
        *((version, (9, 0), False) for version in ("2.0", "3.0", "unknown")),
        *(("2.20.2", capability, runs) for capability, runs in (((8, 0), True), ((12, 0), True), ((7, 5), False))),
    ],
)
def test_te_runs_in_supported_versions_from_ampere_on(version, capability, runs, cuda):
    cuda.capability = capability
    with tex.installed(version):
        assert (choose_backend().name == "te") is runs
        if not runs:
            with pytest.raises(BackendUnavailableError, match="7.5" if capability == (7, 5) else re.escape(version)):
                choose_backend("te")


def test_a_broken_te_is_reported_with_its_own_error(cuda, monkeypatch):
    real = te.importlib.import_module

    def import_module(name):
        if name == "transformer_engine.pytorch":
            raise OSError("libcuda.so.1: cannot open shared object file:\nNo such file")
        return real(name)

    with tex.installed(), monkeypatch.context() as context:
        context.setattr(te.importlib, "import_module", import_module)
        assert choose_backend().name == "torch-fused"
        with pytest.raises(BackendUnavailableError, match="OSError: libcuda.so.1: .* file: No such file"):
            choose_backend("te")
    backend._decide.cache_clear()
    with tex.installed() as fake:
        del fake.layernorm_bwd
        assert "has no layernorm_bwd" in choose_backend().reason


@pytest.mark.parametrize("name", ["te", "torch-fused", "torch"])
def test_a_backend_chosen_on_a_cuda_machine_runs_on_the_cpu(name):
    chosen = Backend(name, "built on a CUDA machine")
    x, weight = torch.randn(4, 8), torch.rand(8)
    for twin in (pickle.loads(pickle.dumps(chosen)), copy.deepcopy(chosen)):
        assert twin == chosen
        expected = 0.5 * torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
        torch.testing.assert_close(rms_norm(x, weight, 1e-6, 0.5, backend=twin), expected)
        expected = 0.5 * torch.nn.functional.layer_norm(x, (8,), weight)
        torch.testing.assert_close(layer_norm(x, weight, None, 1e-5, 0.5, backend=twin), expected)
