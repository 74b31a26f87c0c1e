"""The choice of backend: which one is chosen, why, and what is refused."""

import copy
import pickle
import types

import pytest
import torch
from support import tex

from olmo_lns.environment import NORM_BACKEND
from olmo_lns.errors import BackendUnavailableError, LNSConfigError
from olmo_lns.norm import Backend, backend, choose_backend
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
        assert choose_backend("torch").name == "torch-fused"
        monkeypatch.setenv(NORM_BACKEND, "torch")
        assert choose_backend().name == "torch-fused" and NORM_BACKEND in choose_backend().reason
        assert choose_backend("te").name == "te"  # an argument wins
        monkeypatch.delenv(NORM_BACKEND)
    chosen = choose_backend()
    assert chosen.name == "torch-fused" and chosen.reason.endswith("2.13.0 has a fused rms_norm on CUDA")
    assert "No module named 'transformer_engine'" in chosen.reason
    with pytest.raises(BackendUnavailableError, match=r"No module named 'transformer_engine'.*olmo-lns\[te\]"):
        choose_backend("te")
    assert choose_backend(device="cpu") == Backend("torch", "the model's device is cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend._decide.cache_clear()
    assert choose_backend() == Backend("torch", "no CUDA device is visible")


@pytest.mark.parametrize(("version", "hip"), [("2.8.0", None), ("2.13.0", "6.2")])
def test_a_torch_without_the_fused_kernel_gives_the_backend_torch(version, hip, cuda, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert choose_backend().name == "torch" and version in choose_backend().reason


def test_te_needs_ampere_or_later(cuda):
    for cuda.capability, name in (((8, 0), "te"), ((12, 0), "te"), ((7, 5), "torch-fused")):
        with tex.installed():
            assert choose_backend().name == name
    with tex.installed(), pytest.raises(BackendUnavailableError, match=r"7\.5 is below 8\.0"):
        choose_backend("te")


def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(LNSConfigError, match=r"'tee' \(did you mean 'te'\?\) .*allowed: auto, te, torch"):
        choose_backend("tee")
    monkeypatch.setenv(NORM_BACKEND, "tee")
    with pytest.raises(LNSConfigError, match=NORM_BACKEND):
        choose_backend()


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("transformer_engine", RuntimeError("Found empty `transformer-engine` meta package installed")),
        ("transformer_engine.pytorch", OSError("libcuda.so.1: cannot open shared object file:\nNo such file")),
    ],
    ids=str,
)
def test_a_broken_te_is_reported_with_its_own_error(module, error, cuda, monkeypatch):
    real = te.importlib.import_module

    def import_module(name):
        if name == module:
            raise error
        return real(name)

    with tex.installed():
        monkeypatch.setattr(te.importlib, "import_module", import_module)
        expected = f"{type(error).__name__}: {' '.join(str(error).split())}"
        assert expected in choose_backend().reason and choose_backend().name == "torch-fused"
        with pytest.raises(BackendUnavailableError) as caught:
            choose_backend("te")
        assert expected in str(caught.value) and "\n" not in str(caught.value)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("version", "runs"),
    [("2.1.0", True), ("2.20.2+cu13", True), ("2.99.0", True), ("2.0", False), ("3.0", False), ("unknown", False)],
)
def test_te_runs_in_supported_versions_only(version, runs, cuda):
    with tex.installed(version):
        assert (choose_backend().name == "te") is runs and version in choose_backend().reason
        if not runs:
            with pytest.raises(BackendUnavailableError, match=version.replace(".", r"\.")):
                choose_backend("te")
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
        torch.testing.assert_close(twin.rms_norm(x, weight, 1e-6, 0.5), expected)
        expected = 0.5 * torch.nn.functional.layer_norm(x, (8,), weight)
        torch.testing.assert_close(twin.layer_norm(x, weight, None, 1e-5, 0.5), expected)
