#!/usr/bin/env bash
# POPGym's 48 tasks: ours, the paper's setting, baselines on the easy third, and what each ingredient brings. Every part is a
# sweep (docs/sweeps.md): stopped at any time, it goes on where it was, also on another machine from docs/results/popgym.json.
#
#   runs/popgym.sh [PART...]      PART: popgym, popgym-compat, popgym-baselines, popgym-ablation; all of them without any
#
# ELMUR (a program built elsewhere), DEVICE (cuda), JOBS (4: runs at once) and MINUTES (no limit; for each part) change it.
set -euo pipefail
cd "$(dirname "$0")/.."
ELMUR=${ELMUR:-target/release/elmur}
STATE=docs/results/popgym.json
[ $# -gt 0 ] || set -- popgym popgym-compat popgym-baselines popgym-ablation
for part; do
  status=0
  "$ELMUR" sweep run "runs/$part.json" --jobs "${JOBS:-4}" --device "${DEVICE:-cuda}" ${MINUTES:+--limit-minutes "$MINUTES"} || status=$?
  "$ELMUR" sweep report "runs/$part.json" --state "$STATE"
  # 75: some runs are left, for the next time.
  [ $status = 0 ] || [ $status = 75 ] || exit $status
done
