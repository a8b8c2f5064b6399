#!/usr/bin/env bash
# What dropout does for retention: the paper's model with and without it, for two lambdas.
#
# PRESET (default tmaze), SEEDS, BATCHES, LENGTHS, EPISODES and OUT change it.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/tmaze-dropout}
SEEDS=${SEEDS:-"0"}
BATCHES=${BATCHES:-1000}
PRESET=${PRESET:-tmaze}
LENGTHS=${LENGTHS:-"9,30,90,300,900,2400,9600,30000,100000"}
cargo build --release --quiet
ELMUR=target/release/elmur
mkdir -p "$OUT"
rm -f "$OUT"/*.jsonl
none="model.dropout=0 model.attention_dropout=0 model.memory.dropout=0"
[ "$PRESET" = tmaze ] && none="$none model.ffn.moe.dropout=0"
for lambda in 0.05 0.79; do
  for dropout in with without; do
    runs=()
    for seed in $SEEDS; do
      run=$OUT/lambda-$lambda-$dropout-$seed
      if [ ! -e "$run/checkpoints/best" ]; then
        rm -rf "$run"
        # shellcheck disable=SC2046
        $ELMUR train "$PRESET" model.memory.lambda=$lambda $([ $dropout = without ] && echo "$none") \
          train.batches="$BATCHES" eval.every=0 eval.length=30 eval.target=null --seed "$seed" --out "$run"
      fi
      runs+=("$run")
    done
    name="lambda $lambda, $dropout dropout"
    $ELMUR eval "${runs[@]}" --lengths "$LENGTHS" --episodes "${EPISODES:-100}" --json > "$OUT/rows.tmp"
    mv "$OUT/rows.tmp" "$OUT/$name.jsonl"
  done
done
$ELMUR plot success "$OUT"/*.jsonl --out "$OUT/success" --title "T-Maze: what dropout does for retention"
