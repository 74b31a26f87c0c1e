#!/usr/bin/env python3
"""Time the norms: stock, stock then multiplied by the factor, and with the factor folded in.

    OMP_NUM_THREADS=1 python scripts/bench_norms.py --json docs/bench/norms-cpu.json
    python scripts/bench_norms.py --device cuda --json docs/bench/norms-h200.json

All implementations are timed in the same run, interleaved in random order; ratios are taken within each round.
On CUDA every call of a timed group reads another set of inputs, together larger than L2, and the group is replayed as
one CUDA graph, so that neither the cache nor Python's launch time enters the result (`--eager` for plain launches).
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import benchlib
import torch
import torch.nn.functional as F

from olmo_lns import lns_scale
from olmo_lns.norm import pytorch, transformer_engine

EPS = 1e-6
SCALE = lns_scale(7)
PHASES = ("forward", "backward", "both")
#: Tensors of the input's size that a perfect kernel moves: read x, write y; read dy and x, write dx.
TRAFFIC = {"forward": 2, "backward": 3, "both": 5}
SHAPES = {
    "cpu": [(8192, 512), (8192, 2048)],
    "cuda": [(rows, width) for width in (512, 768, 1024, 2048, 4096) for rows in (8192, 65536)],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def stock_olmo(width: int, device: torch.device) -> Norm:
    """OLMo's own RMSLayerNorm, with the weight handed in."""
    try:
        from olmo.config import ModelConfig
        from olmo.model import RMSLayerNorm
    except ImportError as error:
        raise SystemExit(f"OLMo cannot be imported ({error}): pip install 'olmo-lns[olmo]'") from None
    module = RMSLayerNorm(ModelConfig(d_model=width, layer_norm_eps=EPS, init_device="cpu", include_bias=False))

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module.weight = weight  # a Parameter: the module's forward reads it
        return module(x)

    return norm


def implementations(width: int, device: torch.device) -> dict[str, Norm]:
    """Name -> norm. ``X`` is a plain norm, ``X x s`` multiplies afterwards, ``ours (X)`` folds the factor into it."""
    stock = stock_olmo(width, device)
    norms: dict[str, Norm] = {
        "olmo": stock,
        "olmo x s": lambda x, w: stock(x, w) * SCALE,
        "torch": lambda x, w: F.rms_norm(x, (width,), w, EPS),
        "torch x s": lambda x, w: F.rms_norm(x, (width,), w, EPS) * SCALE,
        "ours (torch)": lambda x, w: pytorch.rms_norm(x, w, EPS, SCALE),
    }
    if device.type == "cuda":
        norms["ours (torch fused)"] = lambda x, w: pytorch.fused_rms_norm(x, w, EPS, SCALE)
        problem = transformer_engine.status().problem
        if problem:
            print(f"without Transformer Engine: {problem}")
        else:
            norms["te"] = lambda x, w: transformer_engine._rms_norm_op(x, w, EPS, x.dtype)[0]
            norms["te x s"] = lambda x, w: transformer_engine._rms_norm_op(x, w, EPS, x.dtype)[0] * SCALE
            norms["ours (te)"] = lambda x, w: transformer_engine.rms_norm(x, w, EPS, SCALE)
    return norms


@dataclass
class Inputs:
    """One set: input, weight and incoming gradient."""

    x: torch.Tensor
    weight: torch.Tensor
    dy: torch.Tensor


def make_inputs(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[Inputs]:
    """Enough sets that the oldest has left a 64 MB L2 (50 MB on H100, 60 MB on H200) when its turn comes again."""
    size = rows * width * dtype.itemsize
    count = max(2, -(-256_000_000 // size)) if device.type == "cuda" else 1
    factory: dict[str, Any] = {"dtype": dtype, "device": device}
    return [
        Inputs(
            torch.randn(rows, width, **factory).requires_grad_(),
            torch.nn.Parameter(torch.rand(width, **factory) + 0.5),
            torch.randn(rows, width, **factory),
        )
        for _ in range(count)
    ]


def work(norm: Norm, phase: str, inputs: Sequence[Inputs]) -> Callable[[], object]:
    """One call of the norm's phase on each input set."""
    if phase == "forward":
        return lambda: [norm(i.x, i.weight) for i in inputs]
    if phase == "both":
        return lambda: [torch.autograd.grad(norm(i.x, i.weight), (i.x, i.weight), i.dy) for i in inputs]
    outputs = [norm(i.x, i.weight) for i in inputs]
    return lambda: [
        torch.autograd.grad(y, (i.x, i.weight), i.dy, retain_graph=True) for y, i in zip(outputs, inputs, strict=True)
    ]


def as_graph(call: Callable[[], object], stream: torch.cuda.Stream, pool: Any) -> Callable[[], object]:
    """``call`` captured once and replayed; warmed up first, as capturing and Transformer Engine's plans demand."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        call()
    return graph.replay


def prepared(
    norms: dict[str, Norm], phase: str, inputs: Sequence[Inputs], graphs: bool
) -> dict[str, Callable[[], object]]:
    """What is timed. For graphs everything runs on the stream of the capture: autograd launches a backward on the
    stream of its forward, and another one would break the capture."""
    if not graphs:
        return {name: work(norm, phase, inputs) for name, norm in norms.items()}
    # One memory pool: each graph writes its temporaries before it reads them, and nobody looks at the results.
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return {name: as_graph(work(norm, phase, inputs), stream, pool) for name, norm in norms.items()}


def copy_bandwidth(rounds: int) -> float:
    """Bytes a second, read and written, of a device-to-device copy of 1 GB."""
    source = torch.empty(1_000_000_000, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = benchlib.interleaved({"copy": lambda: target.copy_(source)}, benchlib.cuda_seconds, rounds, 5)["copy"]
    return 2 * source.numel() / benchlib.spread(seconds)["median"]


def measure(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of every implementation and phase for one shape, and ratios to OLMo's stock norm."""
    torch.manual_seed(0)
    inputs = make_inputs(rows, width, dtype, device)
    on_cuda = device.type == "cuda"
    results: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        calls = prepared(implementations(width, device), phase, inputs, on_cuda and not options.eager)
        timer = benchlib.cuda_seconds if on_cuda else benchlib.CLOCKS[options.clock]
        seconds = benchlib.interleaved(calls, timer, options.rounds, options.warmup)
        for name, values in seconds.items():
            each = [value / len(inputs) for value in values]
            entry = {"microseconds": {k: v * 1e6 for k, v in benchlib.spread(each).items()}}
            entry["ratio_to_olmo"] = benchlib.ratio(values, seconds["olmo"])
            if name.startswith("ours"):
                plain = {"ours (te)": "te"}.get(name, "torch")
                entry["ratio_to_plain"] = benchlib.ratio(values, seconds[plain])
            if f"{name} x s" in seconds or name.endswith(" x s"):
                ours = {"te x s": "ours (te)", "te": "ours (te)"}.get(name)
                ours = ours or ("ours (torch fused)" if on_cuda else "ours (torch)")
                entry["ratio_to_ours"] = benchlib.ratio(values, seconds[ours])
            entry["gigabytes_per_second"] = (
                TRAFFIC[phase] * rows * width * dtype.itemsize / entry["microseconds"]["median"] / 1e3
            )
            results.setdefault(name, {})[phase] = entry
    return {"rows": rows, "width": width, "dtype": str(dtype).removeprefix("torch."), "results": results}


def table(report: dict[str, Any]) -> str:
    """Markdown: one line for each shape, dtype and implementation."""
    copy = report.get("copy_gigabytes_per_second")
    header = [
        "rows x width",
        "dtype",
        "norm",
        "forward µs",
        "backward µs",
        "both µs",
        "both / olmo (quartiles)",
        "both GB/s",
    ]
    header += ["forward % of copy", "backward % of copy"] if copy else []
    lines = []
    for case in report["cases"]:
        for name, phases in case["results"].items():
            line = [f"{case['rows']}x{case['width']}", case["dtype"], name]
            line += [f"{phases[phase]['microseconds']['median']:.0f}" for phase in PHASES]
            line += [benchlib.show(phases["both"]["ratio_to_olmo"]), f"{phases['both']['gigabytes_per_second']:.1f}"]
            if copy:
                line += [f"{100 * phases[p]['gigabytes_per_second'] / copy:.0f}" for p in ("forward", "backward")]
            lines.append(line)
    return benchlib.markdown(header, lines)


def aims(report: dict[str, Any]) -> list[str]:
    """One line for each aim and case: what was aimed at, what was measured, met or not."""
    lines = []
    on_cuda = "gpu" in report["environment"]
    for case in report["cases"]:
        results = {name: phases["both"] for name, phases in case["results"].items()}
        where = f"{case['rows']}x{case['width']} {case['dtype']}"
        ours = "ours (te)" if "ours (te)" in results else "ours (torch fused)" if on_cuda else "ours (torch)"
        multiplied = {"ours (te)": "te x s", "ours (torch fused)": "torch x s"}.get(ours, "olmo x s")
        factor, stock = (1.5, 0.4) if on_cuda else (1.15, 0.9)
        checks = [(f"{ours} / olmo", results[ours]["ratio_to_olmo"]["median"], "<=", stock)]
        checks.append((f"{multiplied} / {ours}", results[multiplied]["ratio_to_ours"]["median"], ">=", factor))
        if on_cuda:
            checks.append(
                (f"{ours} / the same kernel without the factor", results[ours]["ratio_to_plain"]["median"], "<=", 1.02)
            )
        if on_cuda and (case["rows"], case["width"], case["dtype"]) == (8192, 4096, "bfloat16"):
            for phase, share in (("forward", 0.85), ("backward", 0.75)):
                speed = case["results"][ours][phase]["gigabytes_per_second"]
                checks.append((f"{ours} {phase} / copy", speed / report["copy_gigabytes_per_second"], ">=", share))
        for what, value, sign, aim in checks:
            met = value <= aim if sign == "<=" else value >= aim
            lines.append(f"{where}: {what} = {value:.2f} (aim {sign} {aim}): {'met' if met else 'NOT met'}")
    return lines


def shape(text: str) -> tuple[int, int]:
    rows, _, width = text.partition("x")
    try:
        found = int(rows), int(width)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxWIDTH, for example 8192x512") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: rows and width must be at least 1")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="ROWSxWIDTH", help="default: by device")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--rounds", type=benchlib.positive, default=21)
    parser.add_argument("--warmup", type=benchlib.positive, default=3)
    parser.add_argument("--eager", action="store_true", help="CUDA: plain launches instead of a CUDA graph")
    benchlib.add_clock(parser)
    parser.add_argument("--json", type=benchlib.report_path, help="where to write the report")
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    report: dict[str, Any] = {"environment": benchlib.environment(device), "scale": SCALE, "cases": []}
    report["clock"] = "cuda events" if device.type == "cuda" else options.clock
    if device.type == "cuda":
        report["copy_gigabytes_per_second"] = copy_bandwidth(options.rounds) / 1e9
    for (rows, width), dtype in itertools.product(options.shapes or SHAPES[device.type], options.dtypes):
        report["cases"].append(measure(rows, width, DTYPES[dtype], device, options))
        print(f"{rows}x{width} {dtype} done", flush=True)
    report["aims"] = aims(report)
    benchlib.write(report, options.json)
    print(table(report), *report["aims"], sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
