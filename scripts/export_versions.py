#!/usr/bin/env python3
"""Export with one version of transformers and load with another, in both directions, and print the table.

    python scripts/export_versions.py FOLDER_448 FOLDER_457 FOLDER_5 --markdown

A folder has one version of transformers with its tokenizers and huggingface_hub, without torch: ``pip install
--no-compile --no-deps --target FOLDER_448 transformers==4.48.3 'tokenizers<0.22' 'huggingface_hub<1'``. For the
installed version, a folder with nothing but its ``transformers-*.dist-info`` is enough. Each version builds a small
model of each case under LNS, saves it with its logits, and exports it. Then each version loads the exports of all
versions by transformers alone and runs ``olmo-lns verify EXPORT`` (A → B). It also loads the checkpoints under LNS of
the first and the last version, exports and verifies them (A ⇒ B). A cell is right if the logits equal those of the
model under LNS within 1e-5 of the largest and verify passes. Each version runs in two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=48, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2)
SIZES |= dict(rope_theta=5e5)
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16)
_WINDOW = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
#: Case -> family and settings, in the spelling of transformers 4, which all versions accept in a constructor.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, llama3": ("llama", dict(rope_scaling={**_LLAMA3, "original_max_position_embeddings": 64})),
    "llama, YaRN": ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=2.0))),
    "llama, YaRN, original length": ("llama", dict(rope_scaling=_YARN)),
    "gpt_neox": ("gpt_neox", dict(rotary_emb_base=5e5, rotary_pct=0.5)),
    "qwen2, windows in some layers": ("qwen2", _WINDOW),
    "mixtral": ("mixtral", dict(num_local_experts=4)),
    "olmo": ("olmo", {}),
    "gpt2": ("gpt2", {}),
}


def run_quietly(*arguments: object) -> tuple[int, str]:
    """Run a command of olmo-lns in this process. :returns: its exit code, and what it printed."""
    from olmo_lns.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(list(map(str, arguments)))
        except Exception as error:  # a bug of the command in this version, which is a cell of the table
            return 2, f"{type(error).__name__}: {error}"
    return code, out.getvalue()


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(0))).logits


def difference(model: Any, expected: Any) -> float:
    return float((logits(model) - expected).abs().max() / expected.abs().max())


def write(place: Path, cases: list[str]) -> dict[str, str]:
    """Save a model under LNS of each case, its logits and its export, in the folder of the running version.

    :returns: case -> warnings of the export, or the reason why there is none.
    """
    import torch
    import transformers as hf

    from olmo_lns.integrations.transformers import apply

    results = {}
    for case in cases:
        family, settings = CASES[case]
        torch.manual_seed(0)
        # A copy: a config changes the dictionaries that it is given.
        config = hf.CONFIG_MAPPING[family](**{**SIZES, **json.loads(json.dumps(settings))})
        model = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        model = apply(model, "lns", initialization="upstream", trained=True)
        folder = place / hf.__version__ / case
        model.save_pretrained(folder / "lns")
        torch.save(logits(model), folder / "logits.pt")
        code, printed = run_quietly("export", folder / "lns", folder / "export")
        warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
        results[case] = "; ".join(warnings) if code == 0 else printed.splitlines()[-1]
    return results


def load(folder: Path, expected: Any) -> str:
    """Load a checkpoint. :returns: ``right``, or what differs."""
    import transformers as hf

    try:
        found = difference(hf.AutoModelForCausalLM.from_pretrained(folder), expected)
    except Exception as error:  # of any kind: another version's loader
        return type(error).__name__
    return "right" if found <= 1e-5 else f"{found:.0e}"


def check(folder: Path, export: Path) -> str:
    """Load an export and verify it. :returns: ``right``, or what differs."""
    import torch

    found = load(export, torch.load(folder / "logits.pt"))
    code, _ = run_quietly("verify", export)
    return found if (found == "right") == (code == 0) else f"{found}, verify exits with {code}"


def read(place: Path, cases: list[str], writers: list[str]) -> dict[str, dict[str, str]]:
    """Check the exports of each version, and export the checkpoints of the first and the last one.

    :returns: direction, such as ``4.48.3 → 5.0.0`` -> case -> ``right`` or what differs.
    """
    import torch
    import transformers as hf

    from olmo_lns.integrations.transformers import register

    register()  # the checkpoints under LNS are loaded without the start-up hook as well
    reader, results = hf.__version__, {}
    for writer in writers:
        exports = results[f"{writer} → {reader}"] = {}
        again = results.setdefault(f"{writer} ⇒ {reader}", {})
        for case in cases:
            folder = place / writer / case
            exports[case] = check(folder, folder / "export")
            if writer == reader or writer not in (writers[0], writers[-1]):
                continue
            if (loaded := load(folder / "lns", torch.load(folder / "logits.pt"))) != "right":
                again[case] = f"loaded: {loaded}"
                continue
            out = folder / f"export-by-{reader}"
            code, printed = run_quietly("export", folder / "lns", out)
            again[case] = check(folder, out) if code == 0 else f"refused: {printed.splitlines()[-1][:80]}"
    return results


def in_version(folder: Path, *words: object) -> Any:
    """Run this script under the version of transformers in ``folder``; returns its result."""
    print(f"{time.strftime('%H:%M:%S')} {version_of(folder)} {words[0]}", file=sys.stderr)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        sys.exit(f"{folder}: {result.stderr.strip()[-2000:]}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def version_of(folder: Path) -> str:
    (metadata,) = folder.glob("transformers-*.dist-info")
    return metadata.name.removeprefix("transformers-").removesuffix(".dist-info")


def main() -> int:
    if sys.argv[1:2] in (["--write"], ["--read"]):
        place, cases, writers = Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
        print(json.dumps(write(place, cases) if sys.argv[1] == "--write" else read(place, cases, writers)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="a folder for each version of transformers")
    parser.add_argument("--cases", nargs="*", default=[], help="only these families, such as gpt_neox; default: all")
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/export.md")
    args = parser.parse_args()
    cases = [case for case, (family, _) in CASES.items() if not args.cases or family in args.cases]
    names = {version_of(folder): folder.resolve() for folder in args.folders}
    with tempfile.TemporaryDirectory() as place:
        words = (place, json.dumps(cases), json.dumps(list(names)))
        warned = [in_version(folder, "--write", *words) for folder in names.values()]
        columns = {k: v for folder in names.values() for k, v in in_version(folder, "--read", *words).items()}
    wrong = 0
    for case in cases:
        printed = next((each[case] for each in warned if each[case]), "")
        warning = printed.removeprefix("warning: ")
        cells = {name: column[case] for name, column in columns.items() if case in column}
        differing = [f"{name}: {cell}" for name, cell in cells.items() if cell != "right"]
        wrong += bool(differing and not printed.startswith("warning: "))
        row = (case, f"{len(cells) - len(differing)} of {len(cells)}", "; ".join(differing), warning)
        print("| " + " | ".join(row) + " |" if args.markdown else "\t".join(row))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
