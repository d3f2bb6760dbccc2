#!/usr/bin/env bash
# Measures every figure that needs a GPU, in at most 8 minutes after the installation, and writes docs/results/gpu-*.json.
# If some benchmarks fail, the last line names them and the status is 1; the others are still measured and written.
#
#   bench/gpu.sh                   on a machine with a GPU
#   bench/gpu.sh check             run this first: checks on the GPU what the tests check with fakes
#   bench/gpu.sh loaders           learner with 1, 3, 5 and 8 loaders, 5 minutes
#   bench/gpu.sh learn [SEED]      learning curves with 16 cores: Pong for 8 minutes, Breakout, Seaquest and Q*bert for
#                                  7 minutes each, and their final games; writes docs/results/learning/*-gpu
#   bench/gpu.sh --rehearse DIR    small and short runs of the same commands on a CPU, to show that they work
#
# APEX_PYTHON=/path/to/python names an interpreter with the packages that apex needs. Then nothing is installed; a C
# compiler and setuptools build the C parts beside their sources. Without git, APEX_COMMIT=HASH names the commit for the
# results.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=venv.sh
source ./venv.sh

learn=false
if (($# > 0 && $# <= 2)) && [[ $1 == learn && ${2:-1} =~ ^[0-9]+$ ]]; then
  learn=true
elif (($# == 0)) || [[ $# == 1 && ($1 == check || $1 == loaders) ]]; then
  options=(--preset atari --env ALE/Seaquest-v5 --device cuda --json)
  out=docs/results prefix=gpu learner=45 narrow=20 actor=15 system=(30) limit_factor=1
elif (($# == 2)) && [[ $1 == --rehearse && -n $2 ]]; then
  # Segments are short, so that a short run stores some.
  options=(--preset cartpole --actor.segment-length 10 --device cpu --json)
  out=$2 prefix=rehearsal learner=1 narrow=1 actor=2 system=(4 --no-alone) limit_factor=3
else
  fail "usage: bench/gpu.sh [check | loaders | learn [SEED] | --rehearse DIR]"
fi
if [[ -z ${APEX_PYTHON:-} ]]; then
  python=$PWD/.venv/bin/python
  ensure_venv "$PWD"
else
  python=$APEX_PYTHON
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # because programs of a run do not import from the current folder
  for part in . apexreplay; do
    (cd "$part" && "$python" setup.py build_ext --inplace >/dev/null 2>&1) ||
      echo "C code is not built, so the run is slower; to see why: cd $part && $python setup.py build_ext --inplace" >&2
  done
fi
trap 'exit 130' INT
failed=()

if $learn; then
  for task in pong breakout seaquest qbert; do
    "$python" -m bench learning run --task "$task-gpu" --system apex --seed "${2:-1}" || failed+=("$task")
  done
  if ((${#failed[@]})); then
    fail "not measured: ${failed[*]}; other results are in docs/results/learning"
  fi
  echo "wrote docs/results/learning/*-gpu; python -m bench learning tables creates tables and plots" >&2
  exit
fi
mkdir -p "$out"

# Read the state of the checkout before the first result changes it.
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

# measure NAME LIMIT COMMAND...: runs `python -m bench COMMAND` for at most LIMIT + 10 seconds (in a rehearsal, three
# times LIMIT, because the machine may be busy). Its last line has the figures of NAME. Returns 1 if there are none, or if
# the command fails.
measure() {
  local name=$1 limit=$(($2 * limit_factor)) figures status=0
  shift 2
  set -- bench "$@" "${options[@]}"
  echo "== python -m $*" >&2
  # The caller uses `||`, so -e has no effect here.
  figures=$(timeout --foreground --signal=INT --kill-after=10 "$limit" "$python" -m "$@" | tee >(cat >&2) | tail -n 1) ||
    status=1
  if [[ $figures != "{"* ]]; then return 1; fi
  "$python" - "$out/$prefix-$name.json" "python -m $*" "$facts" "$figures" <<'PYTHON' || return 1
import json, sys, time
from pathlib import Path

path, command, facts, figures = sys.argv[1:]
measured = {"command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
whole = measured | json.loads(facts) | {"figures": json.loads(figures)}
Path(path).write_text(json.dumps(whole, indent=2) + "\n")
PYTHON
  return "$status"
}

if [[ ${1:-} == check || ${1:-} == --rehearse ]]; then
  measure device 180 device || failed+=(device)
elif [[ ${1:-} == loaders ]]; then
  for number in 1 3 5 8; do
    measure "learner-loaders-$number" 75 learner --learner.num-loaders "$number" --seconds 20 || failed+=("$number loaders")
  done
fi
if [[ ${1:-} == check || ${1:-} == loaders ]]; then
  if ((${#failed[@]})); then
    fail "failed: ${failed[*]}; other results are in $out/$prefix-*.json"
  fi
  exit
fi

# The sum of all limits, with ten seconds for each to end, is less than 8 minutes.
measure learner 115 learner --seconds "$learner" || failed+=(learner)
measure learner-batch-128 70 learner --batch-size 128 --seconds "$narrow" || failed+=(learner-batch-128)
measure actor 65 actor --seconds "$actor" || failed+=(actor)
measure system 170 system --seconds "${system[@]}" || failed+=(system)
if ((${#failed[@]})); then
  fail "not measured: ${failed[*]}; other results are in $out/$prefix-*.json"
fi
echo "wrote $out/$prefix-*.json" >&2
