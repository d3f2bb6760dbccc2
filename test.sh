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
  tests/unit/runtime/test_malloc.py
  tests/unit/replay_memory/frames/test_lz4_blocks.py
  tests/unit/config/test_tree.py
  tests/unit/replay_memory/store/test_reader.py
  tests/unit/dqn/test_exploration.py
  tests/unit/dqn/test_losses.py
  tests/unit/dqn/test_n_step.py
  tests/unit/dqn/test_networks.py
  tests/unit/dqn/test_optimizers.py
  tests/unit/dqn/manual_backward/test_pixel_torso.py
  tests/unit/dqn/kernels/test_convolution.py
  tests/unit/replay_memory/test_rate_limiter.py
  tests/unit/acting/test_segment_builder.py
  tests/unit/config/test_sizing.py
  tests/unit/replay_memory/frames/test_stack_decoder.py
  tests/unit/replay_memory/store/test_sum_tree.py
  tests/unit/evaluation/watch/test_window.py
  tests/unit/dqn/manual_backward/test_update.py
  tests/unit/replay_memory/store/test_writer.py
  tests/unit/replay_memory/store/test_concurrency.py
  tests/unit/replay_memory/store/test_crash.py
  tests/unit/replay_memory/store/test_endurance.py
  tests/unit/replay_memory/store/test_layout.py
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
