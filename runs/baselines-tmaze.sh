#!/usr/bin/env bash
# T-Maze for ELMUR and every sequence baseline, trained alike: the same 4,800 demonstrations of at most 30 steps, the same number of batches, each
# policy with its own batch size and learning rate (`elmur inspect tmaze policy=X`). Success by episode length, mean ± SEM over seeds, and a figure.
#
# POLICIES, SEEDS, BATCHES, VALIDATION (length of validation episodes instead of the usual one), LR (of the baselines without -compat), LENGTHS, EPISODES, DEVICE (cpu or cuda) to train and EVAL_DEVICE to test on, JOBS (runs at once) and OUT change it; ELMUR names a binary that was built elsewhere.
# An interrupted run is resumed, a finished one is not trained again. Checkpoints are chosen on 20
# validation episodes, three times in a run: of 9,600 steps for policies that carry something, of the training length for the others.
set -euo pipefail
cd "$(dirname "$0")/.."
POLICIES=${POLICIES:-"elmur rate rmt trxl dt dmamba bc-lstm bc-mlp cql cql-lstm rate-compat rmt-compat trxl-compat dt-compat dmamba-compat bc-lstm-compat cql-compat"}
SEEDS=${SEEDS:-"0 1 2"}
export BATCHES=${BATCHES:-3000} LENGTHS=${LENGTHS:-"9,30,90,150,300,600,900,2400,9600"} EPISODES=${EPISODES:-100}
export LR=${LR:-1e-3} DEVICE=${DEVICE:-cpu} EVAL_DEVICE=${EVAL_DEVICE:-${DEVICE:-cpu}} OUT=${OUT:-out/baselines-tmaze} THREADS=${THREADS:-0} VALIDATION=${VALIDATION:-}
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
    # The published learning rates are for five times as many batches.
    case $policy in elmur | *-compat) rate=() ;; *) rate=(train.lr="$LR") ;; esac
    "$ELMUR" -q train tmaze policy="$policy" train.epochs=null train.batches="$BATCHES" eval.every=$((BATCHES / 3)) eval.target=null \
      train.checkpoint_every="$BATCHES" train.threads="$THREADS" "${rate[@]}" ${VALIDATION:+eval.length="$VALIDATION"} --seed "$seed" --device "$DEVICE" --out "$run" || return
  fi
  "$ELMUR" -q eval "$run" --lengths "$LENGTHS" --episodes "$EPISODES" --threads "$THREADS" --device "$EVAL_DEVICE" --json > "$run/rows.tmp" &&
    mv "$run/rows.tmp" "$run/rows.jsonl"
}
export -f one
for policy in $POLICIES; do for seed in $SEEDS; do echo "$policy $seed"; done; done |
  xargs -P "${JOBS:-1}" -L 1 bash -c 'one "$@" > "$OUT/$1-seed-$2.log" 2>&1 || { echo "$1 seed $2 failed:"; tail -3 "$OUT/$1-seed-$2.log"; }' one
files=()
for policy in $POLICIES; do
  # Rows of single runs; those over all runs are computed from them.
  cat "$OUT/$policy"-seed-*/rows.jsonl 2> /dev/null | grep '"checkpoint"' > "$OUT/$policy.jsonl" || continue
  case $policy in *-compat) ;; *) files+=("$OUT/$policy.jsonl") ;; esac
  sed -E 's/.*"score":([-0-9.e]+).*"length":([0-9]+).*/\2 \1/' "$OUT/$policy.jsonl" | sort -n | awk -v name="$policy" '
    { n[$1]++; sum[$1] += $2; squares[$1] += $2 * $2; if (!seen[$1]++) order[++count] = $1 }
    END {
      printf "| %s |", name
      for (i = 1; i <= count; i++) {
        l = order[i]; mean = sum[l] / n[l]; variance = n[l] > 1 ? (squares[l] - n[l] * mean * mean) / (n[l] - 1) : 0
        printf " %d: %.2f ± %.2f |", l, mean, sqrt((variance > 0 ? variance : 0) / n[l])
      }
      printf " %d runs |\n", n[order[1]]
    }'
done
[ ${#files[@]} -eq 0 ] || "$ELMUR" plot success "${files[@]}" --out "$OUT/success" --title "T-Maze: success by episode length, trained on 30 steps"
