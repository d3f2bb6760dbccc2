#!/usr/bin/env bash
# Makes .peer-sb3, apart from the project's own .venv: Stable-Baselines3 from its package, and beside it the very
# versions of torch, Gymnasium and ALE that constraints.txt gives the project. About 1.2 GB; asked again, it looks and goes.
#
#   bench/peers/setup.sh                      then: python -m bench learning run --task cartpole --system sb3 --seed 4
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
echo "made .peer-sb3 with Stable-Baselines3 2.9.2" >&2
