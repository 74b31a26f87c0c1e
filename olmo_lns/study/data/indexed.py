"""Convert OLMo's memmaps to Megatron's indexed pairs, ``.bin`` and ``.idx``."""

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


def write_pairs(paths: Sequence[Path], out: Path, *, eos: int | None, dtype: str | None, vocabulary: int | None) -> str:
    """Write a pair for every training file, under the same relative paths.

    :param eos, dtype, vocabulary: as for :func:`~olmo_lns.study.data.check.check_file`.
    :returns: the line ``export MEGATRON_DATA=…`` with all pairs.
    :raises LNSConfigError: if a file has a problem, or Megatron would split a path.
    """
    memmaps = [path for path in find(paths) if path.suffix == ".npy" and not is_heldout(path)]
    if not memmaps:
        raise LNSConfigError(
            f"No *.npy to train on was found in {', '.join(map(str, paths))}. Held-out files are not converted. Pass "
            "the folder of the training files."
        )
    root, out = Path(os.path.commonpath([path.parent.absolute() for path in memmaps])), out.resolve()
    prefixes = {path: out / path.absolute().relative_to(root).with_name(path.stem) for path in memmaps}
    for prefix in prefixes.values():
        if re.search(r"[\s'\"\\$]", str(prefix)):
            raise LNSConfigError(
                f"{prefix} cannot be passed to Megatron, which splits --data-path at blanks and quotes. Rename the "
                "file, or pass another -o."
            )
    weighted_prefixes = []
    for path, prefix in prefixes.items():
        data = check_file(path, dtype=dtype, vocabulary=vocabulary, eos=eos)
        if data.problems:
            raise LNSConfigError(f"{path}: {data.problems[0]}")
        prefix.parent.mkdir(parents=True, exist_ok=True)
        _write_pair(data, prefix)
        weighted_prefixes += [str(data.tokens), str(prefix)]
    return f"export MEGATRON_DATA={shlex.quote(' '.join(weighted_prefixes))}"


def _write_pair(data: Data, prefix: Path) -> None:
    """Write one pair. A document ends with ``data.eos``; tokens after the last ``data.eos`` are a document too."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    index = Path(f"{prefix}.idx")
    index.unlink(missing_ok=True)  # an old index does not match the new .bin
    tokens = np.memmap(data.path, dtype=data.dtype, mode="r")
    ends = [np.flatnonzero(tokens[i : i + CHUNK] == data.eos) + i + 1 for i in range(0, len(tokens), CHUNK)]
    boundaries = np.unique(np.concatenate([[0], *ends, [len(tokens)]])).tolist()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(data.highest + 1))
    for start, stop in pairwise(boundaries):
        builder.add_document(torch.from_numpy(tokens[start:stop].astype(np.int64)), [stop - start])
    builder.finalize(str(index))
