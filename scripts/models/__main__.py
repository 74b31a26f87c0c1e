#!/usr/bin/env python
"""Run ``olmo_lns.apply`` on real models of many packages, against expectations that were written beforehand.

    python scripts/models                             every row that can be built here, as a table
    python scripts/models nanoGPT "timm *" -j 2       some rows
    python scripts/models --check                     build the models and test the expectations, without apply
    python scripts/models --json rows.json --markdown docs/any-model-table.md

Models from repositories are read from the folder ``$MODEL_SOURCES``, with checkouts named owner__repository.
Rows whose package or checkout is missing are reported as "not installed". Each model runs in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XFORMERS_DISABLED": "1"}  # before torch is imported

import rows  # noqa: E402
from expectation import NORMS, REFUSED, ROWS, Row  # noqa: E402

assert rows


#: Packages of several rows whose import takes longer than a row does, and what their rows import.
SLOW = {
    "timm": "torchvision timm einops",
    "litgpt": "litgpt",
    "torchtune": "torchtune.models.llama3",
    "monai": "monai.networks.nets",
    "diffusers": "diffusers.models.transformers diffusers.models.transformers.transformer_flux",
    "transformers": "transformers.models.llama.modeling_llama",
    "x-transformers": "x_transformers",
    "open_clip_torch": "open_clip.model",
}


def one(row: Row, check: bool, path: str) -> None:
    """Judge one row in a process of its own, without its output, and write the result."""
    from judge import judge

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    result = {"source": row.version(), "code": row.line()} | judge(row, check)
    Path(path).write_text(json.dumps(result))


def run(rows: list[Row], check: bool, jobs: int, limit: float) -> Iterator[dict]:
    """Judge rows in forked processes, since importing torch for each would take longer than most rows."""
    import torch

    torch.set_num_threads(1)
    for package, modules in SLOW.items():  # once, before all forks
        if sum(row.source == f"package:{package}" for row in rows) > 1 or (len(rows) > 9 and package == "timm"):
            for module in modules.split():
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
    fork, running, waiting = multiprocessing.get_context("fork"), [], list(rows)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                row = waiting.pop(0)
                start = {"name": row.name, "source": row.source, "why": row.why, "code": ": ".join(row.code)}
                start |= {"expected": row.verdict, "seconds": 0.0}
                if missing := row.unavailable():
                    yield start | {"verdict": "not installed", "found": missing}
                    continue
                path = Path(folder, f"{len(waiting)}.json")
                process = fork.Process(target=one, args=(row, check, str(path)))
                process.start()
                running.append((process, start, path, time.monotonic()))
            for entry in list(running):
                process, start, path, began = entry
                seconds = round(time.monotonic() - began, 1)
                if process.is_alive() and seconds < limit:
                    continue
                running.remove(entry)
                if process.is_alive():
                    process.kill()
                    result = {"verdict": "refused wrongly", "found": f"still running after {limit:.0f} s"}
                elif path.is_file():
                    result = json.loads(path.read_text())
                else:
                    result = {"verdict": "wrong", "found": f"the process ended with exit code {process.exitcode}"}
                yield start | result | {"seconds": seconds}
            time.sleep(0.05)


def short(text: str, width: int = 110) -> str:
    """Return one line of text for a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= width else text[: width - 1] + "…"


def expected(row: Row) -> str:
    """Return the cell that says what is expected."""
    if row.verdict == REFUSED:
        return "refused"
    names = ", ".join(f"`{name}`" for name in row.sites[0])
    last = ", ".join(f"`{name}`" for name in row.sites[-1])
    given = " with `norms=`" if row.verdict == NORMS else ""
    return f"accepted{given}: {names} … {last} (block {len(row.sites)})"


def cells(result: dict) -> list[str]:
    """Return the cells of a row of the table."""
    difference = f"{result['difference']:.1e}" if result.get("difference") is not None else ""
    row = ROWS[result["name"]]
    return [
        result["name"], result["source"], f"{expected(row)}. {row.why} ({result['code']})", short(result["found"]),
        difference, result["verdict"],
    ]  # fmt: skip


def markdown(results: list[dict]) -> str:
    """Return the table and its totals in Markdown."""
    counts = Counter(result["verdict"] for result in results)
    head = ["model", "source", "expected, and the code that shows it", "found", "relative difference", "verdict"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(cell.replace("\n", " ") for cell in cells(result)) + " |" for result in results]
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + "\n\n" + "\n".join(lines) + "\n"


def merged(results: list[dict], earlier: list[list[dict]]) -> list[dict]:
    """Add earlier results of rows that did not run now, the last file's first, and sort by row."""
    found = {}
    for result in itertools.chain(*earlier, results):
        if result["name"] in ROWS and (result["verdict"] != "not installed" or result["name"] not in found):
            found[result["name"]] = result
    return [found[name] for name in ROWS if name in found]


def main() -> None:
    """Run the rows that were named and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names or patterns of rows (default: all)")
    parser.add_argument(
        "--check", action="store_true", help="build and test the expectations only; apply is not called"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="rows that run at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one row")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--merge", nargs="*", default=[], help="take results of other rows from earlier --json files")
    parser.add_argument("--markdown", help="write the table into this file, between its two markers")
    arguments = parser.parse_args()
    patterns = arguments.names or ["*"]
    chosen = [row for name, row in ROWS.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if arguments.list:
        return print("\n".join(row.name for row in chosen))
    results = []
    for result in run(chosen, arguments.check, arguments.jobs, arguments.limit):
        results.append(result)
        if arguments.json:  # after each row, so that a run that is stopped leaves what it found
            Path(arguments.json).write_text(json.dumps(results, indent=1))
        weak = f"  [{result['weakest'][1]:.0e}]" if result.get("weakest") else ""
        difference = f" {result['difference']:.1e}" if result.get("difference") is not None else ""
        print(
            f"{result['verdict']:>17} {result['name']:<44} {result['expected']:<9}{difference}{weak} "
            f"{result['seconds']} s  {short(result['found'], 200)}  {result['code'][-60:] if arguments.check else ''}",
            flush=True,
        )
    results = merged(results, [json.loads(Path(path).read_text()) for path in arguments.merge])
    print(", ".join(f"{count} {verdict}" for verdict, count in Counter(r["verdict"] for r in results).most_common()))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))
    if arguments.markdown:
        path, begin, end = Path(arguments.markdown), "<!-- table -->\n", "<!-- end of table -->\n"
        text = path.read_text(encoding="utf-8")
        head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
        path.write_text(head + markdown(results) + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
