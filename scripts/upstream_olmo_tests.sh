#!/usr/bin/env bash
# OLMo's own test suite three times: stock, with olmo-lns registered, and with LNS as the default norm.
#
#   OLMO_SRC=path/to/OLMo scripts/upstream_olmo_tests.sh [options] [-- pytest arguments]
#     --out DIR      where the JUnit files and report.md go (default build/upstream-olmo/<version>)
#     --python PATH  interpreter of an environment with OLMo's requirements, pytest and olmo-lns (default python)
#     --parallel     the three runs at once (1.5 GB each)
#     --mode NAME    only stock, registered or lns; the others' results are kept from before
#     --hub          use the Hugging Face hub; without it a tokenizer of the checkout stands in for gpt2
#
# Exit code 1 if a test that passes in stock OLMo does not with olmo-lns, unless
# scripts/upstream_olmo_report.py lists it with a reason and a version. The checkout is copied, and not written to.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repository=$(dirname "$here")
python=python out="" hub=0 parallel=0 modes="stock registered lns"
while [ $# -gt 0 ]; do
    case $1 in
        --out) out=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --hub) hub=1; shift ;;
        --parallel) parallel=1; shift ;;
        --mode) modes=$2; shift 2 ;;
        --) shift; break ;;
        -h|--help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "upstream_olmo_tests.sh: unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
done
if [ ! -f "${OLMO_SRC:-}/olmo/model.py" ] || [ ! -d "$OLMO_SRC/tests" ]; then
    echo "upstream_olmo_tests.sh: OLMO_SRC must name an OLMo checkout with olmo/ and tests/" >&2
    exit 2
fi
source=$(cd "$OLMO_SRC" && pwd)
out=${out:-$repository/build/upstream-olmo/$(basename "$source")}
mkdir -p "$out"
out=$(cd "$out" && pwd)

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false
if [ "$hub" = 0 ]; then
    export HF_HUB_OFFLINE=1 UPSTREAM_TOKENIZER=$source/test_fixtures/test-olmo-model/tokenizer.json
fi

run() {
    local mode=$1 disable=0
    [ "$mode" = stock ] && disable=1
    local copy=$out/$mode-checkout
    rm -rf "$out/$mode.xml" "$copy"
    # OLMo's tests save into their own fixtures, so each run gets a copy; they name fixtures by relative paths.
    mkdir -p "$copy"
    tar -C "$source" --exclude=.git -cf - . | tar -C "$copy" -xf -
    # A failing test is a result, not an error.
    (cd "$copy" && PYTHONPATH=$copy:$here${PYTHONPATH:+:$PYTHONPATH} UPSTREAM_MODE=$mode OLMO_LNS_DISABLE=$disable \
        "$python" -m pytest -q -p no:cacheprovider -p upstream_olmo_plugin --continue-on-collection-errors \
        --junitxml "$out/$mode.xml" "${arguments[@]}" tests) > "$out/$mode.log" 2>&1 || true
    rm -rf "$copy"
}

arguments=("$@")
for mode in $modes; do
    if [ "$parallel" = 1 ]; then run "$mode" & else run "$mode"; fi
done
wait
for mode in stock registered lns; do
    if [ ! -s "$out/$mode.xml" ]; then
        echo "upstream_olmo_tests.sh: the $mode run gave no result; see $out/$mode.log" >&2
        tail -n 20 "$out/$mode.log" >&2 || true
        exit 2
    fi
    printf '%-11s %s\n' "$mode" "$(tail -n 1 "$out/$mode.log")"
done
"$python" "$here/upstream_olmo_report.py" "$out" --name "$(basename "$source")"
