#!/usr/bin/env bash
# Weights of bf16 beside f32: trains T-Maze and four POPGym tasks in brief, then acts out the same test episodes with both. Prints two rows per task.
#
# TASKS (families), BATCHES, EPISODES and OUT change it; TRAIN holds further settings of `elmur train`, ELMUR a program built elsewhere. Runs that exist are not trained again.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/weights} BATCHES=${BATCHES:-400} EPISODES=${EPISODES:-100} TRAIN=${TRAIN:-}
TASKS=${TASKS-"RepeatFirst RepeatPrevious PositionOnlyCartPole CountRecall"}
if [ -z "${ELMUR:-}" ]; then
  cargo build --release --quiet
  ELMUR=target/release/elmur
fi
mkdir -p "$OUT"

# Evaluates a run with both: run, further options.
both() {
  for weights in f32 bf16; do
    printf '%-5s ' "$weights"
    $ELMUR eval "$@" --episodes "$EPISODES" --weights "$weights" 2>/dev/null | tail -n 1
  done
}

if [ ! -e "$OUT/tmaze/checkpoints/last" ]; then
  # shellcheck disable=SC2086
  $ELMUR -q train tmaze-quick eval.length=9600 eval.episodes=20 $TRAIN --out "$OUT/tmaze" >/dev/null
fi
both "$OUT/tmaze" --set length=9600
if [ ! -e "$OUT/tmaze-experts/checkpoints/last" ]; then
  # The same with a mixture of experts in every layer, as the paper's model has.
  experts='{"moe":{"experts":2,"routed_d_ff":32,"shared_experts":1,"shared_d_ff":64,"top_k":2,"balance":0.01,"dropout":0.0}}'
  # shellcheck disable=SC2086
  $ELMUR -q train tmaze-quick model.ffn="$experts" eval.length=9600 eval.episodes=20 $TRAIN --out "$OUT/tmaze-experts" >/dev/null
fi
both "$OUT/tmaze-experts" --set length=9600
for task in $TASKS; do
  if [ ! -e "$OUT/$task/checkpoints/last" ]; then
    # shellcheck disable=SC2086
    $ELMUR -q train "popgym-${task}Easy" train.batches="$BATCHES" $TRAIN --out "$OUT/$task" >/dev/null
  fi
  both "$OUT/$task"
done
