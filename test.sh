#!/usr/bin/env bash
# Checks everything: format, lint, types, layers, shell scripts, tests, coverage. Sets up .venv the first time.
#
#   ./test.sh                    all of it; every statement and branch of the parts that learn must be tested
#   ./test.sh --fast             the same with the unit tests only, for the time while you write
#   ./test.sh --coverage         all of it, with the coverage of every part, of which 90 % must be tested
#   ./test.sh -k sum_tree -x     arguments go to pytest, without coverage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=venv.sh
source ./venv.sh
ensure_venv "$PWD" dev
PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # Hundreds of programs are started, and each would compile the package anew.

# The parts in which a mistake would be learned from, and the tests that cover each of their statements and branches.
LEARNING=(errors types frame_blob 'config/tree' 'config/codec' 'config/importer' 'config/sizing' acting/segment_builder
  'dqn/exploration' 'dqn/gradient_step' 'dqn/losses' 'dqn/n_step' 'dqn/networks' 'dqn/optimizers' 'dqn/kernels/*'
  'dqn/manual_backward/*' replay_memory/rate_limiter 'replay_memory/store/*' runtime/file_lock)
TESTS_OF_LEARNING=(tests/unit/{config,dqn} tests/unit/acting/test_segment_builder.py tests/unit/runtime/test_malloc.py
  tests/unit/replay_memory/{frames,store} tests/unit/replay_memory/test_rate_limiter.py)

ruff format --check .
ruff check .
mypy
lint-imports --no-logo
if shellcheck --version >/dev/null 2>&1; then
  shellcheck run.sh test.sh venv.sh bench/gpu.sh bench/peers/setup.sh .ci/run
else
  echo "shellcheck is not installed: the shell scripts were not checked" >&2
fi

cores=$(nproc)
# Many tests wait for programs, sockets or deadlines: so there are more processes than cores.
run() { pytest --dist loadgroup --no-loadscope-reorder --numprocesses "$@"; }
require_learning() { coverage report --include="$(printf 'apex/%s.py,' "${LEARNING[@]}")" --fail-under=100; }
# Programs that the tests start elsewhere write here, and nowhere else.
export COVERAGE_FILE="$PWD/.coverage"
coverage erase
case "${1-}" in
--fast)
  run $((cores + 2)) tests/unit
  ;;
--coverage)
  run $((cores + 1)) --cov --cov-report=
  coverage report --fail-under=90
  require_learning
  ;;
"")
  run $((cores + 2)) --cov --cov-report= --cover "${TESTS_OF_LEARNING[@]}"
  require_learning
  ;;
*)
  exec pytest "$@"
  ;;
esac
