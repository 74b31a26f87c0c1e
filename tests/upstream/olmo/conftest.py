from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support import launch


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository, built once."""
    return launch.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def checkout(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A fresh environment with the wheel, where ``olmo`` is the checkout of ``OLMO_SRC``."""
    source = launch.olmo_source()
    folder = tmp_path_factory.mktemp("checkout")
    python = launch.fresh_venv(folder / "venv", packages=[str(source)])
    launch.pip_install(python, wheel)
    (launch.site_packages(python) / "aa_die_when.pth").write_text(f"{launch.PROGRAMS}\nimport die_when\n")
    return SimpleNamespace(folder=folder, python=python, script=source / "scripts" / "train.py")
