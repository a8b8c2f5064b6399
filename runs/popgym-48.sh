#!/usr/bin/env bash
# All 48 POPGym tasks with one kind of preset, trained and evaluated: a row of `elmur eval --json` per task.
#
#   runs/popgym-48.sh [SUFFIX]      SUFFIX: nothing (our small model), -compat, -bc-lstm or -dt
#
# ELMUR (a program built elsewhere), DEVICE (cpu), JOBS (1: tasks at once), SEED (0), OUT and MORE (further settings) change it.
# Tasks that are done are left alone, so that it can be stopped and continued.
set -uo pipefail
cd "$(dirname "$0")/.."
SUFFIX=${1:-}
export ELMUR=${ELMUR:-target/release/elmur} DEVICE=${DEVICE:-cpu} SEED=${SEED:-0} OUT=${OUT:-out/popgym-48$SUFFIX} MORE=${MORE:-} SUFFIX
mkdir -p "$OUT"
one() {
  local task=$1 run=$OUT/$1
  [ -s "$run.json" ] && return
  if [ -e "$run/config.json" ]; then
    "$ELMUR" train --quiet --resume "$run" > "$run.log" 2>&1 || return
  else
    # shellcheck disable=SC2086
    "$ELMUR" train --quiet "$task$SUFFIX" --seed "$SEED" --device "$DEVICE" eval.device=cpu train.threads=2 $MORE --out "$run" > "$run.log" 2>&1 || return
  fi
  "$ELMUR" eval --quiet "$run" --json --threads 2 > "$run.json.tmp" 2>> "$run.log" && mv "$run.json.tmp" "$run.json"
}
export -f one
"$ELMUR" presets --json | sed -n 's/.*"name":"\(popgym-[A-Za-z]*\(Easy\|Medium\|Hard\)\)".*/\1/p' | xargs -P "${JOBS:-1}" -I{} bash -c 'one {}'
cat "$OUT"/*.json | grep '"runs"' |
  sed -E 's/.*"env":"([^"]*)".*"score":([-0-9.e]*),"sem":([0-9.e-]*).*"good_return":([-0-9.e]*).*/\1 \2 \3 \4/' |
  awk '{ printf "%-44s %7.3f ± %.3f   good play %6.3f\n", $1, $2, $3, $4; sum += $2; good += $4; n++ } END { printf "%d tasks: sum %.2f, good play %.2f\n", n, sum, good }'
