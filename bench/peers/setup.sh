#!/usr/bin/env bash
# Creates a virtual environment .peer-NAME for each named project; without a name, for sb3. A second call only checks it.
# sb3 (Stable-Baselines3) has the versions of torch, Gymnasium and ALE in constraints.txt. Reverb needs Python 3.11.
#
#   bench/peers/setup.sh                      1.2 GB; then python -m bench learning run --task cartpole --system sb3 --seed 4
#   bench/peers/setup.sh reverb cpprb flashbax torchrl         then: python -m bench replay --peer reverb --peer cpprb ...
#   PYTHON=/path/to/python PEERS=/path/to/folder bench/peers/setup.sh [NAME...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=venv.sh
source ./venv.sh

declare -A packages=(
  [sb3]="--constraint constraints.txt stable-baselines3==2.9.2 torch gymnasium[atari,box2d,mujoco] mujoco<4 minatar opencv-python-headless"
  [reverb]="dm-reverb[tensorflow]==0.14.0"
  [cpprb]="cpprb==11.0.0"
  [flashbax]="flashbax==0.1.3"
  [torchrl]="torchrl==0.14.1"
)
for name in "${@:-sb3}"; do
  if [[ -z ${packages[$name]:-} ]]; then fail "unknown: $name; known are ${!packages[*]}"; fi
  venv=${PEERS:-.}/.peer-$name
  if [[ ! -x $venv/bin/pip ]]; then
    if [[ -z ${PYTHON:-} && $name == reverb ]]; then PYTHON=python3.11 find_python; else find_python; fi
    "$python" -m venv "$venv"
  fi
  read -ra wanted <<<"${packages[$name]}"
  "$venv/bin/pip" install --disable-pip-version-check --no-input --quiet "${wanted[@]}"
  echo "created $venv" >&2
done
