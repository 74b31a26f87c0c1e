"""``olmo-lns data commonsense``: LLM-Adapters' ``commonsense_170k.json`` as prompts and completions.

The source is one JSON array of objects with ``instruction``, ``input`` (mostly empty), ``output``
and ``answer``. The result is a folder with ``train.jsonl`` (and ``test.jsonl``), one object a line
with ``prompt`` and ``completion``, which TRL and ``datasets.load_dataset(folder)`` read as it is.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any, Iterator, Sequence

from olmo_lns.arguments import at_least
from olmo_lns.errors import LNSConfigError

__all__ = ["TEMPLATES", "convert", "main", "read"]

#: What stands around the instruction. Which one the papers used is not known.
TEMPLATES = {
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    ),
    "plain": "{instruction}\n\n",
}


def read(path: Path) -> Iterator[tuple[str, str]]:
    """``(instruction, answer text)`` of every example; a non-empty ``input`` follows the instruction.

    :raises LNSConfigError: not such a file, with the number of the first example that is not of the form.
    """
    try:
        examples = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LNSConfigError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(examples, list) or not examples:
        raise LNSConfigError(f"{path}: expected a JSON array of examples, found {type(examples).__name__}")
    for number, example in enumerate(examples, start=1):
        fields = example if isinstance(example, dict) else {}
        instruction, given, output = (fields.get(name, "") for name in ("instruction", "input", "output"))
        if not all(isinstance(text, str) for text in (instruction, given, output)) or not instruction or not output:
            raise LNSConfigError(
                f"{path}: example {number}: expected texts 'instruction' and 'output', found {str(example)[:80]!r}"
            )
        yield (f"{instruction}\n{given}" if given else instruction), output.strip()


def convert(source: Path, out: Path, *, template: str = "alpaca", held_out: int = 0, seed: int = 42) -> dict[str, int]:
    """Write the folder; returns the number of examples in each file.

    :param held_out: examples drawn at random, with ``seed``, for ``test.jsonl``.
    :raises LNSConfigError: the source is not of the form, or ``held_out`` leaves none to train on.
    """
    text, pairs = TEMPLATES[template], list(read(source))
    if not 0 <= held_out < len(pairs):
        raise LNSConfigError(f"--held-out {held_out}: {source} has {len(pairs)} examples")
    chosen = set(random.Random(seed).sample(range(len(pairs)), held_out))
    out.mkdir(parents=True, exist_ok=True)
    parts = {"train": [p for i, p in enumerate(pairs) if i not in chosen], "test": [pairs[i] for i in sorted(chosen)]}
    for name, rows in parts.items():
        if rows:
            lines = (json.dumps(_row(text, *row), ensure_ascii=False) + "\n" for row in rows)
            (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(rows) for name, rows in parts.items()}


def _row(template: str, instruction: str, answer: str) -> dict[str, Any]:
    return {"prompt": template.format(instruction=instruction), "completion": answer}


def main(argv: Sequence[str]) -> int:
    """Run ``olmo-lns data commonsense``."""
    parser = argparse.ArgumentParser(prog="olmo-lns data commonsense", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="commonsense_170k.json of LLM-Adapters")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--template", choices=tuple(TEMPLATES), default="alpaca", help="default %(default)s")
    parser.add_argument("--held-out", type=at_least(0), default=0, help="examples for test.jsonl (default none)")
    parser.add_argument("--seed", type=int, default=42, help="of the choice of these (default %(default)s)")
    args = parser.parse_args(argv)
    counts = convert(args.source, args.output, template=args.template, held_out=args.held_out, seed=args.seed)
    print(f"{args.output}: " + ", ".join(f"{count:,} examples in {name}" for name, count in counts.items() if count))
    return 0
