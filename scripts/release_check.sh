#!/usr/bin/env bash
# Build sdist and wheel into dist/, look into them, install the wheel into bare environments and use it there.
#
#   make release-check                       Python of the environment, with torch and the olmo extra
#   PYTHONS="python3.10 python3.12" make release-check     the base without torch on those
#
# Interpreters other than the first are installed with --no-deps and what needs no torch: elsewhere torch is gigabytes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PY:-.venv/bin/python}
torch=${TORCH:-torch==2.13.0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

rm -rf dist
"$python" -m build --outdir dist . > "$scratch/build.log" 2>&1 || { tail -20 "$scratch/build.log" >&2; exit 1; }
wheel=$(ls dist/*.whl)
echo "built $(ls dist | tr '\n' ' ')"
"$python" - "$wheel" <<'PY'
import email, sys, zipfile
from pathlib import Path

names = zipfile.ZipFile(sys.argv[1]).namelist()
pack = {str(Path("olmo_lns") / path) for path in Path("configs").rglob("*.yaml")}
missing = sorted(pack - set(names)) + [n for n in ("olmo_lns_autoload.pth", "olmo_lns/py.typed") if n not in names]
licence = [n for n in names if n.endswith("LICENSE")]
foreign = [n for n in names if n.split("/")[0] not in ("olmo_lns", "olmo_lns_autoload.pth") and ".dist-info" not in n]
metadata = email.message_from_bytes(zipfile.ZipFile(sys.argv[1]).read(next(n for n in names if n.endswith("METADATA"))))
assert not missing, f"the wheel lacks {missing}"
assert licence and not foreign, (licence, foreign)
assert metadata["License-Expression"] == "Apache-2.0" and metadata["Description-Content-Type"] == "text/markdown"
print(f"wheel {metadata['Name']} {metadata['Version']}: {len(names)} files, {len(pack)} configs, licence, start-up hook")
PY

bare() { # interpreter
  local folder; folder=$(mktemp -d "$scratch/bare.XXXX")
  "$1" -m venv "$folder"
  echo "$folder"
}

environment=$(bare "$("$python" -c 'import sys; print(sys._base_executable)')")
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" "$wheel"
(cd "$scratch" && "$environment/bin/olmo-lns" --version && "$environment/bin/olmo-lns" config list | wc -l \
  && "$environment/bin/olmo-lns" doctor)
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$wheel[olmo,study,analysis]"
(cd "$scratch" && "$environment/bin/python" -c "
from olmo.config import LayerNormType
print('autoload:', LayerNormType('lns_rms'))" && "$environment/bin/olmo-lns" demo --steps 4 --layers 2 --out demo)
for other in ${PYTHONS:-}; do
  environment=$(bare "$other")
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check packaging pyyaml rich numpy
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
  (cd "$scratch" && "$environment/bin/olmo-lns" --version && "$environment/bin/olmo-lns" config copy olmo/60M-lns -o "$environment/60M-lns.yaml")
  "$environment/bin/olmo-lns" doctor > "$environment/doctor.txt" && { echo "doctor misses no torch" >&2; exit 1; }
  grep -q "not installed: pip install" "$environment/doctor.txt"
done
echo "release check passed"
