"""What travels to a GPU machine that reaches no package registry: code and tokens, packed and unpacked there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import lzma
import os
import sys
import tarfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Iterator

ROOT = Path(__file__).resolve().parents[2]
MOST = 60_000_000
ARCHIVE = "evidence.tar.xz"
#: Packages and modules of pure Python, beside this one; of olmo_data the code alone.
PACKED = (
    "olmo", "olmo_data", "omegaconf", "yaml", "rich", "pygments", "markdown_it", "mdurl", "packaging",
    "typing_extensions", "importlib_resources",
)  # fmt: skip
#: OLMo imports these for object stores, data sets and progress reports; building a model uses none.
ABSENT = (
    "boto3", "botocore", "cached_path", "datasets", "google", "huggingface_hub", "pyarrow", "requests", "safetensors",
    "sklearn", "tokenizers", "torchmetrics", "tqdm", "wandb",
)  # fmt: skip


def pack(study_path: Path, folder: Path, tokens: int) -> Path:
    """Write the archive. :raises SystemExit: it is larger than 60 MB."""
    sys.path.insert(0, str(ROOT))
    from olmo_lns.study.arms import check_environment
    from olmo_lns.study.plan.spec import Study

    check_environment()
    study = Study.load(study_path)
    runs = [
        {"run": run.name, "size": run.size, "arm": run.arm, "seed": run.seed, "settings": run.settings}
        for run in study.runs
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ARCHIVE
    with lzma.open(path, "wb", preset=6) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for name, source in _code():
            archive.add(source, arcname=f"site/{name}")
        _add(archive, "runs.json", json.dumps({"study": study.name, "runs": runs}, default=str).encode())
        for name, data in _tokens(tokens):
            _add(archive, name, data)
    size = path.stat().st_size
    print(f"{path}: {size / 1e6:.1f} MB, {len(runs)} runs")
    if size > MOST:
        raise SystemExit(f"{size:,} bytes are more than {MOST:,}: fewer --tokens")
    return path


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))


def _code() -> Iterator[tuple[str, Path]]:
    """``(name, file)`` of all Python sources that a model needs."""
    for path in sorted((ROOT / "olmo_lns").rglob("*.py")):
        yield str(path.relative_to(ROOT)), path
    for package in PACKED:
        spec = importlib.util.find_spec(package)
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        if spec is None or not (places or spec.origin):
            raise SystemExit(f"{package} is not installed: pip install 'olmo-lns[olmo]'")
        for place in places:
            for path in sorted(place.rglob("*.py")):
                yield str(path.relative_to(place.parent)), path
        if not places:
            yield Path(str(spec.origin)).name, Path(str(spec.origin))
    metadata = importlib.metadata.distribution("ai2-olmo").locate_file(
        f"ai2_olmo-{importlib.metadata.version('ai2-olmo')}.dist-info/METADATA"
    )
    yield f"{Path(str(metadata)).parent.name}/METADATA", Path(str(metadata))  # the integration asks for the version


def _tokens(count: int) -> Iterator[tuple[str, bytes]]:
    """The larger corpus of the studies: a byte a token, and where documents end (token 256)."""
    import tempfile

    import numpy as np

    from olmo_lns.study.data.corpora import BUILT

    with tempfile.TemporaryDirectory() as folder:
        text = BUILT["packages"](Path(folder))
        for name, path, most in (("train", text.train, count), ("heldout", text.heldout, 1 << 20)):
            found = np.fromfile(path, dtype=np.uint16, count=most)
            yield f"{name}.u8", (found & 255).astype(np.uint8).tobytes()
            yield f"{name}.ends", np.flatnonzero(found == 256).astype(np.uint32).tobytes()


def unpack(folder: Path, out: Path) -> dict[str, Any]:
    """Code and tokens under ``out/unpacked``, once; puts the code on the path. Returns runs.json."""
    place = out / "unpacked"
    if not (place / "runs.json").is_file():
        temporary = out / "unpacking"
        with lzma.open(folder / ARCHIVE) as file, tarfile.open(fileobj=file) as archive:
            archive.extractall(temporary, filter="data")
        os.replace(temporary, place)
    sys.path.insert(0, str(place / "site"))
    sys.meta_path.append(_Finder())
    known: dict[str, Any] = json.loads((place / "runs.json").read_text())
    return known


class _Unused:
    """A name of a package that is not there: made and used as a decorator at import time, nothing beyond."""

    recoverable_errors: tuple[type[Exception], ...] = ()  # of cached_path's client, which OLMo extends

    def __init__(self, *_: Any, **__: Any) -> None:
        return None

    def __call__(self, function: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{type(self).__module__}.{type(self).__name__} is used, and is not on this machine")


class _Absent(ModuleType):
    """A package that is not there; it may have submodules."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class of its own each: some are base classes, some are caught as exceptions.
        bases = (Exception,) if name.endswith(("Error", "Exception")) else (_Unused,)
        return type(name, bases, {"__module__": self.__name__})


class _Finder(MetaPathFinder, Loader):
    """Last in line: real packages come first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None
