#!/usr/bin/env bash
# MIKASA-Robo: demonstrations by the scripted experts, policies trained on them, success in the simulator. Stopped at any time,
# every part goes on where it was.
#
#   runs/mikasa.sh [PART...]      PART: collect; mikasa (ours), mikasa-seeds, mikasa-baselines, mikasa-baselines-seeds,
#                                 mikasa-told (the answer as a further input); all of them without any
#
# ELMUR_MIKASA names the simulator (elmur simulators install mikasa DIR). ELMUR (a program built elsewhere), DEVICE (cuda), JOBS
# (1: runs at once), MINUTES (no limit; for each sweep, and each of TASKS), EPISODES (900 demonstrations of a task), THREADS (2: simulators at
# once) and TASKS ("RememberColor3 TakeItBack"; all seven; collect takes any of the 32) change it. Training needs no simulator but evaluation does: a run trained elsewhere, with
# `elmur train`, is evaluated by `elmur eval RUN` where the simulator is.
set -euo pipefail
cd "$(dirname "$0")/.."
ELMUR=${ELMUR:-target/release/elmur}
STATE=docs/results/mikasa.json
[ $# -gt 0 ] || set -- collect mikasa mikasa-seeds mikasa-baselines mikasa-baselines-seeds mikasa-told
work() {
  local status=0
  "$ELMUR" sweep run "$@" --jobs "${JOBS:-1}" --device "${DEVICE:-cuda}" ${MINUTES:+--limit-minutes "$MINUTES"} || status=$?
  # 75: some runs are left, for the next time.
  [ $status = 0 ] || [ $status = 75 ] || exit $status
}
for part; do
  if [ "$part" = collect ]; then
    mkdir -p out/mikasa-data
    for task in ${TASKS:-RememberColor3 RememberColor5 RememberColor9 RememberShape3 TakeItBack ShellGameTouch InterceptSlow}; do
      file=out/mikasa-data/$task.elmur
      [ -e "$file" ] || "$ELMUR" collect "mikasa-$task" --episodes "${EPISODES:-900}" --threads "${THREADS:-2}" \
        --set tail=5 --set cue=true --set size=64 --set render=128 --set levels=16 --out "$file"
    done
    continue
  fi
  if [ ! -e "runs/$part.json" ]; then
    echo "runs/mikasa.sh: $part: expected collect, mikasa, mikasa-seeds, mikasa-baselines, mikasa-baselines-seeds or mikasa-told" >&2
    exit 2
  fi
  [ -n "${TASKS:-}" ] || work "runs/$part.json"
  for task in ${TASKS:-}; do
    # Not every sweep has every task.
    if grep -q "\"mikasa-$task\"" "runs/$part.json"; then
      work "runs/$part.json" --only "mikasa-$task "
    else
      echo "runs/mikasa.sh: $part has no runs of $task (TASKS)" >&2
    fi
  done
  "$ELMUR" sweep report "runs/$part.json" --state "$STATE"
done
