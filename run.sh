#!/usr/bin/env bash
# Trains an agent. The first start creates .venv. Ctrl-C stops all programs in order.
#
#   ./run.sh                                 trains on Pong
#   ./run.sh --preset cartpole               solves CartPole within a minute
#   ./run.sh --env ALE/Breakout-v5 --actors 32 --max-minutes 60
#
# Without an NVIDIA GPU, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu to install the smaller PyTorch for CPUs.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)" # .venv holds its path
# shellcheck source=venv.sh
source "$root/venv.sh"
ensure_venv "$root"
exec "$root/.venv/bin/apex" train "$@"
