#!/usr/bin/env bash
# Every figure that needs a GPU, in at most 8 minutes after the installation, as docs/results/gpu-*.json. What cannot be
# measured is named at the end, and the status is 1; the others are measured and written all the same.
#
#   bench/gpu.sh                   on a machine with a GPU
#   bench/gpu.sh check             first: whether that GPU does what tests show on stand-ins, and what a step launches
#   bench/gpu.sh loaders           the learner fed by 1, 3, 5 and 8 loaders, 5 minutes
#   bench/gpu.sh learn [SEED]      what it learns there (16 cores): Pong for 8 minutes, Breakout, Seaquest and Q*bert for
#                                  7 each, as docs/results/learning/*-gpu; half an hour, and their last games
#   bench/gpu.sh --rehearse DIR    the same commands on a CPU, small and short, into DIR: shows that they work, no more
#
# APEX_PYTHON=/path/to/python names an interpreter that has what apex needs, itself or on PYTHONPATH. Nothing is installed
# then; with a C compiler and setuptools the C parts are built beside their sources. Without git, APEX_COMMIT=HASH names the
# commit for the files of figures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=venv.sh
source ./venv.sh

learn=false
if (($# > 0 && $# <= 2)) && [[ $1 == learn && ${2:-1} =~ ^[0-9]+$ ]]; then
  learn=true
elif (($# == 0)) || [[ $# == 1 && ($1 == check || $1 == loaders) ]]; then
  options=(--preset atari --env ALE/Seaquest-v5 --device cuda --json)
  out=docs/results prefix=gpu learner=45 narrow=20 actor=15 system=(30) patience=1
elif (($# == 2)) && [[ $1 == --rehearse && -n $2 ]]; then
  # Short segments: in so short a time there must be some to count.
  options=(--preset cartpole --actor.segment-length 10 --device cpu --json)
  out=$2 prefix=rehearsal learner=1 narrow=1 actor=2 system=(4 --no-alone) patience=3  # What it is beside, the other parts have shown.
else
  fail "usage: bench/gpu.sh [check | loaders | learn [SEED] | --rehearse DIR]"
fi
if [[ -z ${APEX_PYTHON:-} ]]; then
  python=$PWD/.venv/bin/python
  ensure_venv "$PWD"
else
  python=$APEX_PYTHON
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # Programs that a run starts do not look into the current folder.
  "$python" setup.py build_ext --inplace >/dev/null 2>&1 ||
    echo "the C parts are not built: loading takes twice as long; $python setup.py build_ext --inplace says why" >&2
fi
trap 'exit 130' INT
failed=()

if $learn; then
  for task in pong breakout seaquest qbert; do
    "$python" -m bench learning run --task "$task-gpu" --system apex --seed "${2:-1}" || failed+=("$task")
  done
  if ((${#failed[@]})); then
    fail "not measured: ${failed[*]}; what was is in docs/results/learning"
  fi
  echo "wrote docs/results/learning/*-gpu; python -m bench learning tables makes tables and plots of it" >&2
  exit
fi
mkdir -p "$out"

# Before the first figure is written: that changes the checkout.
facts=$("$python" - <<'PYTHON'
import json
import os
from pathlib import Path
from apex.runtime.provenance import describe_checkout, describe_hardware, describe_versions

named = os.environ.get("APEX_COMMIT")
checkout = {"git": describe_checkout(Path("apex")) or (named and {"commit": named, "dirty": None})}
print(json.dumps(checkout | {"hardware": describe_hardware(), "versions": describe_versions()}))
PYTHON
)

# measure NAME LIMIT COMMAND...: runs `python -m bench COMMAND` within LIMIT + 10 seconds (a rehearsal, within three
# times as long: other work may be going on); its last line becomes NAME's figures. Returns 1 where there are none, and
# where the command says that they are not as they must be.
measure() {
  local name=$1 limit=$(($2 * patience)) said status=0
  shift 2
  set -- bench "$@" "${options[@]}"
  echo "== python -m $*" >&2
  # Called before `||`, so -e does not hold here.
  said=$(timeout --foreground --signal=INT --kill-after=10 "$limit" "$python" -m "$@" | tee >(cat >&2) | tail -n 1) ||
    status=1
  if [[ $said != "{"* ]]; then return 1; fi
  "$python" - "$out/$prefix-$name.json" "python -m $*" "$facts" "$said" <<'PYTHON' || return 1
import json, sys, time
from pathlib import Path

path, command, facts, said = sys.argv[1:]
measured = {"command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
whole = measured | json.loads(facts) | {"figures": json.loads(said)}
Path(path).write_text(json.dumps(whole, indent=2) + "\n")
PYTHON
  return "$status"
}

if [[ ${1:-} == check || ${1:-} == --rehearse ]]; then
  measure device 120 device || failed+=(device)
elif [[ ${1:-} == loaders ]]; then
  for number in 1 3 5 8; do
    measure "learner-loaders-$number" 75 learner --learner.num-loaders "$number" --seconds 20 || failed+=("$number loaders")
  done
fi
if [[ ${1:-} == check || ${1:-} == loaders ]]; then
  if ((${#failed[@]})); then
    fail "not measured, or not as it must be: ${failed[*]}; what was is in $out/$prefix-*.json"
  fi
  exit
fi

# All limits, ten seconds for each to end, and some for this script: less than 8 minutes.
measure learner 115 learner --seconds "$learner" || failed+=(learner)
measure learner-batch-128 70 learner --batch-size 128 --seconds "$narrow" || failed+=(learner-batch-128)
measure actor 65 actor --seconds "$actor" || failed+=(actor)
measure system 170 system --seconds "${system[@]}" || failed+=(system)
if ((${#failed[@]})); then
  fail "not measured: ${failed[*]}; what was is in $out/$prefix-*.json"
fi
echo "wrote $out/$prefix-*.json" >&2
