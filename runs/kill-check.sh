#!/usr/bin/env bash
# Proof that nothing is lost by `kill -9`: commands are killed at random moments, continued as a user would
# continue them, and must leave the same bytes as an undisturbed run.
#
#   runs/kill-check.sh [KILLS] [SEED]     100 kills by default, at least 5
#
# ELMUR (a program built elsewhere) and OUT (a folder that is replaced) change it. Moments are spread over the
# measured time of the undisturbed run; every third one lies in its first tenth of a second, where files are
# created. A process that ended before its moment does not count as a kill.
# Exits with 1 if bytes differ, if a command cannot continue, or if the last successful command leaves
# temporary files or half a checkpoint behind. Then OUT/log/PART keeps what was found.
set -euo pipefail
cd "$(dirname "$0")/.."
KILLS=${1:-100}
SEED=${2:-0}
OUT=${OUT:-out/kill-check}
ELMUR=$(realpath -m "${ELMUR:-target/release/elmur}")
if ! [[ $KILLS =~ ^[0-9]+$ && $SEED =~ ^[0-9]+$ ]] || [ "$KILLS" -lt 5 ]; then
  echo "usage: runs/kill-check.sh [KILLS, at least 5] [SEED, a number]" >&2
  exit 2
fi
if ! [ -x "$ELMUR" ]; then
  echo "$ELMUR: no such program; run \`cargo build --release\`, or set ELMUR" >&2
  exit 2
fi
RANDOM=$SEED
rm -rf "$OUT"
mkdir -p "$OUT"/{reference,killed,log}
OUT=$(realpath "$OUT")

TRAIN=(train tmaze-quick model.d_model=16 model.segment_length=3 env.length=9 data.episodes=100 train.batch=8 train.epochs=0 train.batches=300
  train.checkpoint_every=5 train.threads=1 eval.episodes=10 eval.length=9 eval.every=50 eval.target=null)
COLLECT=(collect tmaze --episodes 20000 --threads 1 --out data/maze.elmur)
EVAL=(eval ../reference/run --lengths 9,300,900 --episodes 100 --threads 1 --plot pictures/success)
DEMO=(demo --out demo --longest 30)

# Sets `command` to what continues a part from what lies in `killed`, and `how`: by a resume, or by the same
# command again.
command_of() {
  how=again
  case $1 in
    train | resume)
      command=("${TRAIN[@]}" --out run)
      if [ -e "$OUT/killed/run/config.json" ]; then
        command=(train --resume run)
        how=resumed
      fi ;;
    collect)
      command=("${COLLECT[@]}")
      # The file appears when it is whole; killed after that, there is nothing to go on with.
      if [ -e "$OUT/killed/data/maze.elmur" ]; then command=(inspect data/maze.elmur); fi ;;
    eval) command=("${EVAL[@]}") ;;
    demo) command=("${DEMO[@]}") ;;
  esac
}

# Runs `command` to its end in $1, with its output in $1/stdout; sets `status`.
finish() {
  status=0
  (cd "$OUT/$1" && exec "$ELMUR" "${command[@]}") > "$OUT/$1/stdout" 2> "$OUT/log/stderr" || status=$?
}

# Starts `command` in `killed` and kills it at a random moment of `duration` (microseconds); sets `status`,
# 137 if it was killed.
strike() {
  local span=$duration pid delay
  moments=$((moments + 1))
  if [ $((moments % 3)) -eq 0 ] && [ "$duration" -gt 100000 ]; then span=100000; fi
  delay=$(((RANDOM * 32768 + RANDOM) % span))
  (cd "$OUT/killed" && exec "$ELMUR" "${command[@]}") > "$OUT/killed/stdout" 2> "$OUT/log/stderr" &
  pid=$!
  sleep "$(printf '%d.%06d' $((delay / 1000000)) $((delay % 1000000)))"
  kill -9 $pid 2>/dev/null || true
  status=0
  wait $pid 2>/dev/null || status=$?
}

# An empty place to start from. `resume` needs a run that was interrupted before; that kill is not counted.
begin() {
  rm -rf "$OUT"/killed/*
  mkdir -p "$OUT"/killed/{data,pictures}
  carried=false
  if [ "$1" = resume ]; then
    until [ -e "$OUT/killed/run/config.json" ]; do
      rm -rf "$OUT/killed/run"
      command=("${TRAIN[@]}" --out run)
      strike
    done
    carried=true
  fi
}

# Notes once what differs, in `faults` or `remains`.
fault() { case "$faults" in *"$1"*) ;; *) faults+="  $1"$'\n' ;; esac; }
remains() { case "$remains" in *"$1"*) ;; *) remains+="  left behind: $1"$'\n' ;; esac; }

same() { cmp -s "$OUT/reference/$1" "$OUT/killed/$1" || fault "$1 differs"; }

# Rows of a run's metrics without the time they took.
rows() { sed -E 's/,?"(data_)?seconds":[^,}]*//g' "$OUT/$1/metrics.jsonl"; }

# Lines of the demo that do not tell how long it took.
table() { grep -vE '(trained|Done) in [0-9]' "$OUT/$1/stdout"; }

# The run $1 in `killed` against the one in `reference`.
same_run() {
  local link file
  for link in last best; do
    if [ "$(readlink "$OUT/reference/$1/checkpoints/$link")" != "$(readlink "$OUT/killed/$1/checkpoints/$link")" ]; then
      fault "$1/checkpoints/$link points to another checkpoint"
    fi
    for file in model.safetensors state.safetensors progress.json config.json; do same "$1/checkpoints/$link/$file"; done
  done
  for file in config.json data.json; do same "$1/$file"; done
  cmp -s <(rows "reference/$1") <(rows "killed/$1") || fault "$1/metrics.jsonl differs"
  while read -r file; do remains "$1/checkpoints/$file"; done < <(
    comm -13 <(ls -A "$OUT/reference/$1/checkpoints" | sort) <(ls -A "$OUT/killed/$1/checkpoints" | sort))
}

# Compares what the last successful command left in `killed` with the reference.
check() {
  local before=$faults$remains path
  if [ "$status" != 0 ]; then
    fault "elmur ${command[*]}: exit $status, $(tail -n 1 "$OUT/log/stderr")"
  else
    case $1 in
      train | resume) same_run run ;;
      collect) same data/maze.elmur ;;
      eval) for path in stdout pictures/success.svg pictures/success.png; do same "$path"; done ;;
      demo)
        same_run demo
        for path in demonstrations.elmur success.svg slots.svg; do same "demo/$path"; done
        cmp -s <(table reference) <(table killed) || fault "the demo's table differs" ;;
    esac
    # Names of temporary files hold a process's number, which says nothing.
    while read -r path; do remains "$path"; done < <(
      cd "$OUT/killed" && find . -mindepth 1 \( -name '*.tmp' -o -name '*.old' -o -name '.?*' \) ! -name .lock |
        sed -E 's|^\./||; s/\.[0-9]+\.[0-9]+\.tmp$/.PID.N.tmp/' | sort -u)
  fi
  if [ "$faults$remains" != "$before" ]; then
    rm -rf "$OUT/log/$part"
    cp -a "$OUT/killed" "$OUT/log/$part"
  fi
}

# A part: its name and its number of kills.
run_part() {
  part=$1
  local share=$2 kills=0 resumed=0 again=0 moments=0 tries=0 start faults= remains= carried duration verdict
  # Few kills are spent on the demo, which is slow: its first one is early.
  [ "$part" != demo ] || moments=2
  rm -rf "$OUT"/killed/*
  command_of "$part"
  mkdir -p "$OUT"/reference/{data,pictures}
  # `resume` is measured against the run of `train`.
  if [ "$part" != resume ]; then
    start=${EPOCHREALTIME/[.,]/}
    finish reference
    reference_time=$((${EPOCHREALTIME/[.,]/} - start))
    if [ "$status" != 0 ]; then
      echo "elmur ${command[*]}: exit $status undisturbed: $(cat "$OUT/log/stderr")" >&2
      exit 1
    fi
  fi
  duration=$reference_time
  begin "$part"
  while [ "$kills" -lt "$share" ]; do
    tries=$((tries + 1))
    if [ $tries -gt $((share * 20 + 20)) ]; then
      fault "only $kills of $tries processes were still running at their moment"
      break
    fi
    command_of "$part"
    [ $carried = false ] || count
    strike
    if [ "$status" = 137 ]; then
      kills=$((kills + 1))
      carried=true
      # `train`: every killed process is continued to the end. The others are killed again and again.
      [ "$part" = train ] || continue
      command_of "$part"
      count
      finish killed
    fi
    check "$part"
    begin "$part"
  done
  if [ $carried = true ]; then
    command_of "$part"
    count
    finish killed
    check "$part"
  fi
  verdict="same bytes"
  [ -z "$faults" ] || verdict="FAILED"
  [ -z "$remains" ] && verdict+=", nothing left behind" || verdict+=", LEFTOVERS"
  printf '%-8s %4d kills, %3d resumed, %3d same command again: %s\n' "$part" $kills $resumed $again "$verdict"
  printf '%s%s' "$faults" "$remains"
  [ -z "$faults$remains" ] || failed=1
}

count() { if [ "$how" = resumed ]; then resumed=$((resumed + 1)); else again=$((again + 1)); fi; }

failed=0
demo=$((KILLS >= 20 ? KILLS / 10 : KILLS > 5 ? 2 : 1))
collect=$((KILLS * 3 / 20 > 0 ? KILLS * 3 / 20 : 1))
eval=$collect
train=$(((KILLS - demo - collect - eval) / 2))
resume=$((KILLS - demo - collect - eval - train))
reference_time=0
run_part train "$train"
run_part resume "$resume"
run_part collect "$collect"
run_part eval "$eval"
run_part demo "$demo"
exit $failed
