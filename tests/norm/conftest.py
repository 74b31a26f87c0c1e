from __future__ import annotations

import types

import pytest
import torch


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
