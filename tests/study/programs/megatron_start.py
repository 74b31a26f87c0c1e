"""A training script's start: Megatron's own parser and validation of its command line, on the GPUs that are named.

Run as ``python -m olmo_lns megatron_start.py --lns-config FILE`` with MEGATRON_LM_SRC set; prints one JSON object a GPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import typing

import torch
import typing_extensions

if not hasattr(typing, "override"):  # Megatron from 0.18 on declares Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]


def main() -> None:
    from olmo_lns.study.engines.megatron_args import parse

    flags = sys.argv[1:]
    for name, major in {"A100": 8, "H100": 9}.items():
        torch.cuda.get_device_properties = lambda device=None, major=major: type("Gpu", (), {"major": major})()  # type: ignore
        with contextlib.redirect_stdout(io.StringIO()):
            args = parse(flags)
        found = {key: getattr(args, key) for key in ("tensor_model_parallel_size", "sequence_parallel", "eval_iters")}
        print(json.dumps({"gpu": name, "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), **found}))


if __name__ == "__main__":
    main()
