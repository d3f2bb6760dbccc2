#!/usr/bin/env bash
# Every figure that needs a GPU, in at most 8 minutes after the installation, as docs/results/gpu-*.json. What cannot be
# measured is named at the end, and the status is 1; the others are measured and written all the same.
#
#   bench/gpu.sh                   on a machine with a GPU
#   bench/gpu.sh learn [SEED]      what it learns there (16 cores): Pong for 8 minutes, Breakout, Seaquest and Q*bert for
#                                  7 each, as docs/results/learning/*-gpu; half an hour, and their last games
#   bench/gpu.sh --rehearse DIR    the same commands on a CPU, small and short, into DIR: shows that they work, no more
#
# APEX_PYTHON=/path/to/python names an interpreter that has what apex needs; nothing is installed then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=venv.sh
source ./venv.sh

learn=false
if (($# > 0 && $# <= 2)) && [[ $1 == learn && ${2:-1} =~ ^[0-9]+$ ]]; then
  learn=true
elif (($# == 0)); then
  options=(--preset atari --env ALE/Seaquest-v5 --device cuda --json)
  out=docs/results prefix=gpu learner=45 narrow=20 actor=15 system=(30) patience=1
elif (($# == 2)) && [[ $1 == --rehearse && -n $2 ]]; then
  # Short segments: in so short a time there must be some to count.
  options=(--preset cartpole --actor.segment-length 10 --device cpu --json)
  out=$2 prefix=rehearsal learner=1 narrow=1 actor=2 system=(4 --no-alone) patience=3  # What it is beside, the other parts have shown.
else
  fail "usage: bench/gpu.sh [--rehearse DIR | learn [SEED]]"
fi
python=${APEX_PYTHON:-$PWD/.venv/bin/python}
if [[ -z ${APEX_PYTHON:-} ]]; then ensure_venv "$PWD"; fi
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
from pathlib import Path
from apex.runtime.provenance import describe_checkout, describe_hardware, describe_versions

checkout = {"git": describe_checkout(Path("apex"))}
print(json.dumps(checkout | {"hardware": describe_hardware(), "versions": describe_versions()}))
PYTHON
)

# measure NAME LIMIT COMMAND...: runs `python -m bench COMMAND` within LIMIT + 10 seconds (a rehearsal, within three
# times as long: other work may be going on); its last line becomes NAME's figures. Returns 1 where there are none.
measure() {
  local name=$1 limit=$(($2 * patience)) said
  shift 2
  set -- bench "$@" "${options[@]}"
  echo "== python -m $*" >&2
  # Called before `||`, so -e does not hold here.
  said=$(timeout --foreground --signal=INT --kill-after=10 "$limit" "$python" -m "$@" | tee >(cat >&2) | tail -n 1) ||
    return 1
  "$python" - "$out/$prefix-$name.json" "python -m $*" "$facts" "$said" <<'PYTHON'
import json, sys, time
from pathlib import Path

path, command, facts, said = sys.argv[1:]
measured = {"command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
whole = measured | json.loads(facts) | {"figures": json.loads(said)}
Path(path).write_text(json.dumps(whole, indent=2) + "\n")
PYTHON
}

# All limits, ten seconds for each to end, and some for this script: less than 8 minutes.
measure learner 115 learner --seconds "$learner" || failed+=(learner)
measure learner-batch-128 70 learner --batch-size 128 --seconds "$narrow" || failed+=(learner-batch-128)
measure actor 65 actor --seconds "$actor" || failed+=(actor)
measure system 170 system --seconds "${system[@]}" || failed+=(system)
if ((${#failed[@]})); then
  fail "not measured: ${failed[*]}; what was is in $out/$prefix-*.json"
fi
echo "wrote $out/$prefix-*.json" >&2
