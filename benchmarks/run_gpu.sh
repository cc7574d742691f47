#!/usr/bin/env bash
# Everything that needs a GPU, in about twenty minutes: kernel tests, MFU, the loop against bare JAX, kernels, torch,
# and what `jaxtrain plan` predicts against what is measured.
#
#   [OUT=benchmarks/results] [PYTHON=python3] [PYTHONPATH=...] benchmarks/run_gpu.sh [part ...]
#
# Parts, in this order by default: tests mfu overhead kernels peer plan. Each has a time limit, so that one that hangs does
# not eat the others; what was measured before it is kept. Results go to $OUT/<gpu>-<what>.json, logs beside them
# in one file. Ends with 0 if every part ran.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/jaxtrain-xla}
mkdir -p "$OUT"

GPU=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 |
    tr '[:upper:]' '[:lower:]' | sed 's/nvidia //; s/ .*//; s/[^a-z0-9]\+/-/g; s/-$//')
if [ -z "$GPU" ]; then
    echo "run_gpu needs an NVIDIA GPU: nvidia-smi finds none"
    exit 0
fi
LOG="$OUT/$GPU-log.txt"
: > "$LOG"
BEGAN=$SECONDS FAILED=""

# part NAME SECONDS COMMAND...: runs it within its time, shows it and logs it.
part() {
    local name=$1 limit=$2 from=$SECONDS
    shift 2
    echo "== $name ($((SECONDS - BEGAN)) s so far): $*" | tee -a "$LOG"
    if timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$LOG"; then
        echo "== $name: done in $((SECONDS - from)) s" | tee -a "$LOG"
    else
        echo "== $name: FAILED after $((SECONDS - from)) s" | tee -a "$LOG"
        FAILED="$FAILED $name"
    fi
}

tests() {
    part tests 240 env JAXTRAIN_TEST_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false "$PYTHON" -m pytest -q \
        -p no:cacheprovider tests/kernels/test_attention.py tests/callbacks/test_gpu.py \
        -k "test_cudnn_matches_reference or test_a_killed_run" --junitxml="$OUT/$GPU-tests.xml"
}

mfu() {
    part mfu-7b 240 "$PYTHON" benchmarks/gpu_mfu.py --shapes 7b --seconds 10 --out "$OUT/$GPU-mfu-7b.json"
    part mfu-1b 240 "$PYTHON" benchmarks/gpu_mfu.py --shapes 1.3b --chunks 8 1 --seconds 8 \
        --out "$OUT/$GPU-mfu-1b.json"
    part mfu-400m 200 "$PYTHON" benchmarks/gpu_mfu.py --shapes 0.4b --chunks 8 1 --seconds 6 \
        --out "$OUT/$GPU-mfu-400m.json"
}

overhead() {
    part overhead-full 160 "$PYTHON" benchmarks/overhead.py --platform gpu --remat full --block 6 --blocks 7 \
        --out "$OUT/$GPU-overhead-full.json"
    part overhead 200 "$PYTHON" benchmarks/overhead.py --platform gpu --block 10 --blocks 10 \
        --out "$OUT/$GPU-overhead.json"
}

kernels() {
    part attention 40 "$PYTHON" benchmarks/attention.py --batch 4 --time 4096 --heads 16 --kv-heads 16 \
        --head-dim 128 --documents 4 --kernels xla cudnn --repeats 10 --out "$OUT/$GPU-attention.json"
    part cross_entropy 35 "$PYTHON" benchmarks/cross_entropy.py --measure --repeats 10 --chunks 1 4 8 16 \
        --out "$OUT/$GPU-cross-entropy.json"
}

peer() {
    part peer 170 "$PYTHON" benchmarks/peer_torch.py --platform gpu --turns 5 --out "$OUT/$GPU-peer-torch.json"
}

plan() {
    part plan 450 "$PYTHON" benchmarks/plan_accuracy.py --parts gpu --rounds 5 --out "$OUT/$GPU-plan-accuracy.json"
}

[ $# -gt 0 ] || set -- tests mfu overhead kernels peer plan
for name in "$@"; do
    case $name in
        tests | mfu | overhead | kernels | peer | plan) "$name" ;;
        *) echo "run_gpu has no part $name: tests mfu overhead kernels peer plan" && exit 2 ;;
    esac
done
echo "== all done in $((SECONDS - BEGAN)) s${FAILED:+; failed:$FAILED}" | tee -a "$LOG"
[ -z "$FAILED" ]
