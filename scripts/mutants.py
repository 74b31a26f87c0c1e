"""Does `make test-quick` notice the mistakes that matter? Each is made in a copy of the repository, never in place.

python scripts/mutants.py [name…]      exit 0: the tests pass as they are, and fail under every mutant
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "olmo_lns"
_FINAL_NORM = """
        if types.has_scheme(config.layer_norm_type):
            from olmo_lns.integrations.olmo import block

            block.scale_norm(self.transformer.ln_f, config.n_layers**-0.5)"""

#: Mutant -> (file in the package, text, what takes its place).
MUTANTS = {
    "depth off by one": (
        "integrations/olmo/block.py",
        "Site(scheme, block.layer_id + 1,",
        "Site(scheme, max(block.layer_id, 1),",
    ),
    "depth off by one in the formula": ("schemes/factor.py", "number ** -check", "(number + 1) ** -check"),
    "RMSNorm's bias unscaled": ("norm/pytorch.py", "fold(bias, scale, dtype=compute", "fold(bias, 1.0, dtype=compute"),
    "LayerNorm's bias unscaled": ("norm/pytorch.py", "fold(bias, scale, dtype=dtype)", "fold(bias, 1.0, dtype=dtype)"),
    "mismatch never raised": ("record.py", "if name not in allowed:", "if False:"),
    "scaled initialization kept": ("integrations/olmo/model.py", 'if wanted == "upstream":', "if True:"),
    "factor on the final norm": (
        "integrations/olmo/model.py",
        "        init(self, config, init_params)",
        f"        init(self, config, init_params){_FINAL_NORM}",
    ),
}


def copy_to(folder: Path) -> None:
    """The files that git knows, as they are in the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, names.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)


def quick_tests(folder: Path) -> tuple[bool, str]:
    """Whether they pass there, and in words how."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = ["make", "--no-print-directory", "test-quick", f"VENV={sys.prefix}", "SETUP=", "ARGS=-x"]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    took = f"{time.perf_counter() - started:.0f} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return True, f"passed, {took}"
    if failed is None:
        sys.exit(f"the quick tests did not run:\n{done.stdout}{done.stderr}")
    return False, f"killed by {failed[1]}, {took}"


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        passed, how = quick_tests(folder)
        print(f"{'no mutant':34}{how}", flush=True)
        sound = passed
        for mutant in sys.argv[1:] or MUTANTS:
            file, text, instead = MUTANTS[mutant]
            path = folder / PACKAGE / file
            original = path.read_text(encoding="utf-8")
            if original.count(text) != 1:
                sys.exit(f"{mutant}: {file} holds {text!r} {original.count(text)} times, expected once")
            path.write_text(original.replace(text, instead), encoding="utf-8")
            survived, how = quick_tests(folder)
            path.write_text(original, encoding="utf-8")
            print(f"{mutant:34}{'SURVIVED' if survived else how}", flush=True)
            sound &= not survived
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
