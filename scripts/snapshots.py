#!/usr/bin/env python
"""Train a tiny GPT on many commits of Megatron-LM: with the flag, stock, and with a reference by hooks.

    python scripts/snapshots.py --git ../Megatron-LM --weekly main:78 --pp-every 5 --tags 'core_v0.1[2-9].*' -o rows.csv
    python scripts/snapshots.py -o rows.csv --table table.md

The script unpacks each commit with ``git archive``, also from a bare repository, and runs its ``pretrain_gpt.py`` three
times on the CPU for six iterations, in the Python of this script (which needs pybind11, psutil, and triton from core
0.18 on). A commit is right if its losses under ``--layernorm-scaling`` equal the reference's within 2e-5 and differ
from stock's by more than 100 times that difference. Commits that already have a row are skipped.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import hashlib
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import megatron_launch  # noqa: E402

FIELDS = ("name", "commit", "date", "version", "pp", "first", "last", "to_reference", "to_stock", "verdict", "reason")
ITERATIONS, TOLERANCE = 6, 2e-5
#: Run -> its flags and environment. The reference shares no code with the package, which is disabled there.
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "flag": (["--layernorm-scaling"], {}),
    "stock": ([], {"OLMO_LNS_DISABLE": "1"}),
    "reference": ([], {"OLMO_LNS_DISABLE": "1", "MEGATRON_REFERENCE": "1"}),
}


def git(repository: str, *arguments: str) -> str:
    """Return the output of a git command in ``repository``."""
    return subprocess.check_output(["git", "-C", repository, *arguments], text=True).strip()


def weekly(repository: str, branch: str, count: int) -> list[str]:
    """Return the last commit of each of the ``count`` weeks up to the end of a branch, newest first."""
    last = int(git(repository, "log", "-1", "--format=%ct", branch))
    times = [last - 7 * 24 * 3600 * week for week in range(count)]
    commits = [git(repository, "rev-list", "-1", "--first-parent", f"--before={time}", branch) for time in times]
    return list(dict.fromkeys(filter(None, commits)))


def releases(repository: str, pattern: str) -> list[str]:
    """Return the tags that match ``pattern``, without release candidates, oldest first."""
    tags = git(repository, "tag", "--sort=creatordate").splitlines()
    return [tag for tag in tags if fnmatch.fnmatch(tag, pattern) and re.fullmatch(r"core_v[\d.]+", tag)]


def unpack(repository: str, commit: str, folder: Path) -> None:
    """Unpack the files of a commit that a launch needs."""
    archive = subprocess.Popen(["git", "-C", repository, "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(
        ["tar", "-x", "--exclude=tests", "--exclude=docs", "-C", str(folder)], stdin=archive.stdout, check=True
    )
    if archive.wait():
        raise ValueError(f"{repository} has no commit {commit}")


def launch(tree: Path, flags: list[str], variables: dict[str, str], ranks: int) -> list[float]:
    """Run pretrain_gpt.py and return the loss of each iteration.

    :raises RuntimeError: an iteration is missing; the message is the last line that names an exception.
    """
    try:
        done = megatron_launch.pretrain(tree, *flags, ranks=ranks, **variables)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"still running after {error.timeout} s") from None
    if len(losses := done.losses()) != ITERATIONS:
        raise RuntimeError(reason(done.text))
    return losses


def build_helpers(tree: Path, cache: Path) -> None:
    """Build Megatron's data helpers once for each version of their source."""
    folder = tree / "megatron/core/datasets"
    built = cache / hashlib.sha256((folder / "helpers.cpp").read_bytes()).hexdigest()[:16]
    if not built.exists():
        megatron_launch.build_helpers(tree)
        shutil.copytree(folder, built, ignore=lambda path, names: [name for name in names if not name.endswith(".so")])
    for library in built.glob("*.so"):
        shutil.copy(library, folder)


def reason(text: str) -> str:
    """Return the last line of a log that begins with the name of an exception."""
    lines = [line.strip() for line in text.splitlines()]
    exception = re.compile(r"(\[rank\d\]: )?[\w.]*(?<!ChildFailed)(Error|Exception|Exit)\b.*")
    errors = [line for line in lines if exception.match(line)]
    return (errors or lines or ["no output"])[-1][:300]


def judge(tree: Path, ranks: int) -> dict[str, object]:
    """Run ``tree`` with the flag, stock and with the reference, and compare the losses."""
    losses: dict[str, list[float]] = {}
    for name in ("stock", "reference", "flag"):
        try:
            losses[name] = launch(tree, *RUNS[name], ranks)
        except RuntimeError as error:
            verdict = {"flag": "wrong", "stock": "no stock", "reference": "no reference"}[name]
            return {"verdict": verdict, "reason": str(error)}
    to_reference = max(abs(a - b) for a, b in zip(losses["flag"], losses["reference"], strict=True))
    to_stock = max(abs(a - b) for a, b in zip(losses["flag"], losses["stock"], strict=True))
    is_right = to_reference <= TOLERANCE and to_stock > 100 * max(to_reference, TOLERANCE)
    return {
        "first": losses["flag"][0], "last": losses["flag"][-1], "to_reference": f"{to_reference:.1e}",
        "to_stock": f"{to_stock:.1e}", "verdict": "right" if is_right else "wrong",
    }  # fmt: skip


def run_commit(repository: str, name: str, ranks: int, cache: Path) -> dict[str, object]:
    """Run one commit and return its row. :param cache: folder for files that several commits share."""
    commit, date = git(repository, "log", "-1", "--format=%H %cs", name).split()
    row: dict[str, object] = {"name": name, "commit": commit, "date": date, "pp": ranks}
    tree = Path(tempfile.mkdtemp(prefix="snapshot-"))
    try:
        unpack(repository, commit, tree)
        scope = runpy.run_path(str(tree / "megatron/core/package_info.py"))
        row["version"] = ".".join(str(scope[part]) for part in ("MAJOR", "MINOR", "PATCH")) + str(scope["PRE_RELEASE"])
        build_helpers(tree, cache)
        row |= judge(tree, ranks)
    except Exception as error:
        row |= {"verdict": "no stock", "reason": f"{type(error).__name__}: {error}"[:300]}
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return row


def table(rows: list[dict[str, str]]) -> str:
    """Return the rows as a Markdown table, releases first, then by date."""
    lines = ["| Megatron-LM | date | core | PP | to reference | to stock | |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (not row["name"].startswith("core_v"), row["date"])):
        name = row["name"] if row["name"].startswith("core_v") else f"main, {row['commit'][:10]}"
        cells = [name, row["date"], row["version"], row["pp"], row["to_reference"], row["to_stock"]]
        verdict = row["verdict"] + (f": {row['reason']}" if row["reason"] else "")
        lines.append(f"| {' | '.join(cells)} | {verdict.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return 1 if a commit is wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", help="commits, tags or branches; NAME@2 runs on two pipeline stages")
    parser.add_argument("--git", help="a checkout or a bare repository of Megatron-LM")
    parser.add_argument("--weekly", metavar="BRANCH:COUNT", help="the last commit of each of the last COUNT weeks")
    parser.add_argument("--pp-every", type=int, default=0, metavar="N", help="two pipeline stages for each Nth week")
    parser.add_argument("--tags", metavar="PATTERN", help="the matching tags of releases")
    parser.add_argument("-o", "--out", type=Path, required=True, help="CSV file")
    parser.add_argument("--table", type=Path, help="write the rows of the CSV file as Markdown")
    options = parser.parse_args()
    names = [(name.partition("@")[0], int(name.partition("@")[2] or 1)) for name in options.commits]
    if options.tags:
        names += [(tag, 1) for tag in releases(options.git, options.tags)]
    if options.weekly:
        branch, _, count = options.weekly.partition(":")
        every = options.pp_every or sys.maxsize
        commits = weekly(options.git, branch, int(count))
        names += [(name, 1 + (number % every == every - 1)) for number, name in enumerate(commits)]
    rows = list(csv.DictReader(options.out.open())) if options.out.exists() else []
    done = {(row["name"], row["pp"]) for row in rows}
    with tempfile.TemporaryDirectory() as cache, options.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not rows:
            writer.writeheader()
        for name, ranks in names:
            if (name, str(ranks)) not in done:
                row = run_commit(options.git, name, ranks, Path(cache))
                writer.writerow(row)
                file.flush()
                print(" ".join(str(row.get(field, "")) for field in FIELDS), flush=True)
    rows = list(csv.DictReader(options.out.open()))
    if options.table:
        options.table.write_text(table(rows))
    return int(any(row["verdict"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
