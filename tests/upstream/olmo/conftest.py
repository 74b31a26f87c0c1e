from __future__ import annotations

from pathlib import Path

import pytest
from support import launch


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built once."""
    return launch.build_wheel(tmp_path_factory.mktemp("wheel"))
