#!/usr/bin/env python3
"""Write docs/compatibility.md from the registries of versions that the integrations check at run time, and from RUNS.

python scripts/compatibility.py            # writes the page
python scripts/compatibility.py --check    # exit status 1 where the committed page is another
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import Sequence

from packaging.requirements import Requirement

from olmo_lns.integrations.megatron import upstream as megatron
from olmo_lns.integrations.olmo import upstream as olmo
from olmo_lns.integrations.olmo_core import upstream as olmo_core
from olmo_lns.integrations.patching import Target
from olmo_lns.norm import transformer_engine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
_TOO_NEW = transformer_engine.SUPPORTED[1]
#: Heading, package, extra that installs it, what was verified, what is replaced.
FRAMEWORKS: Sequence[tuple[str, str, str, str, Sequence[Target]]] = (
    ("OLMo", "ai2-olmo", "olmo", olmo.VERIFIED, olmo.TARGETS),
    ("OLMo-core", "ai2-olmo-core", "olmo-core", olmo_core.VERIFIED, olmo_core.TARGETS),
    ("Megatron-LM", "megatron-core", "megatron", ", ".join(megatron.VERSIONS), megatron.TARGETS),
    ("transformers", "transformers", "hf", "4.48.0 to 5.23.0", ()),
    ("Transformer Engine", "transformer-engine", "te", f"{transformer_engine.SUPPORTED[0]} to before {_TOO_NEW}", ()),
)


NOT_RUN = (
    "Not run: real Transformer Engine kernels (no GPU). OLMo-core 2.5.0 was verified before; PyPI no longer has it.",
)
#: What, with which environment, the command behind ``pytest -q``, what it printed.
RUNS: Sequence[tuple[str, str, str, str]] = (
    (
        "Megatron Core 0.19.2, from PyPI",
        "`pip install --no-deps --ignore-requires-python --target`, and triton",
        '-m "not slow and not gpu" tests/integrations/megatron',
        "175 passed, 3 skipped",
    ),
    (
        "Megatron Core main (22 August 2026)",
        "the checkout on `PYTHONPATH`, and triton",
        '-m "not slow and not gpu" tests/integrations/megatron',
        "176 passed, 2 skipped",
    ),
    (
        "Megatron-LM core_v0.14.0 and its `pretrain_gpt.py`",
        "`MEGATRON_LM_SRC`; pybind11, psutil",
        "tests/integrations/megatron/test_launch.py",
        "10 passed",
    ),
    (
        "Megatron-LM core_v0.16.1 and its `pretrain_gpt.py`",
        "the same",
        "tests/integrations/megatron/test_launch.py",
        "8 passed, 2 skipped",
    ),
    (
        "Megatron-LM main and its `pretrain_gpt.py`",
        "the same, and triton",
        '-k "not converter" tests/integrations/megatron/test_launch.py',
        "9 passed, 2 skipped",
    ),
    (
        "torch 2.15.0, PyPI's CUDA build on a CPU",
        "`pip install torch==2.15.0`, then `constraints.txt` without torch",
        '-m "not slow and not gpu" tests/schemes/test_factor.py tests/norm tests/test_record.py '
        "tests/integrations/olmo/test_model.py tests/integrations/olmo/test_initialization.py "
        "tests/integrations/transformers/test_apply.py",
        "315 passed",
    ),
    (
        "OLMo-core main (fa6c5014, 22 June 2026)",
        "`src` of the checkout on `PYTHONPATH`, and in `OLMO_CORE_SRC`",
        '-m "not slow and not gpu and not exhaustive" tests/integrations/olmo_core',
        "199 passed, 1 skipped",
    ),
    (
        "Megatron Bridge 0.3.1, from PyPI, over Transformer Engine 2.11.0's Python",
        "`PYTHONOPTIMIZE=1 TORCHDYNAMO_DISABLE=1`; nvidia-modelopt 0.47.0, transformers 4.57.6, triton 3.9.0",
        "tests/integrations/megatron/bridge_cases.py",
        "4 passed",
    ),
    (
        "Transformer Engine 2.20.2, its Python over a stand-in for its kernels",
        "`TE_VERSION=2.20.2 PYTHONOPTIMIZE=1`",
        "tests/integrations/megatron/te_cases.py",
        "15 passed",
    ),
)


def page() -> str:
    lines = [
        "# Compatibility",
        "",
        "<!-- python scripts/compatibility.py writes this page from the tables that are checked at run time. -->",
        "",
        f"Python {metadata.metadata('olmo-lns')['Requires-Python']}, torch {_accepted('torch', None)}.",
        "",
        "| framework | `pip install './olmo-lns[…]'` | accepts | verified |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | `{x}` | {p} {_accepted(p, x)} | {v} |" for name, p, x, v, _ in FRAMEWORKS]
    lines += [
        "",
        "## What was run",
        "",
        "The suite runs with `constraints.txt` and `constraints-olmo-core.txt`. These ran besides, on a CPU with",
        "Python 3.11 and torch 2.13.0 where nothing else stands, on 24 November 2026, with the tests of that day:",
        "",
        "| what | environment | `pytest -q` | printed |",
        "|---|---|---|---|",
        *(f"| {what} | {where} | `{command}` | {printed} |" for what, where, command, printed in RUNS),
        "",
        *NOT_RUN,
        "",
        "## What is replaced",
        "",
        "These functions are replaced, or the package relies on their source. Each is known by a fingerprint of its",
        "source in these versions. With another source a selected scheme is an error that names the function; with no",
        "scheme there is one warning. `OLMO_LNS_ALLOW_UNVERIFIED=1` goes on with code that nobody has read.",
        "`python scripts/fingerprints.py MODULE VERSION=SOURCE` prints the fingerprints of a source tree.",
    ]
    for name, _, _, _, targets in FRAMEWORKS:
        if targets:
            lines += ["", f"### {name}", "", "| function | versions |", "|---|---|"]
            lines += [f"| `{t.path}` | {', '.join(t.verified.values())} |" for t in targets]
    return "\n".join(lines) + "\n"


def _accepted(package: str, extra: str | None) -> str:
    """The range that the package's metadata asks for, for example ``>=0.5,<0.7``."""
    for text in metadata.requires("olmo-lns") or ():
        found = Requirement(text)
        wanted = found.marker is None or (extra is not None and f'extra == "{extra}"' in str(found.marker))
        if found.name == package and wanted and (extra is not None) == (found.marker is not None):
            return ",".join(sorted(map(str, found.specifier), key=lambda s: s.lstrip("<>=!~"))) or "any"
    raise SystemExit(f"the metadata of olmo-lns names no {package} for the extra {extra}; reinstall the package")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    made = page()
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
        print(f"{PAGE}: not what the registries say; run python scripts/compatibility.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
