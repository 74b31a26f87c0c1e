#!/usr/bin/env python3
"""Write the tables of docs/benchmarks.md and docs/kernels.md from the reports in docs/bench.

    python scripts/bench_docs.py           write
    python scripts/bench_docs.py --check   fail where a page differs from the reports

A report is what scripts/bench.py or scripts/gpu_day.py wrote. What a report does not have is not printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Iterator, Sequence

DOCS = Path(__file__).parents[1] / "docs"
HEADER = "| case | arm | ms | / stock (95 % interval) | / stock, then multiplied |\n| --- | --- | --- | --- | --- |"
MULTIPLIED = "stock, then multiplied"
Ratio = Sequence[float]


def commit() -> str:
    """Return the commit of this repository. A copy without its history has it in ``SOURCE_COMMIT``."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(git, cwd=DOCS, capture_output=True, text=True, check=False).stdout.strip()
    return described or os.environ.get("SOURCE_COMMIT", "")


def interval(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return "1" if tuple(ratio) == (1, 1, 1) else f"{ratio[0]:.3f} ({ratio[1]:.3f}–{ratio[2]:.3f})"


def cells(case: str, arm: str, result: dict[str, Any]) -> str:
    """Return the line of one arm in a table under :data:`HEADER`."""
    ratios = f"{interval(result['ratio'])} | {interval(result.get('ratio_to_multiplied'))}"
    return f"| {case} | {arm} | {result['milliseconds']:.3g} | {ratios} |"


def table(report: dict[str, Any]) -> str:
    """Return the table of a report of scripts/bench.py: a line for each case and arm."""
    lines = [cells(case, arm, result) for case, arms in report["cases"].items() for arm, result in arms.items()]
    return "\n".join([HEADER, *lines])


def machine(environment: dict[str, Any]) -> str:
    """Return where a report was measured, in a sentence."""
    names = {"torch": "torch", "transformer_engine": "Transformer Engine"}
    versions = [f"{name} {environment[key]}" for key, name in names.items() if environment.get(key)]
    where = environment.get("device", "A machine whose device is unknown")
    if threads := environment.get("threads") if environment.get("device_type") != "cuda" else None:
        where += ", one thread" if threads == 1 else f", {threads} threads"
    commit = f"commit {environment['commit']}"
    return f"{'; '.join([where, ', '.join(versions), commit])}; `{environment['command']}`"


def kind(case: str) -> str:
    """Return what a case is, without its shape: ``norm, fp32, eager``."""
    words = [case.split()[0], "bf16" if "bf16" in case else "fp32", "compiled" if "compiled" in case else "eager"]
    return ", ".join(words + ["FSDP2"] * ("FSDP2" in case))


def summary(report: dict[str, Any]) -> str:
    """Return a table with a line for each kind of case: lowest and highest ratio, ends of their intervals."""
    columns = {
        "LNS / stock": ("lns", "ratio"),
        "LNS with Transformer Engine / stock": ("lns, te", "ratio"),
        "stock, then multiplied / stock": (MULTIPLIED, "ratio"),
        "LNS / stock, then multiplied": ("lns", "ratio_to_multiplied"),
        "LNS with Transformer Engine / stock, then multiplied": ("lns, te", "ratio_to_multiplied"),
        "stock, measured twice": ("stock, again", "ratio"),
    }
    kinds: dict[str, list[dict[str, Any]]] = {}
    for case, arms in report["cases"].items():
        kinds.setdefault(kind(case), []).append(arms)
    measured = {
        name: {label: [arms[arm][key] for arms in cases if key in arms.get(arm, {})] for label, cases in kinds.items()}
        for name, (arm, key) in columns.items()
    }
    measured = {name: ratios for name, ratios in measured.items() if any(ratios.values())}
    lines = [["", *measured], ["---"] * (1 + len(measured))]
    lines += [[label, *(_range(ratios[label]) for ratios in measured.values())] for label in kinds]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(ratios: list[Ratio]) -> str:
    if not ratios:
        return ""
    if len(ratios) == 1:
        return interval(ratios[0])
    medians, low, high = [ratio[0] for ratio in ratios], min(ratio[1] for ratio in ratios), max(r[2] for r in ratios)
    return f"{min(medians):.2f} to {max(medians):.2f} ({low:.2f}–{high:.2f})"


def verdicts(report: dict[str, Any]) -> str:
    """Return sentences that say in how many cases LNS took longer, shorter, or neither."""
    sentences = []
    bases = {"the stock norm": "ratio", "the stock norm followed by a multiplication": "ratio_to_multiplied"}
    for what, key in bases.items():
        norms = [arms["lns"] for case, arms in report["cases"].items() if case.startswith("norm")]
        ratios = [result[key] for result in norms if key in result]
        if ratios:
            counts = {
                "took longer": sum(low > 1 for _, low, _ in ratios),
                "took less time": sum(high < 1 for *_, high in ratios),
                "did not differ measurably": sum(low <= 1 <= high for _, low, high in ratios),
            }
            *first, last = [f"{outcome} in {count}" for outcome, count in counts.items() if count]
            clauses = f"{', '.join(first)} and {last}" if first else last
            sentences.append(f"We compared the norm with LNS and {what} in {len(ratios)} cases. LNS {clauses}.")
    return " ".join(sentences)


def reports(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the title and the report of each measurement of scripts/bench.py in a file."""
    if "cases" in data:
        yield "", data
    for name, part in data.get("parts", {}).items():
        if "cases" in (part.get("result") or {}):
            yield f", {name}", part["result"]


def parts_table(data: dict[str, Any]) -> str:
    """Return the table of what scripts/gpu_day.py ran, with the reason of what failed."""
    lines = ["| part | outcome | seconds | budget |", "| --- | --- | --- | --- |"]
    for name, part in data["parts"].items():
        reason = f": {part['reason']}" if part.get("reason") else ""
        outcome = f"{part['status']}{reason}".replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {outcome} | {part['seconds']:.0f} | {part['budget']:.0f} |")
    return "\n".join(lines)


def apply_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of what scripts/bench_apply.py measured."""
    lines = ["| model | apply, s | of CPU, s | GB | GB on CUDA | one forward, s |", "| --- " * 6 + "|"]
    for row in rows:
        values = [row.get(key, "") for key in ("apply_s", "apply_cpu_s", "memory_gb", "cuda_gb", "forward_s")]
        refused = f" (refused: {row['refused'][:150]})" if "refused" in row else ""
        lines.append(f"| {row['model']}{refused} | {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def day(data: dict[str, Any]) -> str:
    """Return the sections of a report of scripts/gpu_day.py."""
    blocks = [machine(data["environment"]), parts_table(data)]
    for title, report in reports(data):
        blocks += [f"**{title.lstrip(', ')}**", table(report)]
        if losses := report.get("first_losses"):
            lines = ["| arm | first loss, sharded | whole |", "| --- | --- | --- |"]
            lines += [f"| {arm} | {both['sharded']:.6f} | {both['whole']:.6f} |" for arm, both in losses.items()]
            blocks.append("\n".join(lines))
    for name, part in data["parts"].items():
        if isinstance(part.get("result"), list):
            blocks += [f"**{name}**", apply_table(part["result"])]
    return "\n\n".join(blocks)


def benchmarks_page(files: dict[str, dict[str, Any]]) -> str:
    """Return docs/benchmarks.md."""
    blocks = [
        "# Benchmarks",
        "`scripts/bench_docs.py` writes this page from the reports in docs/bench. [Kernels](kernels.md) says what "
        "follows from them. Every arm runs once in each round. Times are medians over the rounds; ratios are taken "
        "within a round.",
    ]
    for name, data in files.items():
        body = day(data) if "parts" in data else f"{machine(data['environment'])}\n\n{table(data)}"
        blocks += [f"## docs/bench/{name}.json", body]
    return "\n\n".join(blocks) + "\n"


def kernels_block(files: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of docs/kernels.md."""
    blocks = []
    for name, data in files.items():
        for title, report in reports(data):
            where = "a GPU" if report["environment"].get("device_type") == "cuda" else "a CPU"
            source = f"docs/bench/{name}.json{title}"
            blocks += [f"On {where} ({source}): {machine(report['environment'])}.", summary(report)]
            if sentences := verdicts(report):
                blocks.append(sentences)
    measured = [report for data in files.values() for _, report in reports(data)]
    if not any(report["environment"].get("device_type") == "cuda" for report in measured):
        blocks.append("**Nothing was measured on a GPU.**")
    return "\n\n".join(blocks)


def pages() -> dict[Path, str]:
    """Return what the generated pages should contain."""
    paths = sorted((DOCS / "bench").glob("*.json"))
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    kernels = (DOCS / "kernels.md").read_text(encoding="utf-8")
    begin, end = "<!-- written by scripts/bench_docs.py -->", "<!-- until here -->"
    if kernels.count(begin) != 1 or kernels.count(end) != 1:
        raise SystemExit(f"docs/kernels.md has no generated part. Expected were the lines {begin} and {end}. Add them.")
    block = f"{begin}\n\n{kernels_block(files)}\n\n{end}"
    kernels = re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: block, kernels, flags=re.DOTALL)
    return {DOCS / "kernels.md": kernels, DOCS / "benchmarks.md": benchmarks_page(files)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page differs")
    check = parser.parse_args(argv).check
    for path, text in pages().items():
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            raise SystemExit(
                f"docs/{path.name} differs from what scripts/bench_docs.py writes. The page should match the reports "
                "in docs/bench. Run python scripts/bench_docs.py."
            )
        if not check:
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
