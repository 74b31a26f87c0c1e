"""Which kernel really runs, and the table by which ``auto`` decides."""

from __future__ import annotations

import json

import pytest
import torch
from support import tex

from olmo_lns import doctor
from olmo_lns.errors import LNSConfigError
from olmo_lns.norm import backend, choose_backend, pytorch, tuning
from olmo_lns.norm.kernels import quack_problem, running_kernel

native = pytest.importorskip("torch._native.cutedsl_utils", reason="torch 2.13 vendors Quack")
from torch._native import registry  # noqa: E402
from torch._native.ops.norm import rmsnorm_impl  # noqa: E402
from torch._vendor.packaging.version import Version  # noqa: E402


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    monkeypatch.delenv(backend.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def built(cuda, monkeypatch):
    """A torch with CUDA and torch's own registration of Quack, run again by ``register``."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(native._cuda, "is_built", lambda: True)
    monkeypatch.setattr(registry, "_graphs", {})
    forget()
    yield cuda
    forget()


def forget():
    """torch asks each of these once in a process."""
    for cached in (native._check_runtime_available, native._version_is_ok, native.check_native_jit_disabled):
        cached.cache_clear()


def install(monkeypatch, cutlass):
    """The two packages, nvidia-cutlass-dsl in this version, and torch's registration of its override."""
    monkeypatch.setattr(native, "_unavailable_reason", lambda deps: None)
    monkeypatch.setattr(native, "_available_version", lambda package: Version(cutlass))
    rmsnorm_impl.register_rmsnorm_overrides()


def test_quack_runs_where_torch_registered_it(built, monkeypatch):
    install(monkeypatch, "4.5.2")
    kernel = running_kernel("torch-fused", "cuda", width=4096)
    assert kernel.name == "Quack" and "4.5.2" in kernel.why and "2.13.0" in kernel.why
    chosen = choose_backend()
    assert chosen.name == "torch-fused" and "kernel: Quack" in chosen.reason


@pytest.mark.parametrize(("capability", "runs"), [((8, 0), 0), ((8, 9), 0), ((9, 0), 1), ((10, 0), 1), ((12, 0), 0)])
def test_quack_by_compute_capability(built, monkeypatch, capability, runs):
    install(monkeypatch, "4.4.2")
    built.capability = capability
    problem = quack_problem("cuda", width=1024)
    assert (problem is None) is bool(runs)
    if problem:
        assert "{}.{}".format(*capability) in problem
        assert running_kernel("torch-fused", "cuda").name == "torch fused"


def test_rows_that_quack_does_not_take(built, monkeypatch):
    install(monkeypatch, "4.4.1")
    assert "541" in quack_problem("cuda", width=541)
    assert quack_problem("cuda", width=541, dtype=torch.float32) is None
    assert "float64" in quack_problem("cuda", dtype=torch.float64)


def test_why_quack_does_not_run(built, monkeypatch):
    assert "nvidia-cutlass-dsl and apache-tvm-ffi" in quack_problem()
    forget()
    monkeypatch.setenv("TORCH_DISABLE_NATIVE_JIT", "1")
    install(monkeypatch, "4.5.2")
    assert "TORCH_DISABLE_NATIVE_JIT" in quack_problem()
    monkeypatch.delenv("TORCH_DISABLE_NATIVE_JIT")
    forget()
    install(monkeypatch, "4.3.0")
    assert "4.3.0" in quack_problem() and "4.4.1, 4.4.2, 4.5.2" in quack_problem()


def test_an_override_that_was_switched_off(built, monkeypatch):
    install(monkeypatch, "4.5.2")
    for node in registry._graphs["_fused_rms_norm", "CUDA"]:
        node.active = False  # what torch's deregister_op_overrides leaves
    assert "switched off" in quack_problem()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built with CUDA")
def test_a_torch_without_cuda():
    assert quack_problem() == "this torch is built without CUDA"


def test_other_backends_and_compiled_code(built, monkeypatch):
    install(monkeypatch, "4.5.2")
    assert running_kernel("torch-fused", "cuda", compiled=True).name == "composite"
    assert running_kernel("torch-fused", "cpu").name == running_kernel("torch", "cuda").name == "composite"
    with tex.installed("2.20.2"):
        assert running_kernel("te", "cuda").name == "Transformer Engine"
        assert running_kernel("te", "meta").name == "composite"


def measured(**milliseconds):
    return {"8192x1024 bfloat16": milliseconds, "8192x4096 float32": {k: 2 * v for k, v in milliseconds.items()}}


def test_auto_takes_what_was_measured_here(cuda):
    device = torch.device("cuda")
    with tex.installed("2.20.2"):
        assert choose_backend().name == "te" and tuning.COMMAND in choose_backend().reason
        machine = tuning.key(device)
        assert "NVIDIA H200" in machine and "2.20.2" in machine and "2.13.0 without Quack" in machine
        tuning.write(machine, measured(te=1.0, torch=3.0, **{"torch-fused": 0.9}))
        chosen = choose_backend()
        assert chosen.name == "torch-fused" and "fastest here, measured" in chosen.reason
        assert "kernel: torch fused" in chosen.reason
        assert choose_backend("te").name == "te"  # asked for: no table is looked at
        cuda.name = "NVIDIA B200"  # another machine: its own table
        assert choose_backend().name == "te"
        tuning.write(tuning.key(device), measured(te=0.5, torch=3.0))
        assert choose_backend().name == "te" and "fastest here" in choose_backend().reason
    assert len(json.loads(tuning.path().read_text())["machines"]) == 2
    assert choose_backend().name == "torch-fused"  # Transformer Engine is gone: that table counts no longer


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 9, "machines": {}}', '{"format": 1}'])
def test_a_table_that_cannot_be_read_is_said_and_not_used(cuda, text):
    tuning.path().parent.mkdir(parents=True)
    tuning.path().write_text(text)
    chosen = choose_backend()
    assert chosen.name == "torch-fused" and str(tuning.path()) in chosen.reason and "delete it" in chosen.reason
    with pytest.raises(LNSConfigError, match="delete it"):
        tuning.write("a machine", measured(torch=1.0))


def test_the_winner_is_the_best_over_all_cases():
    cases = {"a": {"x": 1.0, "y": 2.0}, "b": {"x": 9.0, "y": 3.0}}
    assert tuning.best(cases) == "y"


def test_measuring(cuda):
    slow = lambda x, w, e, s: sum(pytorch.rms_norm(x, w, e, s) for _ in range(8))  # noqa: E731
    found = tuning.measure(
        {"slow": slow, "torch": pytorch.rms_norm},
        torch.device("cpu"),
        shapes=[(64, 32), (32, 64)],
        dtypes=[torch.float32],
        rounds=5,
    )
    assert set(found) == {"64x32 float32", "32x64 float32"} and tuning.best(found) == "torch"


def test_doctor_tune_measures_writes_and_says_so(cuda, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "measure", lambda backends, device: measured(**dict.fromkeys(backends, 1.0), te=0.5))
    doctor._tune()
    shown = capsys.readouterr().out
    assert "8192x1024 bfloat16" in shown and "fastest: te" in shown and str(tuning.path()) in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_tuning_for_a_gpu_that_is_not_there():
    with pytest.raises(LNSConfigError, match="no CUDA device is visible"):
        backend.tune("cuda")
