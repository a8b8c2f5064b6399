#!/usr/bin/env bash
# Success of the scripted experts in the 32 MIKASA-Robo tasks: full-length episodes with exact resets, no images, one process.
#
# ELMUR_MIKASA names the simulator (elmur simulators install mikasa DIR); SEEDS (first:end) and TASKS change what is played.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${ELMUR_MIKASA:?set it to the folder of the simulator: elmur simulators install mikasa DIR}"
# shellcheck disable=SC2086
"$ELMUR_MIKASA/mikasa-python" simulators/mikasa/oracle.py "${SEEDS:-0:25}" ${TASKS:-}
