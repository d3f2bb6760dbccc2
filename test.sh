#!/usr/bin/env bash
# Checks everything: format, lint, types, shell scripts, tests, coverage. Sets up .venv the first time.
#
#   ./test.sh                    all of it
#   ./test.sh -k sum_tree -x     arguments go to pytest, and the coverage bars are left out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=venv.sh
source ./venv.sh
ensure_venv "$PWD" dev
PATH="$PWD/.venv/bin:$PATH"

# Every statement and branch of these is tested: the parts in which a mistake would be learned from.
LEARNING=(types config sum_tree n_step rate_limiter exploration networks losses optimizers sizing segments 'store*')

ruff format --check .
ruff check .
mypy
if shellcheck --version >/dev/null 2>&1; then
  shellcheck run.sh test.sh venv.sh bench/gpu.sh bench/peers/setup.sh .ci/run
else
  echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi

if (($#)); then
  exec pytest "$@"
fi
export COVERAGE_FILE="$PWD/.coverage" # Programs that the tests start elsewhere write here, and nowhere else.
coverage erase
# One process more than cores: those that start whole runs (tests/conftest.py) wait for them most of the time. The two
# reports say what was covered.
processes=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder --cov --cov-report=
coverage report --fail-under=90
include="$(printf 'apex/%s.py,' "${LEARNING[@]}")"
coverage report --include="${include%,}" --fail-under=100
