"""The compiled norms: how they are built, loaded and chosen."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from olmo_lns import doctor
from olmo_lns.errors import BackendUnavailableError
from olmo_lns.norm import Backend, choose_backend, cpp, tuning
from olmo_lns.norm.kernels import running_kernel

EPS, SCALE = 1e-5, 7**-0.5
pytestmark = pytest.mark.usefixtures("compiled")


def test_asked_for_a_model_on_the_gpu(cuda):
    with pytest.raises(BackendUnavailableError, match="asked for by argument and runs on the CPU; this is for cuda"):
        choose_backend("cpp")


def test_the_choice(compiled, monkeypatch, tmp_path, capsys):
    assert choose_backend(device="cpu").name == "torch"  # compiled and not measured
    assert choose_backend("cpp", device="cpu").name == "cpp"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    times = {"torch": 2.0, "cpp": 1.0}
    monkeypatch.setattr(tuning, "measure", lambda backends, device: {"case": {name: times[name] for name in backends}})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpp.library().parent.mkdir()
    cpp.library().hardlink_to(compiled)
    for arguments in (["--tune"], ["--tune", "cpu"]):
        assert doctor.main(arguments) == 0
        assert "fastest: cpp" in capsys.readouterr().out
    chosen = choose_backend()
    assert chosen.name == "cpp" and "fastest here, measured" in chosen.reason and str(tuning.path()) in chosen.reason
    assert doctor._backend().found == "cpp" and running_kernel("cpp", "cpu").name == "C++"
    assert choose_backend("torch").name == "torch"
    monkeypatch.setattr(cpp, "_norm", None)
    assert torch.equal(
        pickle.loads(pickle.dumps(chosen)).rms_norm(torch.ones(2, 4), None, 0.0, 0.5), torch.full((2, 4), 0.5)
    )
    cpp.library().unlink()
    assert choose_backend().name == "torch" and "not compiled on this machine" in choose_backend().reason
    monkeypatch.setattr(torch, "__version__", "2.99.0")  # another torch: another library, another table
    assert choose_backend().name == "torch" and "was not measured" in choose_backend().reason


def test_not_built(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp, "_norm", None)
    with pytest.raises(
        BackendUnavailableError, match=r"'cpp' was asked for by argument .*not compiled.*doctor --tune cpu"
    ):
        choose_backend("cpp", device="cpu")
    with pytest.raises(BackendUnavailableError, match="which is not there: run olmo-lns doctor --tune"):
        Backend("cpp", "from another machine").rms_norm(torch.ones(2, 4), None, EPS, SCALE)
    assert cpp.problem() is not None and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("g++-none -O3", r"compiler 'g\+\+-none -O3' cannot be run: .*No such file"),
        ("g++ '", "cannot be run: No closing quotation"),
        ("false", r"false could not compile .*cpu\.cpp \(exit 1\): it said nothing"),
        ("g++ -fsyntax-only -include nowhere.h", r"error: .*nowhere\.h"),
    ],
)
def test_a_compiler_that_fails(compiler, message, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BackendUnavailableError, match=message):
        cpp.build()
    assert list(cpp.library().parent.iterdir()) == []


def test_no_compiler_at_all(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="no C\\+\\+ compiler is on PATH"):
        cpp.build()


def test_a_damaged_library(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp, "_norm", None)
    cpp.library().parent.mkdir()
    cpp.library().write_bytes(b"not a library")
    with pytest.raises(BackendUnavailableError, match=r"cannot be loaded .*delete it and run olmo-lns doctor --tune"):
        choose_backend("cpp", device="cpu")
