#!/usr/bin/env bash
# Every figure that needs a GPU, in at most 8 minutes after the installation, as docs/results/gpu-*.json.
#
#   bench/gpu.sh                   on a machine with a GPU
#   bench/gpu.sh --rehearse DIR    the same commands on a CPU, small and short, into DIR: shows that they work, no more
#
# APEX_PYTHON=/path/to/python names an interpreter that has what apex needs; nothing is installed then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=venv.sh
source ./venv.sh

if (($# == 0)); then
  options=(--env ALE/Seaquest-v5 --device cuda --json)
  out=docs/results prefix=gpu learner=45 narrow=20 actor=20 system=60
elif (($# == 2)) && [[ $1 == --rehearse && -n $2 ]]; then
  options=(--preset cartpole --device cpu --json)
  out=$2 prefix=rehearsal learner=1 narrow=1 actor=2 system=2
else
  fail "usage: bench/gpu.sh [--rehearse DIR]"
fi
python=${APEX_PYTHON:-$PWD/.venv/bin/python}
if [[ -z ${APEX_PYTHON:-} ]]; then ensure_venv "$PWD"; fi
mkdir -p "$out"

# Before the first figure is written: that changes the checkout.
facts=$("$python" - <<'PYTHON'
import json
from pathlib import Path
from apex.run_folder import describe_checkout, describe_hardware, describe_versions

checkout = {"git": describe_checkout(Path("apex"))}
print(json.dumps(checkout | {"hardware": describe_hardware(), "versions": describe_versions()}))
PYTHON
)

# measure NAME LIMIT COMMAND...: runs `apex bench COMMAND` within LIMIT seconds; its last line becomes NAME's figures.
measure() {
  local name=$1 limit=$2 said
  shift 2
  set -- bench "$@" "${options[@]}"
  echo "== apex $*" >&2
  said=$(timeout --foreground --signal=INT --kill-after=20 "$limit" "$python" -m apex "$@" | tee >(cat >&2) | tail -n 1)
  "$python" - "$out/$prefix-$name.json" "apex $*" "$facts" "$said" <<'PYTHON'
import json, sys, time
from pathlib import Path

path, command, facts, said = sys.argv[1:]
measured = {"command": command, "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
whole = measured | json.loads(facts) | {"figures": json.loads(said)}
Path(path).write_text(json.dumps(whole, indent=2) + "\n")
PYTHON
}

measure learner 150 learner --seconds "$learner"
measure learner-batch-128 100 learner --batch-size 128 --seconds "$narrow"
measure actor 90 actor --seconds "$actor"
measure system 140 system --seconds "$system"
echo "wrote $out/$prefix-*.json" >&2
