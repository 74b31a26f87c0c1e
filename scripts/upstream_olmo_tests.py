#!/usr/bin/env python3
"""Run OLMo's test suite three times: stock, with olmo-lns registered, and with LNS as the default norm.

    OLMO_SRC=path/to/OLMo python scripts/upstream_olmo_tests.py [--out DIR] [-- pytest arguments]

Exit code 1 if the outcome of a test differs from stock OLMo and EXPECTED does not list the difference. Each run uses a
copy of the checkout, with one of its tokenizers in place of those on the hub. DIR (default
build/upstream-olmo/<checkout>) receives JUnit files and logs. This file is also the pytest plugin of the three runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MODES = ("stock", "registered", "lns")
#: Tests that are not run: pattern of the node id -> reason.
DESELECTED = {
    r"grad_norm_test\.py::test_olmo_optimizer_and_clipping_cpu": "7 GB and minutes a run (4,096 tokens over 50,304 "
    "logits, two models); tests/upstream/olmo/test_launch.py compares optimizer and clipping to the bit",
}
#: Outcomes that may differ from stock: (mode, pattern of the test id) -> reason.
EXPECTED = {
    ("lns", r"initialization_test::test_olmo_\w*(mitchell|full_megatron)"): "asserts the depth factor of scaled "
    "initialization, which selecting LNS turns off; passes with OLMO_LNS_INITIALIZATION=upstream",
}
Run = dict[str, tuple[str, str]]


def pytest_configure(config: Any) -> None:
    mode = os.environ["UPSTREAM_MODE"]
    if mode != "stock":
        importlib.import_module("olmo_lns.hook").install()
    olmo = importlib.import_module("olmo.config")
    is_registered = "lns" in olmo.LayerNormType.__members__
    if is_registered != (mode != "stock"):
        raise RuntimeError(f"mode {mode}, but the lns types are {'registered' if is_registered else 'missing'}")
    if mode == "lns":
        _make_lns_default(olmo)
    tokenizer = importlib.import_module("olmo.tokenizer").Tokenizer
    original = tokenizer.from_pretrained.__func__

    def from_pretrained(cls: Any, identifier: str, **kwargs: Any) -> Any:
        if os.path.exists(identifier):
            return original(cls, identifier, **kwargs)
        # A vocabulary of 50,280 fits OLMo's default embedding_size of 50,304.
        return cls.from_file(os.environ["UPSTREAM_TOKENIZER"], **{"eos_token_id": 50256, **kwargs})

    tokenizer.from_pretrained = classmethod(from_pretrained)


def _make_lns_default(olmo: Any) -> None:
    """Make LNS the default norm type of ``ModelConfig``, both of the dataclass and of its OmegaConf schema."""
    value = olmo.LayerNormType[f"lns_{olmo.ModelConfig.layer_norm_type}"]
    olmo.ModelConfig.layer_norm_type = value
    olmo.ModelConfig.__dataclass_fields__["layer_norm_type"].default = value
    init = olmo.ModelConfig.__init__

    def with_lns(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs if args else {"layer_norm_type": value, **kwargs}))

    olmo.ModelConfig.__init__ = with_lns


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    deselected = [item for item in items if any(re.search(pattern, item.nodeid) for pattern in DESELECTED)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        # v0.6.0 passes tensors to random.seed(), which Python 3.11 refuses. Pass the same numbers as integers.
        if hasattr(parameters.get("seed"), "item"):
            parameters["seed"] = int(parameters["seed"])


def run(mode: str, source: Path, out: Path, arguments: list[str]) -> None:
    """Write ``<out>/<mode>.xml`` and ``.log``. OLMo's tests write into their fixtures, so each run has a copy."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = shutil.copytree(source, Path(scratch) / "OLMo", ignore=shutil.ignore_patterns(".git"))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(copy), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "UPSTREAM_TOKENIZER": str(copy / "test_fixtures/test-olmo-model/tokenizer.json"),
            "UPSTREAM_MODE": mode,
            "OLMO_LNS_DISABLE": "1" if mode == "stock" else "0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", Path(__file__).stem]
        command += ["--continue-on-collection-errors", "--junitxml", str(out / f"{mode}.xml"), *arguments, "tests"]
        with open(out / f"{mode}.log", "w") as log:  # a failing test is a result, not an error
            subprocess.run(command, cwd=copy, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"{mode}: {(out / f'{mode}.log').read_text().splitlines()[-1]}", flush=True)


def outcomes(path: Path) -> Run:
    """Return the outcome and the message of each test id in a JUnit file."""
    results = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome, message = "passed", ""
        for kind, name in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if (element := case.find(kind)) is not None:
                outcome, message = name, re.sub(r"\s+", " ", element.get("message") or "")[:160]
        results[f"{case.get('classname', '')}::{case.get('name')}"] = (outcome, message)
    return results


def report(runs: dict[str, Run]) -> int:
    """Print the counts and the differences, and return the number of unexpected differences."""
    unexpected, groups = 0, Counter[str]()
    for mode, results in runs.items():
        print(mode, dict(Counter(outcome for outcome, _ in results.values())))
        for test in dict.fromkeys([*runs["stock"], *results]):
            stock_outcome, _ = runs["stock"].get(test, ("absent", ""))
            outcome, message = results.get(test, ("absent", ""))
            if outcome != stock_outcome:
                reasons = [why for (where, name), why in EXPECTED.items() if where == mode and re.search(name, test)]
                unexpected += not reasons
                reason = reasons[0] if reasons else f"NOT EXPECTED: {message}"
                groups[f"{mode}: {test.partition('[')[0]}, {stock_outcome} in stock, {outcome}: {reason}"] += 1
    for text, count in groups.items():
        print(f"{count} x {text}")
    return unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("arguments", nargs="*", help="arguments for pytest")
    options = parser.parse_args()
    source = Path(os.environ.get("OLMO_SRC", ""))
    if not (source / "tests").is_dir():
        parser.error("OLMO_SRC must name an OLMo checkout with tests/")
    out = (options.out or Path(__file__).parents[1] / "build" / "upstream-olmo" / source.name).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for mode in MODES:
        run(mode, source, out, options.arguments)
    unexpected = report({mode: outcomes(out / f"{mode}.xml") for mode in MODES})
    print(f"{unexpected} unexpected differences; logs in {out}")
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
