#!/usr/bin/env python3
"""Copy Transformer Engine's library with the GPU code of one architecture only, so that it compresses well.

    python scripts/gpu/slim_library.py libtransformer_engine.so slim/libtransformer_engine.so --keep 90
    xz slim/libtransformer_engine.so

The embedded GPU binaries of every other architecture (and all PTX) are overwritten with zeros in place: nothing moves,
so no offset changes. The 463 MB of release 2.11.0 for CUDA 13 (a wheel of 179 MB) become 9.5 MB. On a GPU of an
architecture that was not kept the kernels are missing. Needs `readelf` (binutils).
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

CONTAINER_MAGIC = 0xBA55ED50
#: magic, version, header size, size of all members
CONTAINER = struct.Struct("<IHHQ")
#: kind, version, header size, payload size, then compressed size, options offset, minor and major version, arch
MEMBER = struct.Struct("<HHIQIIHHI")
KINDS = {1: "ptx", 2: "elf"}


class Member(NamedTuple):
    kind: str
    arch: int
    offset: int
    size: int


def fatbin_section(library: Path) -> tuple[int, int]:
    """File offset and size of `.nv_fatbin`."""
    shown = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+[0-9a-f]+\s+([0-9a-f]+)\s+([0-9a-f]+)", shown)
    if found is None:
        raise SystemExit(f"{library} has no .nv_fatbin section: it is not a library with CUDA code")
    return int(found[1], 16), int(found[2], 16)


def members(data: mmap.mmap, start: int, size: int) -> Iterator[Member]:
    """Every embedded binary and its payload's place, in file order. Containers are aligned to 8 bytes."""
    position, end = start, start + size
    while position + CONTAINER.size <= end:
        magic, _, header, length = CONTAINER.unpack_from(data, position)
        if magic != CONTAINER_MAGIC:
            position += 8
            continue
        inner, inner_end = position + header, position + header + length
        while inner < inner_end:
            kind, _, member_header, payload, _, _, _, _, arch = MEMBER.unpack_from(data, inner)
            if member_header == 0 or inner + member_header + payload > inner_end:
                raise SystemExit(f"unknown layout at offset {inner}: this CUDA release packs its binaries differently")
            yield Member(KINDS.get(kind, str(kind)), arch, inner + member_header, payload)
            inner += member_header + payload
        position = (inner_end + 7) & ~7


def slim(library: Path, output: Path, keep: Sequence[int]) -> Counter[str]:
    """Write the slimmed copy; returns bytes found for each `kind arch`, kept or not."""
    start, size = fatbin_section(library)
    output.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, output)
    sizes: Counter[str] = Counter()
    with output.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        found = list(members(data, start, size))
        if not any(m.kind == "elf" and m.arch in keep for m in found):
            available = sorted({m.arch for m in found if m.kind == "elf"})
            raise SystemExit(f"no code for architecture {list(keep)} in {library}; it has {available}")
        for member in found:
            kept = member.kind == "elf" and member.arch in keep
            sizes[f"{member.kind} {member.arch} {'kept' if kept else 'emptied'}"] += member.size
            if not kept:
                data[member.offset : member.offset + member.size] = bytes(member.size)
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--keep", type=int, nargs="+", default=[90], metavar="ARCH", help="80 = A100, 90 = H100/H200")
    options = parser.parse_args(argv)
    if not options.library.is_file():
        raise SystemExit(f"{options.library} is not a file")
    for what, size in sorted(slim(options.library, options.output, options.keep).items()):
        print(f"{what}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
