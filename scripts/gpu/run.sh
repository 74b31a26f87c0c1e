#!/usr/bin/env bash
# On the GPU machine, from the repository: GPU tests, then scripts/bench.py. Results go to RESULTS.
#
#   scripts/gpu/run.sh RESULTS [FOLDER]
#
# With FOLDER (of bundle.sh) Transformer Engine's kernels are loaded from its library through te_ctypes.py; without it,
# from an installed Transformer Engine, and where there is none only torch's kernels are tested and timed.
set -euo pipefail
results=$(realpath -m "${1:?usage: run.sh RESULTS [FOLDER]}")
folder=${2:+$(realpath -m "$2")}
python=${PYTHON:-python3}
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" -c 'import torch' 2> /dev/null || { echo "$python has no torch: set PYTHON" >&2; exit 1; }
"$python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False here")'
mkdir -p "$results"
launch=("$python")
if [ -n "$folder" ]; then
  if compgen -G "$folder/wheels/*.whl" > /dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$results/site" "$folder"/wheels/*.whl
    export PYTHONPATH="$PYTHONPATH:$results/site"
  fi
  library=$(mktemp -d)/libtransformer_engine.so
  xz --decompress --stdout "$folder/libtransformer_engine.so.xz" > "$library"
  launch=("$python" scripts/gpu/te_ctypes.py "$library")
fi
status=0
"${launch[@]}" -m pytest -m gpu tests -q 2>&1 | tee "$results/tests.log" || status=$?
"${launch[@]}" scripts/bench.py --device cuda --json "$results/bench.json" 2>&1 | tee "$results/bench.md" || status=$?
exit "$status"
