"""A row of the table: a real model, and which of its norms ``olmo_lns.apply`` must scale.

A row is written by reading the model's own code. It says where the model comes from, how a small one is built, what
``apply`` has to do with it, and which line of the model's code shows that. A row never looks at what ``apply`` found.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

#: ``apply`` accepts the model by itself and scales exactly the expected norms.
ACCEPTED = "accepted"
#: ``apply`` refuses the model by itself and names ``norms=``. With the expected norms given, it accepts the model.
NORMS = "norms="
#: ``apply`` refuses the model and leaves it unchanged.
REFUSED = "refused"

Sites = list[tuple[str, ...]]
Built = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Row:
    """One model, and the expectation that a reader of its code wrote down.

    ``sites`` has one tuple of norm names for each block, in order from block 1: two norms, or one that both branches
    share. ``blocks`` names lists of blocks that are given to ``apply`` as ``blocks=``, ``given`` names norms that are
    given as ``norms=``. ``code`` is a file of the source and a line in it.
    """

    name: str
    source: str
    verdict: str
    build: Callable[[], Built]
    why: str
    code: tuple[str, str]
    sites: Sites = field(default_factory=list)
    blocks: str | list[str] | None = None
    given: Sites | None = None

    def unavailable(self) -> str | None:
        """Return why this model cannot be built here, or None."""
        kind, _, name = self.source.partition(":")
        if kind == "repository" and not checkout(name).is_dir():
            return f"{name} is not below ${SOURCES}"
        if kind == "package" and importlib.util.find_spec(IMPORTED.get(name, name.replace("-", "_"))) is None:
            return f"{name} is not installed"
        return None

    def version(self) -> str:
        """Return the version of the package, or the commit of the repository."""
        kind, _, name = self.source.partition(":")
        if kind == "repository":
            return f"{name} {commit(name)[:10]}"
        return f"{name} {importlib.metadata.version(name)}"

    def line(self) -> str:
        """Return the file and number of the quoted line in the installed source, or say that it is not there."""
        file, text = self.code
        kind, _, name = self.source.partition(":")
        if kind == "repository":
            path = checkout(name) / file
        else:
            spec = importlib.util.find_spec(file.split("/")[0])
            if spec is None:
                return f"{file}: not installed"
            path = Path(next(iter(spec.submodule_search_locations or [])), *file.split("/")[1:])
        if not path.is_file():
            return f"{file}: no such file"
        for number, found in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if text in found:
                return f"{file}:{number}"
        return f"{file}: line not found"


#: The environment variable with a folder of checkouts, each named owner__repository.
SOURCES = "MODEL_SOURCES"

#: Package -> the module that it installs, where the name is another one.
IMPORTED = {
    "openai-whisper": "whisper",
    "fair-esm": "esm",
    "open_clip_torch": "open_clip",
    "torchmultimodal-nightly": "torchmultimodal",
    "PaLM-pytorch": "palm_pytorch",
    "PaLM-rlhf-pytorch": "palm_rlhf_pytorch",
    "segment-anything": "segment_anything",
    "chronos-forecasting": "chronos",
}

ROWS: dict[str, Row] = {}


def row(name: str, source: str, verdict: str, *, why: str, code: tuple[str, str], **expected: Any) -> Callable:
    """Register the decorated builder of ``(model, example)`` as a row."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        if name in ROWS:
            raise ValueError(f"two rows are named {name!r}")
        if (verdict == REFUSED) == bool(expected.get("sites")):
            raise ValueError(f"row {name!r}: a row names its norms if, and only if, the model is not refused")
        ROWS[name] = Row(name, source, verdict, build, why, code, **expected)
        return build

    return register


def sites(pattern: str | Iterable[str], count: int | Iterable[int], start: int = 0) -> Sites:
    """Return the names of the norms of each block: ``"h.{}.ln_1 h.{}.ln_2"`` for the numbers given."""
    names = pattern.split() if isinstance(pattern, str) else list(pattern)
    numbers = range(start, start + count) if isinstance(count, int) else count
    return [tuple(name.format(number) for name in names) for number in numbers]


def checkout(repository: str) -> Path:
    """Return the folder of a repository's checkout below ``$MODEL_SOURCES``."""
    return Path(os.environ.get(SOURCES, "model-sources")) / repository.replace("/", "__")


def commit(repository: str) -> str:
    """Return the commit of a checkout: from git, or from the file .commit beside an exported tree."""
    folder = checkout(repository)
    if (folder / ".commit").is_file():
        return (folder / ".commit").read_text().strip()
    return subprocess.check_output(["git", "-C", str(folder), "rev-parse", "HEAD"], text=True).strip()


def load(repository: str, file: str, name: str | None = None) -> Any:
    """Import one file of a checkout as a module, with the checkout's root in ``sys.path``."""
    root = checkout(repository)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    path = root / file
    name = name or path.stem + "_of_" + repository.replace("/", "_").replace("-", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def load_part(repository: str, file: str, until: str, name: str | None = None) -> Any:
    """Import the part of a training script before the line that starts with ``until``: its classes."""
    path = checkout(repository) / file
    text = path.read_text(encoding="utf-8")
    head = text[: text.index("\n" + until) + 1]
    module = types.ModuleType(name or "part_of_" + path.stem)
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(head, str(path), "exec"), module.__dict__)
    return module


def on_path(repository: str, *below: str) -> None:
    """Put a checkout, or a folder in it, before ``sys.path``."""
    sys.path.insert(0, str(checkout(repository).joinpath(*below)))
