#!/usr/bin/env bash
# The paper's generalization grid (RQ2): trained on one length, evaluated on all others. Segments are a third of the training length.
#
# PRESET (default tmaze), TRAIN_LENGTHS, LENGTHS, SEEDS, BATCHES, BATCH, EPISODES and OUT change it.
set -euo pipefail
cd "$(dirname "$0")/.."
PRESET=${PRESET:-tmaze}
OUT=${OUT:-out/tmaze-generalization}
SEEDS=${SEEDS:-"0"}
TRAIN_LENGTHS=${TRAIN_LENGTHS:-"9 30 90 150 300 600 900"}
LENGTHS=${LENGTHS:-"9,30,90,150,300,600,900,1200,2400,4800,9600"}
BATCHES=${BATCHES:-1000}
cargo build --release --quiet
ELMUR=target/release/elmur
mkdir -p "$OUT"
: > "$OUT/rows.tmp"
for length in $TRAIN_LENGTHS; do
  for seed in $SEEDS; do
    run=$OUT/$length-seed-$seed
    if [ -e "$run/checkpoints/last" ]; then
      $ELMUR train --resume "$run" train.batches="$BATCHES"
    else
      rm -rf "$run"
      # Validation on the training length: a run that never saw longer episodes is not chosen by them.
      $ELMUR train "$PRESET" env.length="$length" model.segment_length=$((length / 3)) train.batches="$BATCHES" \
        train.batch="${BATCH:-128}" eval.length="$length" eval.every=0 eval.target=null --seed "$seed" --out "$run"
    fi
    $ELMUR eval "$run" --lengths "$LENGTHS" --episodes "${EPISODES:-100}" --json | grep '"checkpoint"' >> "$OUT/rows.tmp"
  done
done
mv "$OUT/rows.tmp" "$OUT/rows.jsonl"
$ELMUR plot heat-map "$OUT/rows.jsonl" --out "$OUT/heat-map" --title "T-Maze: success by training and evaluation length"
