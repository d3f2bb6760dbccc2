#!/usr/bin/env bash
# Trains: sets up .venv the first time, then starts every part. Ctrl-C stops them in order.
#
#   ./run.sh                                 Pong
#   ./run.sh --preset cartpole               solved within a minute
#   ./run.sh --env ALE/Breakout-v5 --actors 32 --max-minutes 60
#   ./run.sh --hosts hosts.toml              on several machines over ssh, see docs/own-machines.md
#
# Without an NVIDIA GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes the first start much smaller.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=venv.sh
source "$root/venv.sh"
ensure_venv "$root"
exec "$root/.venv/bin/apex" train "$@"
