from __future__ import annotations

import types

import pytest
import torch

from olmo_lns import environment
from olmo_lns.norm import backend


@pytest.fixture(autouse=True)
def no_decision(monkeypatch):
    """No setting, and nothing decided by another test."""
    monkeypatch.delenv(environment.NORM_BACKEND, raising=False)
    backend._decide.cache_clear()
    yield
    backend._decide.cache_clear()


@pytest.fixture
def cuda(monkeypatch):
    """A machine whose torch, 2.13, sees a GPU of the compute capability that is set."""
    machine = types.SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    return machine
