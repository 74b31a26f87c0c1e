"""Compare the three runs of ``upstream_olmo_tests.sh`` test by test, and write ``report.md``."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

MODES = ("stock", "registered", "lns")

#: Tests that are not run at all: pattern of the node id -> (OLMo versions, reason).
DESELECTED: dict[str, tuple[str, str]] = {
    r"grad_norm_test\.py::test_olmo_optimizer_and_clipping_cpu": (
        "v0.6.0, main",
        "7 GB and minutes of CPU a run (4,096 tokens over 50,304 logits, two models); optimizer and clipping are "
        "compared to the bit by tests/upstream/olmo/test_wheel_launch.py",
    ),
}

#: Tests whose outcome may differ from stock: (mode, pattern of the test id) -> (OLMo versions, reason).
EXPECTED: dict[tuple[str, str], tuple[str, str]] = {
    ("lns", r"initialization_test::test_olmo_\w*(mitchell|full_megatron)"): (
        "v0.6.0, main",
        "asserts the depth factor of scaled initialization, which selecting LNS turns off; passes with "
        "OLMO_LNS_INITIALIZATION=upstream",
    ),
}


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """Test id -> (outcome, first line of the message), from a JUnit file."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome, message = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                outcome = name
                lines = (element.get("message") or "").strip().splitlines()
                # A collection error's message says nothing; its text ends with the exception.
                if name == "error" and lines and "collection" in lines[0] and element.text:
                    lines = element.text.strip().splitlines()[-1:]
                message = re.sub(r"^E\s+", "", lines[0]) if lines else ""
        found[f"{case.get('classname', '')}::{case.get('name')}"] = (outcome, message)
    return found


def expected(mode: str, test: str) -> tuple[str, str] | None:
    return next((why for (m, pattern), why in EXPECTED.items() if m == mode and re.search(pattern, test)), None)


def differences(runs: dict[str, dict[str, tuple[str, str]]]) -> list[tuple[str, str, str, str, str]]:
    """(mode, test, stock outcome, outcome, message) wherever a run differs from stock."""
    tests = dict.fromkeys(test for run in runs.values() for test in run)
    found = []
    for mode in MODES[1:]:
        for test in tests:
            before, after = (run.get(test, ("absent", ""))[0] for run in (runs["stock"], runs[mode]))
            if before != after:
                found.append((mode, test, before, after, runs[mode].get(test, ("", ""))[1]))
    return found


def cell(text: str, length: int = 160) -> str:
    clean = re.sub(r"\s+", " ", text).replace("|", "\\|")
    return clean if len(clean) <= length else clean[: length - 1] + "…"


def deselections() -> str:
    lines = ["Not run (pattern of the test id, versions, reason):", "", "| test | OLMo | why |", "|---|---|---|"]
    lines += [f"| `{pattern}` | {versions} | {why} |" for pattern, (versions, why) in DESELECTED.items()]
    return "\n".join(lines)


def report(name: str, runs: dict[str, dict[str, tuple[str, str]]]) -> str:
    lines = [f"## {name}", "", "| | passed | failed | error | skipped |", "|---|---|---|---|---|"]
    for mode, run in runs.items():
        count = Counter(outcome for outcome, _ in run.values())
        lines.append(f"| {mode} | {count['passed']} | {count['failed']} | {count['error']} | {count['skipped']} |")
    different = differences(runs)
    lines += ["", deselections()]
    lines += ["", "Outcomes that differ from stock:" if different else "No outcome differs from stock.", ""]
    if different:
        lines += ["| run | test | stock | outcome | why |", "|---|---|---|---|---|"]
        grouped: dict[tuple[str, ...], list[str]] = {}
        for mode, test, before, after, message in different:
            known = expected(mode, test)
            why = f"{known[1]} (OLMo {known[0]})" if known else f"**not expected**: {message}"
            grouped.setdefault((mode, test.partition("[")[0], before, after, cell(why, 300)), []).append(test)
        for (mode, name, before, after, why), tests in grouped.items():
            lines.append(f"| {mode} | `{cell(name)}` × {len(tests)} | {before} | {after} | {why} |")
        lines.append("")
    failing = {test: message for test, (outcome, message) in runs["stock"].items() if outcome in ("failed", "error")}
    if failing:
        lines += ["Not passing in stock either (so they show nothing here):", ""]
        groups: dict[str, list[str]] = {}
        for test, message in failing.items():
            groups.setdefault(cell(re.sub(r"0x[0-9a-f]+|(?<![\w.])/\S*/", "", message)), []).append(test)
        for message, tests in sorted(groups.items(), key=lambda item: -len(item[1])):
            names = ", ".join(f"`{cell(test)}`" for test in tests[:4]) + (" …" if len(tests) > 4 else "")
            lines.append(f"- {len(tests)} × {message or 'no message'}: {names}")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds stock.xml, registered.xml and lns.xml")
    parser.add_argument("--name", default="OLMo", help="heading of the report")
    args = parser.parse_args()
    runs = {mode: outcomes(args.folder / f"{mode}.xml") for mode in MODES}
    text = report(args.name, runs)
    (args.folder / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    bad = [row for row in differences(runs) if expected(row[0], row[1]) is None]
    print(f"{len(bad)} unexpected differences; report in {args.folder / 'report.md'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
