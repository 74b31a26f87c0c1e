#!/usr/bin/env bash
# Build sdist and wheel into dist/, check their contents, and use the wheel in new environments.
#
#   make release-check                      base, demo and each extra on this Python; other Pythons without torch
#   EXTRAS="hf study" make release-check    only these extras; EXTRAS= for none
#   PYTHONS="python3.10" make release-check     only this other interpreter; default: 3.10 to 3.14 if installed
#
# Other interpreters get the wheel with --no-deps and without torch, which takes gigabytes on most machines. The extra te
# is left out, because Transformer Engine is built against CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PY:-.venv/bin/python}
read -ra torch <<< "${TORCH:-torch==2.13.0}"  # words: TORCH may have --index-url
extras=${EXTRAS-analysis dev eval hf megatron olmo olmo-core sft study test torchtitan vision}
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
license = [n for n in names if n.endswith("LICENSE")]
unexpected = [n for n in names if n.split("/")[0] not in ("olmo_lns", "olmo_lns_autoload.pth") and ".dist-info" not in n]
metadata = email.message_from_bytes(zipfile.ZipFile(sys.argv[1]).read(next(n for n in names if n.endswith("METADATA"))))
assert not missing, f"the wheel lacks {missing}"
assert license and not unexpected, (license, unexpected)
assert metadata["License-Expression"] == "Apache-2.0" and metadata["Description-Content-Type"] == "text/markdown"
print(f"wheel {metadata['Name']} {metadata['Version']}: {len(names)} files, {len(pack)} configs, license, start-up hook")
PY

install() { # environment, requirements
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check "${@:2}"
}
new_environment() { # interpreter
  local folder; folder=$(mktemp -d "$scratch/bare.XXXX")
  "$1" -m venv "$folder"
  echo "$folder"
}

base=$(new_environment "$("$python" -c 'import sys; print(sys._base_executable)')")
install "$base" "${torch[@]}"
install "$base" "$wheel"
(cd "$scratch" && "$base/bin/olmo-lns" --version && "$base/bin/olmo-lns" config list | wc -l && "$base/bin/olmo-lns" doctor)

# Current releases instead of the pins in constraints.txt. torch stays pinned: another version takes gigabytes.
echo "${torch[0]}" > "$scratch/torch.txt"
for extra in $extras; do
  cp -a "$base" "$scratch/$extra"
  install "$scratch/$extra" -c "$scratch/torch.txt" "$wheel[$extra]"
  (cd "$scratch" && "$scratch/$extra/bin/python" -m olmo_lns doctor --require "$extra" > doctor.txt) \
    || { cat "$scratch/doctor.txt" >&2; exit 1; }
  "$scratch/$extra/bin/python" -m pip check > "$scratch/check.txt" || cat "$scratch/check.txt"
  echo "extra $extra: $(grep -c . <("$scratch/$extra/bin/python" -m pip list --format freeze)) packages, doctor reports no problem"
  rm -rf "${scratch:?}/$extra"
done

install "$base" -c constraints.txt "$wheel[olmo,study,analysis]"
(cd "$scratch" && "$base/bin/python" -c "
from olmo.config import LayerNormType
print('autoload:', LayerNormType('lns_rms'))" && "$base/bin/olmo-lns" config copy study/demo.yaml -o short.yaml \
  && sed -i 's/max_duration: 96/max_duration: 4/' short.yaml && "$base/bin/olmo-lns" demo short.yaml --out demo)

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
for other in ${PYTHONS-python3.10 python3.11 python3.12 python3.13 python3.14}; do
  if [ -z "${PYTHONS+given}" ] && { [ -z "$(version "$other")" ] || [ "$(version "$other")" = "$(version "$python")" ]; }; then
    continue
  fi
  environment=$(new_environment "$other")
  install "$environment" packaging pyyaml rich numpy
  install "$environment" --no-deps "$wheel"
  (cd "$scratch" && "$environment/bin/olmo-lns" --version && "$environment/bin/olmo-lns" config copy olmo/60M-lns -o "$environment/60M-lns.yaml")
  "$environment/bin/olmo-lns" doctor > "$environment/doctor.txt" 2>&1 && { echo "doctor does not report the missing torch" >&2; exit 1; }
  grep -q "missing. Run: pip install" "$environment/doctor.txt"
  echo "$("$other" --version): base without torch"
done
echo "release check passed"
