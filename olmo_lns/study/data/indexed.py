"""Turn OLMo's memmaps into Megatron's indexed pairs, ``.bin`` and ``.idx``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
from pathlib import Path
from typing import Sequence

import numpy as np

from olmo_lns.errors import LNSConfigError
from olmo_lns.study.data.check import CHUNK, INDEX_DTYPES, INDEX_HEADER, Data, check_file, find, held_out
from olmo_lns.study.files import make_folder
from olmo_lns.text import write_whole

#: A memmap's dtype -> Megatron's of the same width; ids above its half are refused.
SIGNED = {"uint8": "uint8", "uint16": "uint16", "uint32": "int32", "uint64": "int64"}


def convert(paths: Sequence[Path], out: Path, *, eos: int | None, dtype: str | None, vocabulary: int | None) -> str:
    """Write a pair for every training file, in the same folders.

    The dtype, the vocabulary and the end of a document come from the record beside each file, if there is one.

    :returns: the line ``export MEGATRON_DATA=…`` with all pairs.
    :raises LNSConfigError: a bad file, one that contradicts its record, or a path that Megatron would split.
    """
    memmaps = [path for path in find(paths) if path.suffix == ".npy" and not held_out(path)]
    if not memmaps:
        raise LNSConfigError(f"no *.npy to train on in {', '.join(map(str, paths))}")
    root, out = Path(os.path.commonpath([path.parent.absolute() for path in memmaps])), out.resolve()
    prefixes = {path: out / path.absolute().relative_to(root).with_name(path.stem) for path in memmaps}
    if split := next((str(prefix) for prefix in prefixes.values() if re.search(r"[\s'\"\\$]", str(prefix))), None):
        raise LNSConfigError(f"{split}: Megatron splits --data-path at blanks: rename the file, or give another -o")
    words = []
    for path, prefix in prefixes.items():
        data = check_file(path, dtype=dtype, vocabulary=vocabulary, eos=eos)
        if not data.problems and data.highest > np.iinfo(SIGNED[data.dtype]).max:
            data.problems.append(f"token {data.highest:,} does not fit Megatron's {SIGNED[data.dtype]}")
        if data.problems:
            raise LNSConfigError(f"{path}: {data.problems[0]}")
        make_folder(prefix.parent)
        _pair(path, prefix, data)
        words += [str(data.tokens), str(prefix)]
    return f"export MEGATRON_DATA={shlex.quote(' '.join(words))}"


def _pair(memmap: Path, prefix: Path, data: Data) -> None:
    """Write one pair; the ``.bin`` is a hard link to the memmap if possible.

    A document ends with ``data.eos``; the tokens after the last end are a document too.
    """
    tokens = np.memmap(memmap, dtype=data.dtype, mode="r")
    ends = [np.flatnonzero(tokens[i : i + CHUNK] == data.eos) + i + 1 for i in range(0, len(tokens), CHUNK)]
    stops = np.unique(np.concatenate([*ends, [len(tokens)]])).astype("<i8")
    starts = np.concatenate([[0], stops[:-1]]).astype("<i8")
    code = next(code for code, name in INDEX_DTYPES.items() if name == SIGNED[data.dtype])
    target, part = Path(f"{prefix}.bin"), Path(f"{prefix}.bin.{os.getpid()}.part")
    try:
        os.link(memmap.resolve(), part)
    except OSError:  # another file system
        shutil.copyfile(memmap, part)
    os.replace(part, target)
    part.unlink(missing_ok=True)  # rename keeps a second name of the same file
    index = INDEX_HEADER + struct.pack("<QBQQ", 1, code, len(stops), len(stops) + 1)
    index += (stops - starts).astype("<i4").tobytes() + (starts * tokens.itemsize).tobytes()
    write_whole(Path(f"{prefix}.idx"), index + np.arange(len(stops) + 1, dtype="<i8").tobytes())
