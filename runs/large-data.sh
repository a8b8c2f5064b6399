#!/usr/bin/env bash
# Trains on a file that is larger than the memory it may use: a dataset of 3 GB in less than 1 GB.
# Usage: runs/large-data.sh [BYTES]. Needs about 3 GB of disk; takes a few minutes on two cores.
# The size of a process is what Linux reports as its largest resident set (VmHWM).
set -euo pipefail
cd "$(dirname "$0")/.."
bytes=${1:-3000000000}
limit_kb=1000000
out=${OUT:-out/large-data}
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$out"
cargo build --release --quiet -p elmur-cli
cargo build --release --quiet -p elmur-data --example large
data=$out/pictures.elmur
if [ ! -f "$data" ] || [ "$(stat -c %s "$data")" -lt "$bytes" ]; then
  "$target/release/examples/large" "$data" "$bytes"
fi
rm -rf "$out/run"
"$target/release/elmur" train tmaze-quick env=null --data "$data" --out "$out/run" \
  train.batch=16 train.batches=10 train.epochs=0 train.checkpoint_every=10 &
process=$!
largest=0
while kill -0 "$process" 2>/dev/null; do
  now=$(awk '/VmHWM/ {print $2}' "/proc/$process/status" 2>/dev/null || echo 0)
  if [ "${now:-0}" -gt "$largest" ]; then largest=$now; fi
  sleep 0.2
done
wait "$process"
echo "data: $(stat -c %s "$data") bytes; largest resident memory: $((largest / 1000)) MB"
if [ "$largest" -ge "$limit_kb" ]; then
  echo "expected less than $((limit_kb / 1000)) MB" >&2
  exit 1
fi
