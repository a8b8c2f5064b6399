#!/usr/bin/env bash
# POPGym in brief: RepeatFirstEasy, RepeatPreviousEasy and AutoencodeEasy until they are solved (or BATCHES are over), and one Easy task of every
# other family for BRIEF batches; then 100 test episodes each. Prints a row per task; "good play" is what the demonstrations' player reaches.
#
# SEEDS, BATCHES, BRIEF, EPISODES and OUT change it. A run that was interrupted is resumed.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/popgym-smoke}
SEEDS=${SEEDS:-"0"}
BATCHES=${BATCHES:-6000}
BRIEF=${BRIEF:-200}
SOLVED="RepeatFirst RepeatPrevious Autoencode"
OTHERS="Battleship Concentration CountRecall HigherLower LabyrinthEscape LabyrinthExplore MineSweeper MultiarmedBandit NoisyPositionOnlyCartPole
  NoisyPositionOnlyPendulum PositionOnlyCartPole PositionOnlyPendulum VelocityOnlyCartpole"
cargo build --release --quiet
ELMUR=target/release/elmur
mkdir -p "$OUT"
: > "$OUT/rows.tmp"
for family in $SOLVED $OTHERS; do
  batches=$BRIEF
  case " $SOLVED " in *" $family "*) batches=$BATCHES ;; esac
  runs=()
  for seed in $SEEDS; do
    run=$OUT/${family}Easy-$seed
    if [ -e "$run/checkpoints/last" ]; then
      $ELMUR train --resume "$run" train.batches="$batches" >/dev/null
    else
      rm -rf "$run"
      $ELMUR train "popgym-${family}Easy" train.batches="$batches" --seed "$seed" --out "$run" >/dev/null
    fi
    runs+=("$run")
  done
  $ELMUR eval "${runs[@]}" --episodes "${EPISODES:-100}" 2>/dev/null
  $ELMUR eval "${runs[@]}" --episodes "${EPISODES:-100}" --json 2>/dev/null >> "$OUT/rows.tmp"
done
mv "$OUT/rows.tmp" "$OUT/rows.jsonl"
