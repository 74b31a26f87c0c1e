#!/usr/bin/env python3
"""Read the signatures of Transformer Engine's norm kernels from its source distributions.

    python scripts/gpu/parse_te_signatures.py --output tests/support/te_signatures.json

Downloads `transformer_engine_torch` with pip and reads `csrc/extensions.h` and `csrc/extensions/pybind.cpp`;
nothing is compiled. pip tries to compute the package's metadata, which fails for some releases where there is no
CUDA: the unpacked source is what is wanted, so that failure is of no consequence (`--no-clean` keeps the source).
Sources that are already unpacked can be given instead: `--source 2.11.0=FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

VERSIONS = ("2.1.0", "2.5.0", "2.11.0", "2.20.2")
FUNCTIONS = ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd")


def download(version: str, folder: Path) -> Path:
    """Unpacked source of one release."""
    requirement = f"transformer_engine_torch=={version}"
    flags = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-clean", "--dest", str(folder)]
    finished = subprocess.run(
        [sys.executable, "-m", "pip", "download", *flags, requirement],
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    headers = sorted(folder.glob("*/*/csrc/extensions.h"))
    if not headers:
        raise SystemExit(f"pip left no source of {requirement}:\n{finished.stdout}{finished.stderr}")
    return headers[0].parent.parent


def parse(source: Path) -> dict[str, dict[str, object]]:
    """Parameter names in order, their C++ types, and whether Python may pass them by keyword."""
    header = (source / "csrc/extensions.h").read_text()
    bindings = (source / "csrc/extensions/pybind.cpp").read_text()
    return {name: signature(name, header, bindings) for name in FUNCTIONS}


def signature(name: str, header: str, bindings: str) -> dict[str, object]:
    binding = re.search(rf'm\.def\("{name}",(.*?)\);', bindings, re.DOTALL)
    declaration = re.search(rf"\b{name}\(([^;]*?)\);", header, re.DOTALL)
    if binding is None or declaration is None:
        raise SystemExit(f"{name} is not declared and bound as expected: read the source and adapt this script")
    arguments = [" ".join(argument.split("=")[0].split()) for argument in declaration[1].split(",")]
    names = [re.split(r"[\s*&]+", argument)[-1] for argument in arguments]
    keywords = re.findall(r'py::arg\("(\w+)"\)', binding[1])
    if keywords and len(keywords) != len(names):
        raise SystemExit(f"{name}: {len(names)} C++ parameters but {len(keywords)} names in the binding")
    types = [argument[: -len(found)].strip() for argument, found in zip(arguments, names, strict=True)]
    return {"parameters": keywords or names, "types": types, "keywords": bool(keywords)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write (default: standard output)")
    parser.add_argument("--source", action="append", default=[], metavar="VERSION=FOLDER", help="unpacked source")
    parser.add_argument("--version", action="append", metavar="X.Y.Z", help=f"default: {', '.join(VERSIONS)}")
    options = parser.parse_args(argv)
    given = dict(item.split("=", 1) for item in options.source)
    versions = {}
    for version in options.version or VERSIONS:
        with tempfile.TemporaryDirectory() as scratch:
            versions[version] = parse(Path(given[version]) if version in given else download(version, Path(scratch)))
    text = json.dumps({"distribution": "transformer_engine_torch", "versions": versions}, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
