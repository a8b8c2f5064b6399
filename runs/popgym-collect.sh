#!/usr/bin/env bash
# Demonstrations of all 48 POPGym tasks: 3,000 episodes each by players that know only what they have seen. Prints mean return, time and size.
#
# EPISODES, TASKS (a pattern such as 'Repeat*Easy'), SEED and OUT change it. Datasets that are there already are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/popgym}
EPISODES=${EPISODES:-3000}
TASKS=${TASKS:-*}
SEED=${SEED:-0}
FAMILIES="Autoencode Battleship Concentration CountRecall HigherLower LabyrinthEscape LabyrinthExplore MineSweeper MultiarmedBandit
  NoisyPositionOnlyCartPole NoisyPositionOnlyPendulum PositionOnlyCartPole PositionOnlyPendulum RepeatFirst RepeatPrevious VelocityOnlyCartpole"
cargo build --release --quiet
ELMUR=target/release/elmur
mkdir -p "$OUT"
printf '%-34s %10s %8s %8s %8s %8s\n' task steps return ± seconds MB
since() { awk -v now="$EPOCHREALTIME" -v start="$1" 'BEGIN { printf "%.1f", now - start }'; }
begin=$EPOCHREALTIME
for family in $FAMILIES; do
  for difficulty in Easy Medium Hard; do
    # shellcheck disable=SC2053
    [[ $family$difficulty == $TASKS ]] || continue
    file=$OUT/popgym-$family$difficulty.elmur
    start=$EPOCHREALTIME
    if [ ! -e "$file" ]; then
      $ELMUR collect "popgym-$family$difficulty" --episodes "$EPISODES" --seed "$SEED" --out "$file" >/dev/null 2>"$OUT/collect.log" ||
        { cat "$OUT/collect.log" >&2; exit 1; }
    fi
    $ELMUR inspect "$file" | awk -v task="$family$difficulty" -v seconds="$(since "$start")" -v bytes="$(wc -c < "$file")" '
      / episodes, / { steps = $(NF - 1) }
      $1 == "return" { mean = $2; error = $4 }
      END { printf "%-34s %10d %8.3f %8.3f %8.1f %8.1f\n", task, steps, mean, error, seconds, bytes / 1e6 }'
  done
done
rm -f "$OUT/collect.log"
echo "$EPISODES episodes each: $(since "$begin") s, $(du -sm "$OUT" | cut -f1) MB"
