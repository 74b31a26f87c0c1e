#!/usr/bin/env python3
"""Time ``olmo_lns.apply`` and measure its memory, on models of the sizes that people train.

    python scripts/bench_apply.py                                 all cases, one thread
    python scripts/bench_apply.py wide moe --json apply.json      some cases, into a file
    python scripts/bench_apply.py --package ../old                another checkout of the package, to compare with

Each case runs in a process of its own. The seconds are those of one call; the seconds of CPU do not depend on what else
the machine does. The gigabytes are those that the process holds
at most during the call, beyond what it held before: its resident memory, and on CUDA what PyTorch allocates there. One
forward on the example is timed for comparison, except on the meta device. A case whose package is missing is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch

ROOT = Path(__file__).parents[1]


def _causal_lm(family: str, **sizes: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(use_cache=False, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def wide() -> Any:
    """24 blocks of width 1,024 (Llama)."""
    return _causal_lm("Llama", hidden_size=1024, intermediate_size=2736, num_hidden_layers=24, num_attention_heads=16)


def tiny() -> Any:
    """2 blocks of width 64 (Llama)."""
    return _causal_lm("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)


def real_7b() -> Any:
    """The shape of Llama 2 7B in bf16."""
    return _causal_lm("Llama", num_hidden_layers=32, dtype=torch.bfloat16)


def chunk() -> Any:
    """DINOv2 ViT-B/14 with its default of one chunk of 12 blocks."""
    from dinov2.models.vision_transformer import vit_base

    return vit_base(patch_size=14, img_size=224, init_values=1.0, block_chunks=1)


def moe() -> Any:
    """2 blocks of 369 million parameters with 8 experts (Mixtral)."""
    sizes = {"hidden_size": 2048, "intermediate_size": 7168, "num_local_experts": 8}
    return _causal_lm("Mixtral", num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, **sizes)


def meta_7b() -> Any:
    """The shape of Llama 2 7B in bf16, on the meta device."""
    with torch.device("meta"):
        return _causal_lm("Llama", num_hidden_layers=32).bfloat16()


def meta_moe() -> Any:
    """The shape of Mixtral 8x7B in bf16, on the meta device."""
    with torch.device("meta"):
        return _causal_lm("Mixtral").bfloat16()


def images(model: Any) -> Any:
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0), device="cpu")
    return model(pixels.to(next(model.parameters()).device))


#: Name -> how the model is made, its example, the package that it needs.
CASES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "wide": (wide, None, "transformers"),
    "chunk": (chunk, images, "dinov2"),
    "moe": (moe, None, "transformers"),
    "meta_7b": (meta_7b, None, "transformers"),
    "meta_moe": (meta_moe, None, "transformers"),
    "tiny": (tiny, None, "transformers"),
    "real_7b": (real_7b, None, "transformers"),
}
#: Cases that run only where they are named: to try the script, and of 14 GB.
ON_REQUEST = {"tiny", "real_7b"}


def _resident(which: str) -> float:
    """Return gigabytes of resident memory. :param which: ``VmRSS`` for now, ``VmHWM`` for the highest since a reset."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{which}:\s+(\d+) kB", status)[1]) / 1e6  # type: ignore[index]


def measure(name: str, device: str, threads: int) -> dict[str, Any]:
    """Build the model of a case and apply the scheme to it."""
    import olmo_lns
    from olmo_lns.errors import LNSError

    torch.set_num_threads(threads)
    build, example, _ = CASES[name]
    torch.manual_seed(0)
    with contextlib.nullcontext() if name.startswith("meta") else torch.device(device):
        model = build()
    row: dict[str, Any] = {"case": name, "model": build.__doc__.rstrip(".") if build.__doc__ else name}
    if not name.startswith("meta"):
        model = model.to(device).eval()
        ids = torch.zeros(1, 8, dtype=torch.long, device=device)
        with torch.no_grad():
            for _ in range(2):  # the second is timed
                start, cpu_start = time.perf_counter(), time.process_time()
                example(model) if example else model(ids)
                if device == "cuda":
                    torch.cuda.synchronize()
                row["forward_s"] = round(time.perf_counter() - start, 3)
                row["forward_cpu_s"] = round(time.process_time() - cpu_start, 3)
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
        before_cuda = torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before, start, cpu_start = _resident("VmRSS"), time.perf_counter(), time.process_time()
    try:
        olmo_lns.apply(model, example=example)
    except LNSError as error:
        row["refused"] = str(error)
    row["apply_s"] = round(time.perf_counter() - start, 2)
    row["apply_cpu_s"] = round(time.process_time() - cpu_start, 2)
    row["memory_gb"] = round(_resident("VmHWM") - before, 2)
    if device == "cuda":
        row["cuda_gb"] = round((torch.cuda.max_memory_allocated() - before_cuda) / 1e9, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"of {', '.join(CASES)}; default all but {', '.join(sorted(ON_REQUEST))}",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--package", type=Path, default=ROOT, help="folder that contains olmo_lns")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one case in this process
    args = parser.parse_args()
    if unknown := set(args.cases) - CASES.keys():
        parser.error(f"unknown case {', '.join(sorted(unknown))}; expected {', '.join(CASES)}")
    if args.here:
        print(json.dumps(measure(args.cases[0], args.device, args.threads)))
        return
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(args.package), os.environ.get("PYTHONPATH", "")])}
    rows = []
    for name in args.cases or [name for name in CASES if name not in ON_REQUEST]:
        if importlib.util.find_spec(CASES[name][2]) is None:
            print(f"{name}: skipped, {CASES[name][2]} is not installed")
            continue
        options = ["--device", args.device, "--threads", str(args.threads), "--here"]
        run = subprocess.run([sys.executable, __file__, name, *options], env=environment, stdout=subprocess.PIPE)
        if run.returncode:
            sys.exit(f"{name}: the process ended with {run.returncode}")
        row = json.loads(run.stdout.splitlines()[-1])
        rows.append(row)
        forward = ""
        if "forward_s" in row:
            forward = f"; one forward {row['forward_s']} s ({row['forward_cpu_s']} s of CPU)"
        cuda = f", {row['cuda_gb']} GB on CUDA" if "cuda_gb" in row else ""
        refused = f"; refused: {row['refused'][:150]}" if "refused" in row else ""
        seconds = f"{row['apply_s']} s ({row['apply_cpu_s']} s of CPU)"
        print(f"{row['model']}: {seconds}, {row['memory_gb']} GB{cuda}{forward}{refused}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
