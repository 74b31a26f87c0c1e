#!/usr/bin/env bash
# On the GPU machine, no registry needed: build Transformer Engine's PyTorch extension from bundle.sh's folder.
#
#   scripts/gpu/build_te.sh FOLDER CORE_WHEEL
#
# CORE_WHEEL is the whole transformer_engine_cu12/cu13 wheel of the same version (179 MB): the extension links against
# its library, and the slimmed copy has no metadata. Needs nvcc, a compiler, and torch with the nvidia-* wheels
# (headers of cuDNN and NCCL). About 3 minutes on 16 cores. Not needed for te_ctypes.py.
set -euo pipefail
folder=${1:?usage: build_te.sh FOLDER CORE_WHEEL}
core=${2:?usage: build_te.sh FOLDER CORE_WHEEL}
python=${PYTHON:-python3}
command -v nvcc > /dev/null || { echo "nvcc is not on the PATH: the build needs the CUDA toolkit" >&2; exit 1; }
headers=$("$python" - << 'PY'
import glob, os, site
print(":".join(sorted(p for s in site.getsitepackages() for p in glob.glob(os.path.join(s, "nvidia/*/include")))))
PY
)
export CPATH="$headers${CPATH:+:$CPATH}" NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-$(nproc)}"
"$python" -m pip install --no-index --no-deps "$core" "$folder"/sdist/transformer_engine-*.whl
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tar -C "$scratch" -xzf "$folder"/sdist/transformer_engine_torch-*-source.tar.gz
"$python" -m pip install --no-index --no-deps --no-build-isolation "$scratch"
"$python" -c "from olmo_lns.norm import choose_backend; print(choose_backend('te'))"
