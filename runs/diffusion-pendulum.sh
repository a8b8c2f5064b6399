#!/usr/bin/env bash
# Diffusion Policy on PositionOnlyPendulumEasy with the velocity shown: return of 100 test episodes, mean ± SEM over seeds, beside the player's and BC-MLP's.
# The bar is 0.8 of the player's return. A fifth of the demonstrated steps are random torques that are not imitated, so that the data show how to recover.
#
# POLICIES, SEEDS, BATCHES, EPISODES, DEVICE (cpu or cuda), JOBS (runs at once) and OUT change it; ELMUR names a binary that was built elsewhere.
# An interrupted run is resumed, a finished one is not trained again.
set -euo pipefail
cd "$(dirname "$0")/.."
POLICIES=${POLICIES:-"diffusion bc-mlp"}
SEEDS=${SEEDS:-"0 1 2"}
export BATCHES=${BATCHES:-3000} EPISODES=${EPISODES:-100} DEVICE=${DEVICE:-cpu} OUT=${OUT:-out/diffusion-pendulum} THREADS=${THREADS:-0}
export TASK=popgym-PositionOnlyPendulumEasy
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
    "$ELMUR" -q train "$TASK" env.velocity=true policy="$policy" data.noise=0.2 train.batches="$BATCHES" eval.every="$BATCHES" \
      train.checkpoint_every="$BATCHES" train.threads="$THREADS" --seed "$seed" --device "$DEVICE" --out "$run" || return
  fi
  "$ELMUR" -q eval "$run" --episodes "$EPISODES" --threads "$THREADS" --json > "$run/rows.tmp" &&
    mv "$run/rows.tmp" "$run/rows.jsonl"
}
export -f one
for policy in $POLICIES; do for seed in $SEEDS; do echo "$policy $seed"; done; done |
  xargs -P "${JOBS:-1}" -L 1 bash -c 'one "$@" > "$OUT/$1-seed-$2.log" 2>&1 || { echo "$1 seed $2 failed:"; tail -3 "$OUT/$1-seed-$2.log"; }' one
rm -f "$OUT/player.elmur"
"$ELMUR" collect "$TASK" --set velocity=true --episodes 1000 --seed 9 --out "$OUT/player.elmur" 2> /dev/null | sed -nE 's/.*mean return ([-0-9.]+).*/| player | \1 | 1,000 episodes |/p' || true
for policy in $POLICIES; do
  cat "$OUT/$policy"-seed-*/rows.jsonl 2> /dev/null | grep '"checkpoint"' | sed -E 's/.*"score":([-0-9.e]+).*/\1/' | awk -v name="$policy" '
    { n++; sum += $1; squares += $1 * $1 }
    END {
      if (!n) exit
      mean = sum / n; variance = n > 1 ? (squares - n * mean * mean) / (n - 1) : 0
      printf "| %s | %.3f ± %.3f | %d runs |\n", name, mean, sqrt((variance > 0 ? variance : 0) / n), n
    }'
done
