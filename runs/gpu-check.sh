#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU: ops, programs and golden traces against the CPU, memory and race checks, a loss curve beside the CPU's, and
# speed. Prints what docs/RESULTS.md quotes.
#
# Where the machine with the GPU has no Rust, build elsewhere and say where things are:
#   ELMUR=path/to/elmur TESTS="path/to/cuda path/to/gradients" runs/gpu-check.sh
# PEER=path/to/peer.py adds a peer's rows; SANITIZER= (empty) leaves compute-sanitizer out; OUT changes the folder, JOBS how many checks run at once.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu-check}
SANITIZER=${SANITIZER-compute-sanitizer}
# Nothing is skipped here for want of a GPU.
export ELMUR_REQUIRE_GPU=1
if [ -z "${ELMUR:-}" ]; then
  cargo build --release --quiet -p elmur-cli --features cuda
  ELMUR=$PWD/target/release/elmur
  TESTS=$(cargo test --release -p elmur-engine --features cuda --test cuda --test gradients --no-run 2>&1 |
    sed -n 's/.*Executable.*(\(.*\))/\1/p')
fi
rm -rf "$OUT"
mkdir -p "$OUT"
"$ELMUR" --version
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
# One at a time: one test asks for more memory than there is, another counts it.
for test in $TESTS; do "$test" --test-threads=1; done
for precision in f32 tf32; do
  "$ELMUR" verify --device cuda --precision $precision crates/elmur-model/tests/golden/*.safetensors
done

# The same run on both devices, dropout and all.
for device in cpu cuda; do
  "$ELMUR" train tmaze --seed 0 --device $device train.precision=f32 train.batches=200 eval.every=0 eval.length=90 --out "$OUT/curve-$device" 2>/dev/null
done
paste <(grep -o '"loss":[^,]*' "$OUT/curve-cpu/metrics.jsonl") <(grep -o '"loss":[^,]*' "$OUT/curve-cuda/metrics.jsonl") |
  awk -F'[:\t]' '{ d = $2 - $4; if (d < 0) d = -d; if (d > worst) worst = d }
    END { printf "200 batches of T-Maze: losses differ by at most %.2g\n", worst; exit worst > 1e-2 }'

"$ELMUR" bench train --json --device cuda
[ -z "${PEER:-}" ] || PYTHONWARNINGS=ignore python3 "$PEER" --device cuda
for precision in bf16 f32; do "$ELMUR" bench train --json --device cuda --precision $precision; done
for runs in 4 16; do "$ELMUR" bench train --json --device cuda --runs $runs; done
"$ELMUR" bench train --json --device cuda --preset remember-color --no-images
time "$ELMUR" train tmaze --seed 1 --device cuda eval.every=0 train.checkpoint_every=10000 --out "$OUT/schedule" 2>/dev/null
grep -o '"score":[^,]*' "$OUT/schedule/metrics.jsonl"

# CUDA's own checkers, test by test. Left out of both: what counts memory or asks for too much of it; of the slow check for races also what uses two
# queues (a second copy of training_follows_the_cpu), and what has no kernels.
check() {
  log=$OUT/$1-$3.log
  if "$SANITIZER" --tool "$1" --error-exitcode 3 "$2" --test-threads=1 --exact "$3" > "$log" 2>&1; then
    echo "$1 $3: $(grep SUMMARY "$log")"
  else
    cat "$log"
    return 1
  fi
}
export -f check
export OUT SANITIZER
if [ -n "$SANITIZER" ]; then
  # Trials of algorithms take minutes under the checkers.
  export ELMUR_TUNING=off
  for tool in memcheck racecheck; do
    skip='memory_comes_back|misuse_is_an_error|gradients_stop'
    [ $tool = memcheck ] || skip="$skip|two_queues"
    for test in $TESTS; do
      "$test" --list 2>/dev/null | sed -n 's/: test$//p' | grep -vE "$skip" | sed "s|^|$tool $test |"
    done
  done | xargs -P "${JOBS:-8}" -L 1 bash -c 'check "$@"' check
  unset ELMUR_TUNING
fi
