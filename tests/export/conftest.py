"""One checkpoint of each OLMo format, with LayerNorm Scaling."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exports import save_olmo


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "checkpoint"
    save_olmo(folder, layer_norm_type="lns_rms")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "sharded"
    save_olmo(folder, sharded=True, layer_norm_type="lns_rms")
    return folder
