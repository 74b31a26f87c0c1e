#!/usr/bin/env python3
"""Which dtypes the norm kernels of a Transformer Engine library take, found on a machine without a GPU.

    python scripts/gpu/probe_kernels.py 2.11.0 LIBRARY tests/support/te_kernels.json

Every function is called, on host tensors and in a forked process, with every combination of fp32, fp16 and bf16. The
library first checks the dtypes and looks its kernel up, and only then asks CUDA for a device, which fails: so a CUDA
error says that there is a kernel. LIBRARY is `libtransformer_engine.so` of a `transformer_engine_cu12` or `_cu13`
wheel; the CUDA libraries that it links to must be installed (a CUDA build of torch brings them).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing may run

import torch
from te_ctypes import TO_NVTE, Norms

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = ((8, 512), (7, 71))  # a width with tuned kernels, and one that takes the general ones
REFUSALS = ("Unavailable kernel", "dz.data.dtype == gamma.data.dtype")


class OnHost(Norms):
    """The binding of te_ctypes.py without asking for a device."""

    def _device(self) -> tuple[int, None]:
        return 132, None


def arguments(name: str, shape: tuple[int, int], dtypes: tuple[str, str, str]) -> list[Any]:
    """Those of `transformer_engine_torch`. ``dtypes``: forward x, gamma, y; backward dz, x, gamma."""
    a, b, c = (DTYPES[dtype] for dtype in dtypes)
    row, layer = torch.zeros(shape[0]), name.startswith("layer")
    if name.endswith("fwd"):
        gamma = torch.zeros(shape[1], dtype=b)
        return [torch.zeros(shape, dtype=a), gamma, *[gamma] * layer, 1e-6, None, None, TO_NVTE[c], 0, False]
    gamma = torch.zeros(shape[1], dtype=c)
    return [torch.zeros(shape, dtype=a), torch.zeros(shape, dtype=b), *[row] * layer, row, gamma, 0, False]


def has_kernel(norms: Norms, name: str, given: list[Any]) -> bool:
    """Whether the function takes these arguments; RuntimeError for an answer of another kind."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # a failed check ends the process and says why on stderr
        os.dup2(writer, 2)
        try:
            getattr(norms, name)(*given)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if "CUDA Error" in said:
        return True
    if any(refusal in said for refusal in REFUSALS):
        return False
    raise RuntimeError(f"{name} said neither that it has a kernel nor that it has none: {said!r}")


def probe(norms: Norms) -> dict[str, list[str]]:
    """Function -> the combinations that it takes, in the order of ``arguments``."""
    found = {}
    for name in ("rmsnorm_fwd", "rmsnorm_bwd", "layernorm_fwd", "layernorm_bwd"):
        every = list(itertools.product(DTYPES, repeat=3))
        tables = [[" ".join(d) for d in every if has_kernel(norms, name, arguments(name, s, d))] for s in SHAPES]
        if tables[0] != tables[1]:
            raise RuntimeError(f"{name} takes {tables[0]} at shape {SHAPES[0]} but {tables[1]} at {SHAPES[1]}")
        found[name] = tables[0]
    return found


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    version, library, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if not library.is_file():
        raise SystemExit(f"{library} is not a file: give the path of libtransformer_engine.so")
    tables = json.loads(output.read_text()) if output.exists() else {}
    tables[version] = probe(OnHost(library))
    output.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
