#!/usr/bin/env python3
"""Time the norms: stock, stock then multiplied by the factor, and with the factor folded in.

    OMP_NUM_THREADS=1 python scripts/bench_norms.py --json docs/bench/norms-cpu.json
    python scripts/bench_norms.py --device cuda --json docs/bench/norms-h200.json

All implementations are timed in the same run, interleaved in random order; ratios are taken within each round. On CPU
a round calls small norms many times. On CUDA every call of a timed group reads another set of inputs, together larger
than L2, and the group is replayed as one CUDA graph, so that neither the cache nor Python's launch time enters the
result (``--eager`` for plain launches). Beside the times stand the bytes that each keeps for its backward.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import benchlib
import torch
from norm_contenders import KINDS, SCALE, Contender, contenders, kept_bytes

from olmo_lns.norm.kernels import running_kernel

#: ``inference`` is the forward without gradients.
PHASES = ("inference", "forward", "backward", "both")
#: Tensors of the input's size that a perfect kernel moves: read x, write y; read dy and x, write dx.
TRAFFIC = {"inference": 2, "forward": 2, "backward": 3, "both": 5}
SHAPES = {
    "cpu": [(1, 768), (16, 32), (64, 32), (512, 128), (512, 512), (2048, 512), (8192, 512), (8192, 2048)],
    "cuda": [(rows, width) for width in (512, 768, 1024, 2048, 4096) for rows in (8192, 65536)],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: On CPU a round works on about this many elements; a call weighs as much as 8,000.
ROUND_ELEMENTS = 200_000
CALL_ELEMENTS = 8_000


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


def calls(contender: Contender, phase: str, inputs: Sequence[Inputs], repeats: int) -> Callable[[], object]:
    """One call of the norm's phase on each input set, ``repeats`` times."""
    norms = [contender.build(i.weight) for i in inputs]
    pairs = list(zip(norms, inputs, strict=True)) * repeats

    @torch.no_grad()
    def inference() -> None:
        for norm, i in pairs:
            norm(i.x)

    def forward() -> None:
        for norm, i in pairs:
            norm(i.x)

    def both() -> None:
        for norm, i in pairs:
            torch.autograd.grad(norm(i.x), (i.x, i.weight), i.dy)

    if phase != "backward":
        return {"inference": inference, "forward": forward, "both": both}[phase]
    outputs = [(norm(i.x), i) for norm, i in zip(norms, inputs, strict=True)] * repeats

    def backward() -> None:
        for y, i in outputs:
            torch.autograd.grad(y, (i.x, i.weight), i.dy, retain_graph=True)

    return backward


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
    found: Mapping[str, Contender], phase: str, inputs: Sequence[Inputs], repeats: int, graphs: bool
) -> dict[str, Callable[[], object]]:
    """What is timed. For graphs everything runs on the stream of the capture: autograd launches a backward on the
    stream of its forward, and another one would break the capture."""
    if not graphs:
        return {name: calls(contender, phase, inputs, repeats) for name, contender in found.items()}
    # One memory pool: each graph writes its temporaries before it reads them, and nobody looks at the results.
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    replays = {}
    with torch.cuda.stream(stream):
        for name, contender in found.items():
            with contender.around():
                replays[name] = as_graph(calls(contender, phase, inputs, 1), stream, pool)
    return replays


def copy_bandwidth(rounds: int) -> float:
    """Bytes a second, read and written, of a device-to-device copy of 1 GB."""
    source = torch.empty(1_000_000_000, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = benchlib.interleaved({"copy": lambda: target.copy_(source)}, benchlib.cuda_seconds, rounds, 5)["copy"]
    return 2 * source.numel() / benchlib.spread(seconds)["median"]


#: The plain kernel that each of ours is made of.
PLAIN = {
    "ours (te)": "te",
    "ours (torch fused)": "torch",
    "ours (torch fused without quack)": "torch without quack",
    "ours (torch)": "torch",
}


def measure(
    kind: str, rows: int, width: int, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of every implementation and phase for one norm, shape and dtype, and ratios to OLMo's stock norm."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = make_inputs(rows, width, dtype, device)
    on_cuda = device.type == "cuda"
    graphs = on_cuda and not options.eager
    repeats = 1 if on_cuda else max(1, ROUND_ELEMENTS // (rows * width + CALL_ELEMENTS))
    found = contenders(kind, device, compiled=options.compiled or on_cuda, graphs=graphs)
    results: dict[str, dict[str, Any]] = {name: {} for name in found}
    for phase in options.phases:
        timer = benchlib.cuda_seconds if on_cuda else benchlib.CLOCKS[options.clock]
        work = prepared(found, phase, inputs, repeats, graphs)
        seconds = benchlib.interleaved(work, timer, options.rounds, options.warmup)
        for name, values in seconds.items():
            each = [value / len(inputs) / repeats for value in values]
            entry: dict[str, Any] = {"microseconds": {k: v * 1e6 for k, v in benchlib.spread(each).items()}}
            entry["ratio_to_olmo"] = benchlib.ratio(values, seconds["olmo"])
            if (plain := PLAIN.get(name)) in seconds:
                entry["ratio_to_plain"] = benchlib.ratio(values, seconds[plain])
            if name.endswith(" x s"):
                entry["ratio_to_ours"] = benchlib.ratio(values, seconds[_ours(name, seconds, on_cuda)])
            entry["gigabytes_per_second"] = (
                TRAFFIC[phase] * rows * width * dtype.itemsize / entry["microseconds"]["median"] / 1e3
            )
            results[name][phase] = entry
    for name, contender in found.items():
        results[name]["kept_bytes_per_element"] = kept_bytes(
            contender.build(inputs[0].weight), inputs[0].x, inputs[0].weight
        ) / (rows * width)
    case = {"norm": kind, "rows": rows, "width": width, "dtype": str(dtype).removeprefix("torch."), "results": results}
    if on_cuda:
        case["fused kernel"] = vars(running_kernel("torch-fused", device, width=width, dtype=dtype))
    return case


def _ours(multiplied: str, seconds: Mapping[str, Any], on_cuda: bool) -> str:
    """The one of ours that stands against a multiplication after the same kernel."""
    if multiplied == "te x s":
        return "ours (te)"
    return "ours (torch fused)" if on_cuda and "ours (torch fused)" in seconds else "ours (torch)"


def table(report: dict[str, Any]) -> str:
    """Markdown: one line for each norm, shape, dtype and implementation."""
    copy = report.get("copy_gigabytes_per_second")
    phases = report["phases"]
    header = ["rows x width", "dtype", "norm", *(f"{phase} µs" for phase in phases)]
    header += [f"{phase} / olmo (quartiles)" for phase in phases if phase in ("inference", "both")]
    header += ["kept B/element"]
    header += [f"{phase} % of copy" for phase in phases if phase in ("forward", "backward")] if copy else []
    lines = []
    for case in report["cases"]:
        for name, found in case["results"].items():
            line = [f"{case['rows']}x{case['width']}", case["dtype"], f"{case['norm']} {name}"]
            line += [f"{found[phase]['microseconds']['median']:.{_digits(found[phase])}f}" for phase in phases]
            line += [benchlib.show(found[p]["ratio_to_olmo"]) for p in phases if p in ("inference", "both")]
            line += [f"{found['kept_bytes_per_element']:.2f}"]
            if copy:
                speeds = [found[p]["gigabytes_per_second"] for p in phases if p in ("forward", "backward")]
                line += [f"{100 * speed / copy:.0f}" for speed in speeds]
            lines.append(line)
    return benchlib.markdown(header, lines)


def _digits(entry: Mapping[str, Any]) -> int:
    return 1 if entry["microseconds"]["median"] < 100 else 0


def aims(report: dict[str, Any]) -> list[str]:
    """One line for each aim and case: what was aimed at, what was measured, met or not."""
    lines = []
    on_cuda = "gpu" in report["environment"]
    for case in report["cases"]:
        where = f"{case['norm']} {case['rows']}x{case['width']} {case['dtype']}"
        for what, value, sign, aim in _cuda_checks(case, report) if on_cuda else _cpu_checks(case):
            met = value <= aim if sign == "<=" else value >= aim
            lines.append(f"{where}: {what} = {value:.2f} (aim {sign} {aim}): {'met' if met else 'NOT met'}")
    return lines


Check = tuple[str, float, str, float]


def _cpu_checks(case: Mapping[str, Any]) -> list[Check]:
    """Ours costs no more than stock at any size, forward and backward as well as without gradients."""
    return [
        (f"{ours} / olmo, {phase}", found[phase]["ratio_to_olmo"]["median"], "<=", 1.0)
        for ours, found in case["results"].items()
        for phase in ("inference", "both")
        if ours in ("ours (torch)", "ours (cpp)") and phase in found
    ]


def _cuda_checks(case: Mapping[str, Any], report: Mapping[str, Any]) -> list[Check]:
    results = case["results"]
    checks: list[Check] = []
    for ours, multiplied in (("ours (te)", "te x s"), ("ours (torch fused)", "torch x s")):
        both = results.get(ours, {}).get("both")
        if both is None:
            continue
        checks.append((f"{ours} / olmo", both["ratio_to_olmo"]["median"], "<=", 0.4))
        if multiplied in results:
            checks.append((f"{multiplied} / {ours}", results[multiplied]["both"]["ratio_to_ours"]["median"], ">=", 1.5))
        if "ratio_to_plain" in both:
            checks.append(
                (f"{ours} / the same kernel without the factor", both["ratio_to_plain"]["median"], "<=", 1.02)
            )
        if (case["rows"], case["width"], case["dtype"]) == (8192, 4096, "bfloat16"):
            for phase, share in (("forward", 0.85), ("backward", 0.75)):
                if phase in results[ours]:
                    speed = results[ours][phase]["gigabytes_per_second"]
                    checks.append((f"{ours} {phase} / copy", speed / report["copy_gigabytes_per_second"], ">=", share))
    return checks


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
    parser.add_argument("--norms", nargs="+", choices=KINDS, default=list(KINDS), metavar="rms|layer")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), metavar="PHASE")
    parser.add_argument("--rounds", type=benchlib.positive, default=21)
    parser.add_argument("--warmup", type=benchlib.positive, default=3)
    parser.add_argument(
        "--compiled", action="store_true", help="CPU: also the formula under torch.compile (CUDA: always)"
    )
    parser.add_argument("--eager", action="store_true", help="CUDA: plain launches instead of a CUDA graph")
    benchlib.add_clock(parser)
    parser.add_argument("--json", type=benchlib.report_path, help="where to write the report")
    options = parser.parse_args(argv)
    device = benchlib.require_device(options.device)
    report: dict[str, Any] = {"environment": benchlib.environment(device), "scale": SCALE, "cases": []}
    report["clock"] = "cuda events" if device.type == "cuda" else options.clock
    report["phases"] = options.phases
    if device.type == "cuda":
        report["copy_gigabytes_per_second"] = copy_bandwidth(options.rounds) / 1e9
    shapes = options.shapes or SHAPES[device.type]
    for kind, (rows, width), dtype in itertools.product(options.norms, shapes, options.dtypes):
        report["cases"].append(measure(kind, rows, width, DTYPES[dtype], device, options))
        print(f"{kind} {rows}x{width} {dtype} done", flush=True)
    report["aims"] = aims(report)
    benchlib.write(report, options.json)
    print(table(report), *report["aims"], sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
