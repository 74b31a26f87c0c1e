#!/usr/bin/env python
"""Train a tiny GPT on many commits of Megatron-LM: with the flag, stock, and with a reference by hooks.

    python scripts/snapshots.py --git ../Megatron-LM --weekly main:78 --pp-every 5 --tags 'core_v0.1[2-9].*' -o rows.csv
    python scripts/snapshots.py -o rows.csv --table table.md

Each commit is unpacked by ``git archive`` (a bare repository will do) and runs its own ``pretrain_gpt.py`` three times
on the CPU, six iterations each, in the Python that runs this script (it needs pybind11, psutil, and triton from core
0.18 on). A commit is right where the losses under ``--layernorm-scaling`` are those of the reference within 2e-5 and
differ from stock's by more than 100 times that difference. Rows are appended to the CSV file as they come; commits that
are in it already are skipped.
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
#: Run -> its flags and environment. The reference shares no code with the package, which is off in it.
RUNS: dict[str, tuple[list[str], dict[str, str]]] = {
    "flag": (["--layernorm-scaling"], {}),
    "stock": ([], {"OLMO_LNS_DISABLE": "1"}),
    "reference": ([], {"OLMO_LNS_DISABLE": "1", "MEGATRON_REFERENCE": "1"}),
}


def git(repository: str, *words: str) -> str:
    """The output of a git command in ``repository``."""
    done = subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def weekly(repository: str, branch: str, count: int) -> list[str]:
    """The last commit of each of the ``count`` weeks before the branch's last commit, newest first."""
    last = int(git(repository, "log", "-1", "--format=%ct", branch))
    moments = [last - 7 * 24 * 3600 * week for week in range(count)]
    found = [git(repository, "rev-list", "-1", "--first-parent", f"--before={moment}", branch) for moment in moments]
    return list(dict.fromkeys(filter(None, found)))


def releases(repository: str, pattern: str) -> list[str]:
    """The tags that match ``pattern``, without release candidates, oldest first."""
    tags = git(repository, "tag", "--sort=creatordate").splitlines()
    return [tag for tag in tags if fnmatch.fnmatch(tag, pattern) and re.fullmatch(r"core_v[\d.]+", tag)]


def unpack(repository: str, commit: str, folder: Path) -> None:
    """Unpack the parts of a commit that a launch needs."""
    archive = subprocess.Popen(["git", "-C", repository, "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(
        ["tar", "-x", "--exclude=tests", "--exclude=docs", "-C", str(folder)], stdin=archive.stdout, check=True
    )
    if archive.wait():
        raise ValueError(f"{repository} has no commit {commit}")


def launch(tree: Path, flags: list[str], variables: dict[str, str], ranks: int) -> list[float]:
    """Run pretrain_gpt.py; return the loss of each iteration.

    :raises RuntimeError: it did not train; the message is the last line that names an error.
    """
    try:
        done = megatron_launch.pretrain(tree, *flags, ranks=ranks, **variables)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"no end within {error.timeout} s") from None
    if len(losses := done.losses()) != ITERATIONS:
        raise RuntimeError(reason(done.text))
    return losses


def helpers(tree: Path, built: Path) -> None:
    """Build Megatron's data helpers, once for each version of their source."""
    folder = tree / "megatron/core/datasets"
    kept = built / hashlib.sha256((folder / "helpers.cpp").read_bytes()).hexdigest()[:16]
    if not kept.exists():
        megatron_launch.build_helpers(tree)
        shutil.copytree(folder, kept, ignore=lambda path, names: [name for name in names if not name.endswith(".so")])
    for library in kept.glob("*.so"):
        shutil.copy(library, folder)


def reason(text: str) -> str:
    """The last line of a log that begins with the name of an exception."""
    lines = [line.strip() for line in text.splitlines()]
    found = [
        line for line in lines if re.match(r"(\[rank\d\]: )?[\w.]*(?<!ChildFailed)(Error|Exception|Exit)\b.*", line)
    ]
    return (found or lines or ["no output"])[-1][:300]


def judge(tree: Path, ranks: int) -> dict[str, object]:
    """Do the three runs in ``tree``, and compare their losses."""
    losses: dict[str, list[float]] = {}
    for name in ("stock", "reference", "flag"):
        try:
            losses[name] = launch(tree, *RUNS[name], ranks)
        except RuntimeError as error:
            verdict = {"flag": "wrong", "stock": "no stock", "reference": "no reference"}[name]
            return {"verdict": verdict, "reason": str(error)}
    to_reference, to_stock = (
        max(abs(a - b) for a, b in zip(losses["flag"], losses[other], strict=True)) for other in ("reference", "stock")
    )
    right = to_reference <= TOLERANCE and to_stock > 100 * max(to_reference, TOLERANCE)
    return {
        "first": losses["flag"][0], "last": losses["flag"][-1], "to_reference": f"{to_reference:.1e}",
        "to_stock": f"{to_stock:.1e}", "verdict": "right" if right else "wrong",
    }  # fmt: skip


def one(repository: str, name: str, ranks: int, built: Path) -> dict[str, object]:
    """The row of one commit. :param built: a folder for what several commits share."""
    commit, date = git(repository, "log", "-1", "--format=%H %cs", name).split()
    row: dict[str, object] = {"name": name, "commit": commit, "date": date, "pp": ranks}
    tree = Path(tempfile.mkdtemp(prefix="snapshot-"))
    try:
        unpack(repository, commit, tree)
        scope = runpy.run_path(str(tree / "megatron/core/package_info.py"))
        row["version"] = ".".join(str(scope[part]) for part in ("MAJOR", "MINOR", "PATCH")) + str(scope["PRE_RELEASE"])
        helpers(tree, built)
        row |= judge(tree, ranks)
    except Exception as error:
        row |= {"verdict": "no stock", "reason": f"{type(error).__name__}: {error}"[:300]}
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return row


def table(rows: list[dict[str, str]]) -> str:
    """The rows as Markdown, releases first, then by date."""
    lines = ["| Megatron-LM | date | core | PP | to reference | to stock | |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (not row["name"].startswith("core_v"), row["date"])):
        name = row["name"] if row["name"].startswith("core_v") else f"main, {row['commit'][:10]}"
        cells = [name, row["date"], row["version"], row["pp"], row["to_reference"], row["to_stock"]]
        verdict = row["verdict"] + (f": {row['reason']}" if row["reason"] else "")
        lines.append(f"| {' | '.join(cells)} | {verdict.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """:returns: 1 where a commit is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="*", help="commits, tags or branches; NAME@2 runs on two pipeline stages")
    parser.add_argument("--git", help="a checkout or a bare repository of Megatron-LM")
    parser.add_argument("--weekly", metavar="BRANCH:COUNT", help="the last commit of each of the last COUNT weeks")
    parser.add_argument("--pp-every", type=int, default=0, metavar="N", help="two pipeline stages for each Nth week")
    parser.add_argument("--tags", metavar="PATTERN", help="the releases among the tags that match")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the CSV file")
    parser.add_argument("--table", type=Path, help="write the CSV file's rows as Markdown")
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
    with tempfile.TemporaryDirectory() as built, options.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not rows:
            writer.writeheader()
        for name, ranks in names:
            if (name, str(ranks)) not in done:
                row = one(options.git, name, ranks, Path(built))
                writer.writerow(row)
                file.flush()
                print(" ".join(str(row.get(field, "")) for field in FIELDS), flush=True)
    rows = list(csv.DictReader(options.out.open()))
    if options.table:
        options.table.write_text(table(rows))
    return int(any(row["verdict"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
