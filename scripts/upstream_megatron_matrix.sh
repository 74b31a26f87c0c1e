#!/usr/bin/env bash
# Run an unmodified pretrain_gpt.py of each checkout on the CPU: version x route x parallelism.
#
#   scripts/upstream_megatron_matrix.sh [-o table.md] [-k filter] CHECKOUT...
#
# CHECKOUT: a Megatron-LM source tree. PYTHON (default: python) must have torch, olmo-lns (installed, so that the
# autoload route exists), numpy, pybind11, psutil, and triton from core_v0.18 on.
# Each run trains 6 steps of a 4-layer model on mock data and gives one row: first and last loss, sites, initialization.
# -k: only the rows whose name ("version | route | parallelism") matches this regular expression. Needs a C++ compiler and make (Megatron builds its data helpers).
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
table=/dev/stdout
filter=""
while getopts "o:k:" option; do
  case $option in
    o) table=$OPTARG ;;
    k) filter=$OPTARG ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

model="--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64
  --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 3e-3 --min-lr 3e-4
  --lr-decay-style cosine --lr-warmup-iters 1 --swiglu --disable-bias-linear --normalization RMSNorm
  --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --mock-data --tokenizer-type NullTokenizer --vocab-size 4223 --make-vocab-size-divisible-by 64 --transformer-impl local
  --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
  --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --log-interval 1
  --eval-iters 0 --eval-interval 1000 --split 100,0,0 --attention-backend unfused"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=$work/rows
: >"$rows"
failed=0
port=${PORT:-29610}

# run VERSION ROUTE PARALLELISM TREE RANKS WORDS -- FLAGS
run() {
  local version=$1 route=$2 parallel=$3 tree=$4 ranks=$5
  shift 5
  local name="$version | $route | $parallel" words=() log
  while [ "$1" != "--" ]; do words+=("$1"); shift; done
  shift
  [[ "$name" =~ $filter ]] || return 0
  log="$work/$(echo "$name" | tr -c 'A-Za-z0-9.\n' _).log"
  port=$((port + 1))
  (
    cd "$tree" || exit 1
    # shellcheck disable=SC2086
    exec timeout 600 env MEGATRON_ON_CPU=1 MEGATRON_PROBE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 \
      CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONWARNINGS=ignore PATH="$bin:$PATH" MAKEFLAGS=e LIBEXT="$suffix" OLMO_LNS_DISABLE="${disable:-0}" MEGATRON_NO_HOOK="${hookless:-0}" \
      PYTHONPATH="$root/tests/support/megatron_site:$root/tests" "$python" -m torch.distributed.run \
      --nproc-per-node "$ranks" --master-port $port "${words[@]}" pretrain_gpt.py $model "$@"
  ) >"$log" 2>&1
  local code=$? losses sites init
  losses=$(grep -o 'lm loss: [0-9.E+-]*' "$log" | awk '{printf "%s ", $3 + 0}')
  sites=$(grep -o 'LayerNorm Scaling on: [0-9]* norms' "$log" | head -1 | grep -o '[0-9]*' || echo -)
  init=$(awk '/probe: std linear_(proj|fc2)/ {printf "%s%s", sep, $4; sep=" "}' "$log")
  if [ $code -ne 0 ] || [ -z "$losses" ]; then
    failed=1
    losses="failed failed"
    echo "FAILED $name: $(grep -E 'Error|error' "$log" | tail -1 | cut -c1-300)" >&2
    [ -n "${KEEP:-}" ] && cp "$log" "$KEEP"
  fi
  # shellcheck disable=SC2086
  set -- $losses
  echo "| $name | $1 | ${!#} | ${sites:--} | ${init:--} |" | tee -a "$rows" >&2
}

patched_copy() { # TREE PATCH -> a copy with the patch
  local copy="$work/patched-$(basename "$2" .patch)"
  cp -r "$1" "$copy"
  git -C "$copy" apply "$2" || return 1
  echo "$copy"
}

lns=--layernorm-scaling
bin=$("$python" -c 'import os, sys; print(os.path.dirname(sys.executable))')
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
for tree in "$@"; do
  tree=$(cd "$tree" && pwd)
  version=$(cd "$tree" && "$python" - <<'PY'
file = "megatron/core/package_info.py"
scope = {"__file__": file}
exec(open(file).read(), scope)
print(".".join(str(scope[k]) for k in ("MAJOR", "MINOR", "PATCH")))
PY
  )
  PATH="$bin:$PATH" make -s -C "$tree/megatron/core/datasets" LIBEXT="$suffix" >/dev/null || exit 1
  disable=1 run "$version" "stock, plugin absent" TP1 "$tree" 1 --
  run "$version" "plugin, no flag" TP1 "$tree" 1 --
  run "$version" "plugin, --no-scaled-init" TP1 "$tree" 1 -- --no-scaled-init
  run "$version" autoload TP1 "$tree" 1 -- $lns
  run "$version" "autoload, scaled init kept" TP1 "$tree" 1 -- $lns --layernorm-scaling-keep-scaled-init
  hookless=1 run "$version" "-m olmo_lns" TP1 "$tree" 1 -m olmo_lns -- $lns
  run "$version" autoload TP2 "$tree" 2 -- $lns --tensor-model-parallel-size 2
  run "$version" autoload PP2 "$tree" 2 -- $lns --pipeline-model-parallel-size 2
  run "$version" autoload "PP2 x VPP2" "$tree" 2 -- $lns --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 1
  run "$version" autoload "DP2, distributed optimizer, bf16" "$tree" 2 -- $lns --bf16 --use-distributed-optimizer
  for patch in "$root"/patches/megatron/load-plugins-*.patch; do
    [ -e "$patch" ] || continue
    if git -C "$tree" apply --check "$patch" 2>/dev/null || (cd "$tree" && patch -p1 -s --dry-run -F0 -f <"$patch" >/dev/null 2>&1); then
      copy=$(patched_copy "$tree" "$patch") || continue
      hookless=1 run "$version" "patch" TP1 "$copy" 1 -- $lns
      run "$version" "patch and start-up hook" TP1 "$copy" 1 -- $lns
      rm -rf "$copy"
    fi
  done
done
{
  echo "| Megatron | route | parallelism | first loss | last loss | sites | std of linear_proj, linear_fc2 |"
  echo "|---|---|---|---|---|---|---|"
  cat "$rows"
} >"$table"
exit $failed
