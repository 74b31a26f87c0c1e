#!/usr/bin/env bash
# On a machine WITH a package registry: put everything a GPU machine without one needs into one folder.
#
#   scripts/gpu/bundle.sh FOLDER [ARCH]        ARCH: 90 (H100, H200; default) or 80 (A100)
#
# FOLDER then holds  libtransformer_engine.so.xz  the kernels, one architecture, about 10 MB   (te_ctypes.py loads it)
#                    wheels/                      ai2-olmo and what `import olmo` needs beside torch
# Settings: PYTHON (default python3; an environment where `import olmo` works, as `make setup` gives),
# TE_VERSION (2.11.0), CUDA (13 or 12), TARGET_PYTHON (3.12: that of the GPU machine).
set -euo pipefail
folder=${1:?usage: bundle.sh FOLDER [ARCH]}
arch=${2:-90}
python=${PYTHON:-python3}
version=${TE_VERSION:-2.11.0}
cuda=${CUDA:-13}
target=${TARGET_PYTHON:-3.12}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "== Transformer Engine $version for CUDA $cuda, architecture $arch"
"$python" -m pip download --quiet --no-deps --dest "$scratch" "transformer_engine_cu$cuda==$version"
"$python" -m zipfile -e "$scratch"/transformer_engine_cu*.whl "$scratch/unpacked"
library=$(find "$scratch/unpacked" -name libtransformer_engine.so | head -n 1)
"$python" "$here/slim_library.py" "$library" "$scratch/libtransformer_engine.so" --keep "$arch"
xz --stdout "$scratch/libtransformer_engine.so" > "$folder/libtransformer_engine.so.xz"

echo "== OLMo and what it imports, in the versions of $python's environment (make setup)"
"$python" - > "$scratch/requirements.txt" << 'PY'
import importlib.metadata, sys
import hypothesis, olmo, olmo.model, omegaconf, packaging, pytest, rich, yaml  # what the GPU tests and bench.py import

owners = importlib.metadata.packages_distributions()
names = set(sys.modules) & set(owners) | {"google"}  # "google" is a namespace of several distributions
left = {"torch", "sympy", "mpmath", "setuptools", "olmo-lns", "megatron-core"}  # torch is the GPU machine's own
for name in sorted({owner for name in names for owner in owners.get(name, ())} - left):
    print(f"{name}=={importlib.metadata.version(name)}")
PY
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$target" --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any \
  --dest "$folder/wheels" --requirement "$scratch/requirements.txt"
du -sh "$folder"/*
