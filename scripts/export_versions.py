#!/usr/bin/env python3
"""Export with one version of transformers and load with another, in both directions, and print the table.

    python scripts/export_versions.py FOLDER_448 FOLDER_457 FOLDER_5 --markdown

A folder has one version of transformers with its tokenizers and huggingface_hub, without torch: ``pip install
--no-compile --no-deps --target FOLDER_448 transformers==4.48.3 'tokenizers<0.22' 'huggingface_hub<1'``. Each version
builds a small model of each family under LNS, saves it with its logits, and exports it. Then each version loads the
exports of all versions by transformers alone and runs ``olmo-lns verify EXPORT`` (A → B). The other versions also
export and verify the checkpoints of the first and the last version (A ⇒ B). A cell is right if the logits equal those
of the model under LNS within 1e-5 of the largest and verify passes.
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
from pathlib import Path
from typing import Any

SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=48, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=2)
_LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LONG = dict(type="longrope", short_factor=[1.0 + n / 4 for n in range(8)], long_factor=[2.0 + n for n in range(8)])
_WINDOW = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
_EXPERTS = dict(num_experts_per_tok=2, num_experts=4, moe_intermediate_size=16, head_dim=16)
#: Case -> family and settings, in the spelling of transformers 4, which all versions accept in a constructor.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(rope_theta=5e5)),
    "llama, tied": ("llama", dict(rope_theta=5e5, tie_word_embeddings=True)),
    "llama, llama3": ("llama", dict(rope_scaling={**_LLAMA3, "original_max_position_embeddings": 64})),
    "llama, linear": ("llama", dict(rope_scaling=dict(rope_type="linear", factor=2.0))),
    "llama, dynamic": ("llama", dict(rope_scaling=dict(rope_type="dynamic", factor=2.0))),
    "llama, YaRN": ("llama", dict(rope_scaling=dict(rope_type="yarn", factor=2.0))),
    "llama, YaRN, original length": (
        "llama",
        dict(rope_scaling=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=16)),
    ),
    "phi3, longrope": ("phi3", dict(original_max_position_embeddings=64, rope_scaling=_LONG)),
    "stablelm, half of each head": ("stablelm", dict(partial_rotary_factor=0.5)),
    "gpt_neox": ("gpt_neox", dict(rotary_emb_base=5e5, rotary_pct=0.5)),
    "modernbert, a base for each type of layer": (
        "modernbert-decoder",
        dict(global_rope_theta=5e5, local_rope_theta=1e3),
    ),
    "qwen2": ("qwen2", dict(rope_theta=5e5)),
    "qwen2, windows in some layers": ("qwen2", dict(rope_theta=5e5, **_WINDOW)),
    "mistral, windows": ("mistral", dict(rope_theta=5e5, sliding_window=8)),
    "mixtral": ("mixtral", dict(rope_theta=5e5, num_local_experts=4)),
    "qwen3_moe": ("qwen3_moe", dict(rope_theta=5e5, **_EXPERTS)),
    "smollm3, a layer without RoPE": ("smollm3", dict(rope_theta=5e5, no_rope_layers=[1, 0, 1])),
    "olmo": ("olmo", dict(rope_theta=5e5)),
    "gpt2": ("gpt2", dict(n_embd=32, n_layer=3, n_head=4, n_positions=64)),
}


def run_quietly(*arguments: object) -> tuple[int, str]:
    """Run a command of olmo-lns in this process. :returns: its exit code, and what it printed."""
    from olmo_lns.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(list(map(str, arguments)))
    return code, out.getvalue()


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.randint(3, 64, (2, 48), generator=torch.Generator().manual_seed(0))).logits


def difference(model: Any, expected: Any) -> float:
    return float((logits(model) - expected).abs().max() / expected.abs().max())


def write(place: Path, cases: list[str]) -> dict[str, str]:
    """Save a model under LNS of each case, its logits and its export.

    :returns: case -> warnings of the export, or the reason why there is none.
    """
    import torch
    import transformers as hf

    from olmo_lns.integrations.transformers import apply

    results = {}
    for case in cases:
        family, settings = CASES[case]
        if family not in hf.CONFIG_MAPPING:
            continue
        torch.manual_seed(0)
        # A copy: a config changes the dictionaries that it is given.
        config = hf.CONFIG_MAPPING[family](**{**SIZES, "rope_theta": 5e5, **json.loads(json.dumps(settings))})
        model = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        model = apply(model, "lns", initialization="upstream", trained=True)
        folder = place / case
        model.save_pretrained(folder / "lns")
        torch.save(logits(model), folder / "logits.pt")
        code, printed = run_quietly("export", folder / "lns", folder / "export")
        warnings = [line for line in printed.splitlines() if line.startswith("warning: ")]
        results[case] = "; ".join(warnings) if code == 0 else printed.splitlines()[-1]
    return results


def read(place: Path, cases: list[str], checkpoint: bool) -> dict[str, str]:
    """Load the exports of another version, or export its checkpoints. :returns: case -> ``right`` or what differs."""
    import torch
    import transformers as hf

    results = {}
    for case in cases:
        family, folder = CASES[case][0], place / case
        if not (folder / "logits.pt").exists() or family not in hf.CONFIG_MAPPING:
            continue
        expected, export = torch.load(folder / "logits.pt"), folder / "export"
        try:
            if checkpoint:
                export = folder / f"export-by-{hf.__version__}"
                code, printed = run_quietly("export", folder / "lns", export)
                if code:
                    results[case] = f"refused: {printed.splitlines()[-1][:80]}"
                    continue
            found = difference(hf.AutoModelForCausalLM.from_pretrained(export), expected)
            code, _ = run_quietly("verify", export)
            results[case] = "right" if found <= 1e-5 and code == 0 else f"{found:.0e}"
            results[case] += "" if (found <= 1e-5) == (code == 0) else f", verify exits with {code}"
        except Exception as error:  # of any kind: another version's loader
            results[case] = type(error).__name__
    return results


def in_version(folder: Path, *words: object) -> Any:
    """Run this script under the version of transformers in ``folder``; returns its result."""
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
    if sys.argv[1:2] in (["--write"], ["--read"], ["--export"]):
        step, place, cases = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
        print(json.dumps(write(place, cases) if step == "--write" else read(place, cases, step == "--export")))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="a folder for each version of transformers")
    parser.add_argument("--cases", nargs="*", default=[], help="only these families, such as gpt_neox; default: all")
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/export.md")
    args = parser.parse_args()
    cases = [case for case, (family, _) in CASES.items() if not args.cases or family in args.cases]
    names = {version_of(folder): folder.resolve() for folder in args.folders}
    columns, warned = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for writer, folder in names.items():
            warned[writer] = in_version(folder, "--write", Path(place, writer), json.dumps(cases))
        ends = {next(iter(names)), list(names)[-1]}
        for writer in names:
            for reader, folder in names.items():
                columns[f"{writer} → {reader}"] = in_version(folder, "--read", Path(place, writer), json.dumps(cases))
                if writer in ends and reader != writer:
                    exported = in_version(folder, "--export", Path(place, writer), json.dumps(cases))
                    columns[f"{writer} ⇒ {reader}"] = exported
    wrong = 0
    for case in cases:
        warning = next((text for each in warned.values() if (text := each.get(case))), "").removeprefix("warning: ")
        cells = {name: column[case] for name, column in columns.items() if case in column}
        differing = [f"{name}: {cell}" for name, cell in cells.items() if cell != "right"]
        wrong += bool(differing and not warning)
        row = (case, f"{len(cells) - len(differing)} of {len(cells)}", "; ".join(differing), warning)
        print("| " + " | ".join(row) + " |" if args.markdown else "\t".join(row))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
