from __future__ import annotations

import shutil
import sysconfig
import types
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.te_python import CACHE

from olmo_lns.norm import cpp

BUILT = CACHE / "compiled"


@pytest.fixture(scope="session")
def library():
    """The compiled norms, built once for all workers and kept for the next run; no test of another file finds them."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists() or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip(f"no C++ compiler (c++, g++, clang++), or no {header}: the compiled norms cannot be built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(BUILT))
        BUILT.mkdir(parents=True, exist_ok=True)
        with FileLock(BUILT / "lock"):
            path = cpp.build()
    return path


@pytest.fixture
def compiled(library, monkeypatch):
    """A machine whose norms are compiled and not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILT))
    return library


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A machine whose torch, 2.13, sees a GPU of the compute capability that is set; no table of measurements yet."""
    machine = types.SimpleNamespace(capability=(9, 0), name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: machine.name)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return machine
