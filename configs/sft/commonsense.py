"""Convert LLM-Adapters' ``commonsense_170k.json`` to prompts and completions, which TRL reads.

    python configs/sft/commonsense.py commonsense_170k.json data/commonsense170k

The ``input``, which is empty in most rows, follows the instruction. The text around both is Alpaca's, because the
papers do not state theirs.
"""

from __future__ import annotations

import sys

from datasets import load_dataset

PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n"
)


def pair(example: dict[str, str]) -> dict[str, str]:
    text = "\n".join(part for part in (example["instruction"], example["input"]) if part)
    return {"prompt": PROMPT.format(text), "completion": example["output"].strip()}


if __name__ == "__main__":
    source, folder = sys.argv[1:]
    rows = load_dataset("json", data_files=source, split="train")
    rows.map(pair, remove_columns=rows.column_names).to_json(f"{folder}/train.jsonl", force_ascii=False)
    print(f"{folder}/train.jsonl: {len(rows):,} examples")
