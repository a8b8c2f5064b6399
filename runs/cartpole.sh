#!/usr/bin/env bash
# CartPole-v1 for ELMUR and every baseline: return of 100 test episodes, mean ± SEM over seeds (the paper: 500 for all that it tried).
#
# POLICIES, SEEDS, BATCHES, BATCH (crops in each), EPISODES, DEVICE (cpu or cuda), JOBS (runs at once) and OUT change it; ELMUR names a binary that was built elsewhere.
# An interrupted run is resumed, a finished one is not trained again.
set -euo pipefail
cd "$(dirname "$0")/.."
POLICIES=${POLICIES:-"elmur rate rmt trxl dt dmamba bc-lstm bc-mlp cql cql-lstm cql-compat tt"}
SEEDS=${SEEDS:-"0 1 2"}
export BATCHES=${BATCHES:-600} BATCH=${BATCH:-16} EPISODES=${EPISODES:-100} DEVICE=${DEVICE:-cpu} OUT=${OUT:-out/cartpole} THREADS=${THREADS:-0}
if [ -z "${ELMUR:-}" ]; then
  cargo build --release --quiet
  ELMUR=target/release/elmur
fi
export ELMUR
mkdir -p "$OUT"
one() {
  policy=$1 seed=$2 run=$OUT/$1-seed-$2
  if [ -e "$run/checkpoints/last" ]; then
    "$ELMUR" -q train --resume "$run" train.batches="$BATCHES" || return
  else
    rm -rf "$run"
    "$ELMUR" -q train cartpole policy="$policy" train.epochs=null train.batch="$BATCH" train.batches="$BATCHES" eval.every=$((BATCHES / 4)) eval.target=null \
      train.checkpoint_every="$BATCHES" train.standardize=true train.threads="$THREADS" --seed "$seed" --device "$DEVICE" --out "$run" || return
  fi
  "$ELMUR" -q eval "$run" --episodes "$EPISODES" --threads "$THREADS" --device "$DEVICE" --json > "$run/rows.tmp" &&
    mv "$run/rows.tmp" "$run/rows.jsonl"
}
export -f one
for policy in $POLICIES; do for seed in $SEEDS; do echo "$policy $seed"; done; done |
  xargs -P "${JOBS:-1}" -L 1 bash -c 'one "$@" > "$OUT/$1-seed-$2.log" 2>&1 || { echo "$1 seed $2 failed:"; tail -3 "$OUT/$1-seed-$2.log"; }' one
for policy in $POLICIES; do
  cat "$OUT/$policy"-seed-*/rows.jsonl 2> /dev/null | grep '"checkpoint"' | sed -E 's/.*"score":([-0-9.e]+).*/\1/' | awk -v name="$policy" '
    { n++; sum += $1; squares += $1 * $1 }
    END {
      if (!n) exit
      mean = sum / n; variance = n > 1 ? (squares - n * mean * mean) / (n - 1) : 0
      printf "| %s | %.1f ± %.1f | %d runs |\n", name, mean, sqrt((variance > 0 ? variance : 0) / n), n
    }'
done
