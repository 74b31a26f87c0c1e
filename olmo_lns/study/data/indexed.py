"""Turn OLMo's memmaps into Megatron's indexed pairs, ``.bin`` and ``.idx``."""

from __future__ import annotations

import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.check import CHUNK, Data, check_file, find, is_heldout


def convert(paths: Sequence[Path], out: Path, *, eos: int | None, dtype: str | None, vocabulary: int | None) -> str:
    """Write a pair for every training file, in the same folders.

    The dtype, the vocabulary and the end of a document come from the record beside each file, if there is one.

    :returns: the line ``export MEGATRON_DATA=…`` with all pairs.
    :raises LNSConfigError: a bad file, or a path that Megatron would split.
    """
    memmaps = [path for path in find(paths) if path.suffix == ".npy" and not is_heldout(path)]
    if not memmaps:
        raise LNSConfigError(f"no *.npy to train on in {', '.join(map(str, paths))}")
    root, out = Path(os.path.commonpath([path.parent.absolute() for path in memmaps])), out.resolve()
    prefixes = {path: out / path.absolute().relative_to(root).with_name(path.stem) for path in memmaps}
    if split := next((str(prefix) for prefix in prefixes.values() if re.search(r"[\s'\"\\$]", str(prefix))), None):
        raise LNSConfigError(f"{split}: Megatron splits --data-path at blanks: rename the file, or give another -o")
    words = []
    for path, prefix in prefixes.items():
        data = check_file(path, dtype=dtype, vocabulary=vocabulary, eos=eos)
        if data.problems:
            raise LNSConfigError(f"{path}: {data.problems[0]}")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _write(data, prefix)
        words += [str(data.tokens), str(prefix)]
    return f"export MEGATRON_DATA={shlex.quote(' '.join(words))}"


def _write(data: Data, prefix: Path) -> None:
    """Write one pair. A document ends with ``data.eos``; the tokens after the last end are a document too."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    index = Path(f"{prefix}.idx")
    index.unlink(missing_ok=True)  # of another .bin, until the new one is complete
    tokens = np.memmap(data.path, dtype=data.dtype, mode="r")
    ends = [np.flatnonzero(tokens[i : i + CHUNK] == data.eos) + i + 1 for i in range(0, len(tokens), CHUNK)]
    stops = np.unique(np.concatenate([[0], *ends, [len(tokens)]])).tolist()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(data.highest + 1))
    for start, stop in pairwise(stops):
        builder.add_document(torch.from_numpy(tokens[start:stop].astype(np.int64)), [stop - start])
    builder.finalize(str(index))
