#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU: ops, programs and golden traces against the CPU, memory and race checks, a loss curve beside the CPU's, and
# speed. Prints what docs/RESULTS.md quotes.
#
# Where the machine with the GPU has no Rust, build elsewhere and say where things are:
#   ELMUR=path/to/elmur TESTS="path/to/cuda path/to/gradients" runs/gpu-check.sh
# PEER=path/to/peer.py adds a peer's rows; SANITIZER= (empty) leaves compute-sanitizer out; OUT changes the folder.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu-check}
SANITIZER=${SANITIZER-compute-sanitizer}
# Nothing is skipped here for want of a GPU.
export ELMUR_REQUIRE_GPU=1
if [ -z "${ELMUR:-}" ]; then
  cargo build --release --quiet -p elmur --features cuda
  ELMUR=$PWD/target/release/elmur
  TESTS=$(cargo test --release -p elmur-engine --features cuda --test cuda --test gradients --no-run 2>&1 |
    sed -n 's/.*Executable.*(\(.*\))/\1/p')
fi
rm -rf "$OUT"
mkdir -p "$OUT"
for test in $TESTS; do "$test" --test-threads=2; done
for precision in f32 tf32; do
  "$ELMUR" verify --device cuda --precision $precision crates/elmur-model/tests/golden/*.safetensors
done
if [ -n "$SANITIZER" ]; then
  for test in $TESTS; do "$SANITIZER" --tool memcheck --error-exitcode 3 "$test" --test-threads=1; done
  # Slow: one test of each kind of kernel.
  for test in $TESTS; do
    "$SANITIZER" --tool racecheck --error-exitcode 3 "$test" --test-threads=1 out_of_range norms losses tables memory_writes swiglu
  done
fi

# The same run on both devices, dropout and all.
for device in cpu cuda; do
  "$ELMUR" train tmaze --seed 0 --device $device train.precision=f32 train.batches=200 eval.every=0 --out "$OUT/curve-$device" 2>/dev/null
done
paste <(grep -o '"loss":[^,]*' "$OUT/curve-cpu/metrics.jsonl") <(grep -o '"loss":[^,]*' "$OUT/curve-cuda/metrics.jsonl") |
  awk -F'[:\t]' '{ d = $2 - $4; if (d < 0) d = -d; if (d > worst) worst = d }
    END { printf "200 batches of T-Maze: losses differ by at most %.2g\n", worst; exit worst > 1e-2 }'

"$ELMUR" bench train --json --device cuda
[ -z "${PEER:-}" ] || python3 "$PEER" --device cuda
for precision in tf32 bf16 f32; do "$ELMUR" bench train --json --device cuda --precision $precision; done
for runs in 4 16; do "$ELMUR" bench train --json --device cuda --runs $runs; done
"$ELMUR" bench train --json --device cuda --preset remember-color --no-images
time "$ELMUR" train tmaze --seed 1 --device cuda eval.every=0 train.checkpoint_every=10000 --out "$OUT/schedule" 2>/dev/null
