#!/usr/bin/env bash
# Creates the virtual environment .peer-sb3 with Stable-Baselines3, and with the versions of torch, Gymnasium and ALE in
# constraints.txt. It takes about 1.2 GB. A second call only checks it.
#
#   bench/peers/setup.sh                      then run: python -m bench learning run --task cartpole --system sb3 --seed 4
#   PYTHON=/path/to/python bench/peers/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=venv.sh
source ./venv.sh

if [[ ! -x .peer-sb3/bin/pip ]]; then
  find_python
  "$python" -m venv .peer-sb3
fi
.peer-sb3/bin/pip install --disable-pip-version-check --no-input --quiet --constraint constraints.txt \
  stable-baselines3==2.9.2 torch "gymnasium[atari,box2d,mujoco]" "mujoco<4" opencv-python-headless
echo "created .peer-sb3 with Stable-Baselines3 2.9.2" >&2
