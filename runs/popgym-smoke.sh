#!/usr/bin/env bash
# POPGym in brief: RepeatFirstEasy, RepeatPreviousEasy and AutoencodeEasy until they are solved (or BATCHES are over), and one Easy task of every
# other family for BRIEF batches; then 100 test episodes each. Prints a row per task; "good play" is what the demonstrations' player reaches.
#
# SOLVED and OTHERS (families), SEEDS, BATCHES, BRIEF, EPISODES and OUT change it; TRAIN holds further settings of `elmur train` (TRAIN="--device cuda eval.device=cpu"), JOBS
# how many tasks train at once, ELMUR a program built elsewhere. A run that was interrupted is resumed.
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-out/popgym-smoke} SEEDS=${SEEDS:-"0"} EPISODES=${EPISODES:-100} TRAIN=${TRAIN:-}
BATCHES=${BATCHES:-6000}
BRIEF=${BRIEF:-200}
SOLVED=${SOLVED-"RepeatFirst RepeatPrevious Autoencode"}
OTHERS=${OTHERS-"Battleship Concentration CountRecall HigherLower LabyrinthEscape LabyrinthExplore MineSweeper MultiarmedBandit NoisyPositionOnlyCartPole
  NoisyPositionOnlyPendulum PositionOnlyCartPole PositionOnlyPendulum VelocityOnlyCartpole"}
if [ -z "${ELMUR:-}" ]; then
  cargo build --release --quiet
  ELMUR=target/release/elmur
fi
export ELMUR
mkdir -p "$OUT"

# Trains and evaluates one task: family, batches.
task() {
  set -euo pipefail
  runs=()
  for seed in $SEEDS; do
    run=$OUT/${1}Easy-$seed
    if [ -e "$run/checkpoints/last" ]; then
      # shellcheck disable=SC2086
      $ELMUR train --resume "$run" train.batches="$2" $TRAIN >/dev/null
    else
      rm -rf "$run"
      # shellcheck disable=SC2086
      $ELMUR train "popgym-${1}Easy" train.batches="$2" --seed "$seed" $TRAIN --out "$run" >/dev/null
    fi
    runs+=("$run")
  done
  $ELMUR eval "${runs[@]}" --episodes "$EPISODES" --json 2>/dev/null > "$OUT/$1.tmp"
  mv "$OUT/$1.tmp" "$OUT/$1.jsonl"
  $ELMUR eval "${runs[@]}" --episodes "$EPISODES" 2>/dev/null
}
export -f task

{
  for family in $SOLVED; do echo "$family $BATCHES"; done
  for family in $OTHERS; do echo "$family $BRIEF"; done
} | xargs -P "${JOBS:-1}" -L 1 bash -c 'task "$@"' task
for family in $SOLVED $OTHERS; do cat "$OUT/$family.jsonl"; done > "$OUT/rows.jsonl"
