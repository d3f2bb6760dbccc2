#!/usr/bin/env bash
# Every figure that needs a GPU, in at most 8 minutes, as docs/results/gpu-*.json.
#
#   bench/gpu.sh                   on a machine with a GPU
#   bench/gpu.sh --rehearse DIR    the same commands on a CPU, small and short, into DIR: shows that they work, no more
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=venv.sh
source ./venv.sh

game=(--env ALE/Seaquest-v5 --device cuda)
out=docs/results seconds=1 prefix=gpu
if [[ ${1:-} == --rehearse ]]; then
  [[ -n ${2:-} ]] || fail "usage: bench/gpu.sh [--rehearse DIR]"
  out=$2 prefix=rehearsal seconds=0.1
  game=(--env CartPole-v1 --device cpu --replay.capacity 20000)
elif (($#)); then
  fail "usage: bench/gpu.sh [--rehearse DIR]"
fi
apex=(python -m apex)
if [[ ! ${APEX_PYTHON:-} ]]; then
  ensure_venv "$PWD"
  APEX_PYTHON=$PWD/.venv/bin/python
fi
apex=("$APEX_PYTHON" -m apex)
mkdir -p "$out"

# times N: N seconds, or a tenth of them in a rehearsal.
times() { "$APEX_PYTHON" -c 'import sys; print(float(sys.argv[1]) * float(sys.argv[2]))' "$1" "$seconds"; }

# measure NAME LIMIT COMMAND...: runs it within LIMIT seconds; its last line becomes the figures of NAME.
measure() {
  local name=$1 limit=$2 said
  shift 2
  echo "== apex $*" >&2
  said=$(timeout --signal=INT --kill-after=20 "$limit" "${apex[@]}" "$@" | tee /dev/stderr | tail -n 1)
  "$APEX_PYTHON" - "$name" "apex $*" "$said" >"$out/$prefix-$name.json" <<'PYTHON'
import json, sys, time
from apex.run_folder import describe_checkout, describe_hardware, describe_versions
from pathlib import Path

name, command, said = sys.argv[1:]
facts = {
    "command": command,
    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    "commit": describe_checkout(Path("apex")),
    "hardware": describe_hardware(),
    "versions": describe_versions(),
    "figures": json.loads(said),
}
json.dump(facts, sys.stdout, indent=1)
print()
PYTHON
}

# 500 batches/s want more loaders than a smaller box would have; the sizing rule decides how many.
measure learner 150 bench learner "${game[@]}" --seconds "$(times 45)" --json
measure learner-batch-128 100 bench learner "${game[@]}" --batch-size 128 --seconds "$(times 20)" --json
measure actor 90 bench actor "${game[@]}" --seconds "$(times 20)" --json
measure system 140 bench system "${game[@]}" --seconds "$(times 60)" --json
echo "wrote $out/$prefix-*.json" >&2
