#!/usr/bin/env bash
# Checks everything: format, lint, types, shell scripts, tests, coverage. Sets up .venv the first time.
#
#   ./test.sh                    all of it, and that every statement of the parts that learn is tested
#   ./test.sh --coverage         the same with the coverage of every part, which takes a third longer
#   ./test.sh -k sum_tree -x     arguments go to pytest, and coverage is left out
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=venv.sh
source ./venv.sh
ensure_venv "$PWD" dev
PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # Hundreds of programs are started, and each would compile the package anew.

# Every statement and branch of these is tested: the parts in which a mistake would be learned from.
LEARNING=(types config factories sum_tree n_step rate_limiter exploration networks '*convolution' losses optimizers sizing segments
  gradient_step 'written_*' '*_body' 'store*')
TESTS_OF_LEARNING=(
  tests/test_{allocator,blocks,config,direct_draws,exploration,losses,n_step,networks,optimizers,pixel_body,pixel_convolution}.py
  tests/test_{rate_limiter,segments,sizing,stacks,sum_tree,window,written_update}.py tests/test_store*.py
)

ruff format --check .
ruff check .
mypy
if shellcheck --version >/dev/null 2>&1; then
  shellcheck run.sh test.sh venv.sh bench/gpu.sh bench/peers/setup.sh .ci/run
else
  echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi

if (($#)) && [[ $1 != --coverage ]]; then
  exec pytest "$@"
fi
# One process more than cores: those that start whole runs (tests/conftest.py) wait for them most of the time.
processes=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
run() { pytest --numprocesses "$processes" --dist loadfile --no-loadscope-reorder "$@"; }
include="$(printf 'apex/%s.py,' "${LEARNING[@]}")"
export COVERAGE_FILE="$PWD/.coverage" # Programs that the tests start elsewhere write here, and nowhere else.
coverage erase
if (($#)); then
  run --cov --cov-report=
  coverage report --fail-under=90
  coverage report --include="${include%,}" --fail-under=100
else
  run --cov --cov-report= "${TESTS_OF_LEARNING[@]}"
  coverage report --include="${include%,}" --fail-under=100
  run "${TESTS_OF_LEARNING[@]/#/--ignore=}"
fi
