#!/usr/bin/env bash
# The paper's T-Maze (RQ1): the paper's model, 4 seeds, trained on episodes of at most 29 steps, evaluated up to a million. The learning rate is ours;
# the paper's is train.lr=2.06e-4.
#
# BATCHES (default 1000; the paper's 1,000 epochs are 37500), SEEDS, LENGTHS, EPISODES, LONG_EPISODES (beyond 9,600) and OUT change it.
# A run that was interrupted is resumed. Two cores: about 5 minutes per seed to train; a million steps take tens of minutes per seed.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/tmaze}
SEEDS=${SEEDS:-"0 1 2 3"}
BATCHES=${BATCHES:-1000}
LENGTHS=${LENGTHS:-"9,30,90,150,300,600,900,1200,2400,4800,9600"}
LONG=${LONG-"100000,1000000"}
cargo build --release --quiet
ELMUR=target/release/elmur
mkdir -p "$OUT"
runs=()
for seed in $SEEDS; do
  run=$OUT/seed-$seed
  if [ -e "$run/checkpoints/last" ]; then
    $ELMUR train --resume "$run" train.batches="$BATCHES"
  else
    rm -rf "$run"
    $ELMUR train tmaze train.batches="$BATCHES" --seed "$seed" --out "$run"
  fi
  runs+=("$run")
done
$ELMUR eval "${runs[@]}" --lengths "$LENGTHS" --episodes "${EPISODES:-100}" --json > "$OUT/rows.tmp"
if [ -n "$LONG" ]; then
  $ELMUR eval "${runs[@]}" --lengths "$LONG" --episodes "${LONG_EPISODES:-20}" --json >> "$OUT/rows.tmp"
fi
mv "$OUT/rows.tmp" "$OUT/rows.jsonl"
grep '"runs"' "$OUT/rows.jsonl"
$ELMUR plot success "$OUT/rows.jsonl" --out "$OUT/success" --title "T-Maze, the paper's model, $BATCHES batches"
