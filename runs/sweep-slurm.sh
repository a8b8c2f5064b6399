#!/usr/bin/env bash
# Workers of a sweep as a Slurm job array. Each element takes runs until none is left:
#
#   sbatch --array=0-7 runs/sweep-slurm.sh runs/sweep-example.json [options of `elmur sweep run`]
#
# ELMUR names a program built elsewhere. With GPUs add: --gres=gpu:1 ... --device cuda. All options of sbatch can be given on its command line.
# An element that is told to stop (two minutes before its time limit, or by preemption) saves its runs and goes back into the queue.
#SBATCH --job-name=elmur-sweep
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=elmur-sweep-%A_%a.log
set -uo pipefail
ELMUR=${ELMUR:-target/release/elmur}
# Signals reach this script alone; they are handed on, and the second wait is for the worker that saves.
"$ELMUR" sweep run "$@" --jobs "${JOBS:-1}" --die-with-parent &
worker=$!
stopped=
trap 'stopped=1; kill -TERM "$worker" 2> /dev/null' USR1 TERM INT
wait "$worker"
code=$?
if [ -n "$stopped" ]; then
  wait "$worker"
  code=$?
fi
# 143: stopped by us, with work left. (75 means that other workers have all that is left: nothing to queue for.)
if [ "$code" = 143 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
