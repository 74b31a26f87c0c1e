"""The choice of backend: what is chosen, why, and what is refused."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from support import tex

from olmo_lns.errors import BackendUnavailableError, LNSConfigError
from olmo_lns.norm import Backend, backend, choose_backend, rms_norm
from olmo_lns.norm import transformer_engine as te


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)


NOT_MEASURED = "which is fastest here was not measured (olmo-lns doctor --tune)"


def test_on_a_machine_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    chosen = choose_backend()
    assert chosen == Backend("torch", f"no CUDA device is visible; {NOT_MEASURED}")


def test_te_is_chosen_where_it_works(cuda):
    with tex.installed("2.20.2"):
        chosen = choose_backend()
    assert chosen.name == "te" and "2.20.2" in chosen.reason


def test_without_te_torchs_fused_kernel(cuda, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.0+cu128")
    chosen = choose_backend()
    assert chosen.name == "torch-fused"
    assert "No module named 'transformer_engine'" in chosen.reason and "2.9.0" in chosen.reason


def test_older_torch_has_no_fused_kernel(cuda, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert choose_backend().name == "torch"


def test_old_gpu(cuda):
    cuda.capability = (7, 5)
    with tex.installed():
        chosen = choose_backend()
        assert chosen.name != "te" and "7.5 is below 8.0" in chosen.reason
        with pytest.raises(BackendUnavailableError, match=r"7\.5 is below 8\.0"):
            choose_backend("te")


def test_rocm(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with tex.installed():
        assert choose_backend().name == "torch" and "ROCm" in choose_backend().reason


def test_a_model_for_the_cpu_on_a_cuda_machine(cuda):
    assert choose_backend(device="cpu") == Backend("torch", f"the model's device is cpu; {NOT_MEASURED}")


def test_torch_by_name_or_by_environment(cuda, monkeypatch):
    with tex.installed():
        assert choose_backend("torch").name == "torch-fused"
        monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, "torch")
        assert choose_backend().name == "torch-fused" and backend.ENVIRONMENT_VARIABLE in choose_backend().reason
        assert choose_backend("te").name == "te"  # an argument wins


@pytest.mark.parametrize(("wrong", "near"), [("tee", "'te'"), ("Torch", "'torch'"), ("atuo", "'auto'")])
def test_unknown_name_is_refused_with_the_nearest(wrong, near, monkeypatch):
    with pytest.raises(
        LNSConfigError, match=f"unknown norm backend .{wrong}. .did you mean {near}.*auto, te, cpp, torch"
    ):
        choose_backend(wrong)
    monkeypatch.setenv(backend.ENVIRONMENT_VARIABLE, wrong)
    with pytest.raises(LNSConfigError, match=backend.ENVIRONMENT_VARIABLE):
        choose_backend()


def test_te_by_name_and_not_installed(cuda):
    with pytest.raises(BackendUnavailableError) as caught:
        choose_backend("te")
    message = str(caught.value)
    assert "No module named 'transformer_engine'" in message and "olmo-lns[te]" in message and "\n" not in message


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("transformer_engine", RuntimeError("Found empty `transformer-engine` meta package installed")),
        ("transformer_engine", AssertionError("")),
        ("transformer_engine.pytorch", OSError("libcuda.so.1: cannot open shared object file:\nNo such file")),
        ("transformer_engine_torch", FileNotFoundError("Could not find shared object file for Transformer Engine")),
        ("transformer_engine.pytorch", ModuleNotFoundError("No module named 'onnxscript'", name="onnxscript")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_a_broken_te_is_shown_with_its_own_failure(module, error, cuda, monkeypatch):
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


@pytest.mark.parametrize("version", ["1.13.0", "2.0.0", "2.21.0", "3.0", "unknown"])
def test_other_te_versions_are_refused_by_name(version, cuda):
    with tex.installed(version):
        assert version in choose_backend().reason and choose_backend().name != "te"
        with pytest.raises(BackendUnavailableError, match=version.replace(".", r"\.")):
            choose_backend("te")


@pytest.mark.parametrize("value", ["1", " 1 "])  # as every other reader of the variables takes it
@pytest.mark.parametrize(("version", "allowed"), [("2.21.0", True), ("2.0.0", False), ("3.0", False)])
def test_a_newer_2_x_can_be_used_knowingly(version, allowed, value, cuda, monkeypatch):
    monkeypatch.setenv("OLMO_LNS_ALLOW_UNVERIFIED", value)
    with tex.installed(version):
        assert (choose_backend().name == "te") is allowed


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_every_gpu_since_ampere_takes_te(capability, cuda):
    cuda.capability = capability
    with tex.installed():
        assert choose_backend().name == "te"


@pytest.mark.parametrize("version", ["2.1.0", "2.5.0", "2.11.0", "2.20.2", "2.11.0+cu13"])
def test_supported_te_versions(version, cuda):
    with tex.installed(version):
        assert choose_backend("te").name == "te"


def test_a_te_whose_kernels_have_moved(cuda):
    with tex.installed() as fake:
        del fake.layernorm_bwd
        assert "has no layernorm_bwd" in choose_backend().reason


def test_a_decision_pickles_copies_and_compares():
    chosen = Backend("te", "because")
    for twin in (pickle.loads(pickle.dumps(chosen)), copy.deepcopy(chosen)):
        assert twin == chosen


@pytest.mark.parametrize("name", ["te", "torch-fused", "torch"])
def test_every_backend_takes_cpu_tensors(name):
    """A model built on a CUDA machine still runs on CPU: a checkpoint conversion, a test, a data worker."""
    x, weight = torch.randn(4, 8), torch.rand(8)
    chosen = Backend(name, "built on a CUDA machine")
    torch.testing.assert_close(
        chosen.rms_norm(x, weight, 1e-6, 0.5), rms_norm(x, weight, 1e-6, 0.5, backend=Backend("torch", ""))
    )
    expected = 0.5 * torch.nn.functional.layer_norm(x, (8,), weight)
    torch.testing.assert_close(chosen.layer_norm(x, weight, None, 1e-5, 0.5), expected)


def test_decided_once_for_the_functions(monkeypatch):
    from olmo_lns import norm

    monkeypatch.setattr(norm, "_chosen", {})
    calls = []
    monkeypatch.setattr(norm, "choose_backend", lambda name: calls.append(name) or Backend("torch", ""))
    for _ in range(3):
        rms_norm(torch.ones(2, 4), None, 1e-6, 0.5)
        rms_norm(torch.ones(2, 4), None, 1e-6, 0.5, backend="torch")
    assert calls == [None, "torch"]


def test_importing_the_norms_does_not_import_transformer_engine():
    code = "import sys, olmo_lns.norm; print('transformer_engine' in sys.modules, 'olmo.model' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]
