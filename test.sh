#!/usr/bin/env bash
# Checks format, lint, types, layers, shell scripts, tests and coverage. The first start creates .venv.
#
#   ./test.sh                    runs all checks; tests must cover every statement and branch of the learning code
#   ./test.sh --fast             runs all checks, but only the unit tests and no coverage
#   ./test.sh --coverage         runs all checks and measures coverage of all code, which must be at least 90 %
#   ./test.sh -k sum_tree -x     runs all checks, then pytest with these arguments and without coverage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=venv.sh
source ./venv.sh
ensure_venv "$PWD" dev
PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # Tests start hundreds of programs; without bytecode files, each would compile the package.

# The learning code, in which an error could go unnoticed, and the tests that cover each of its statements and branches.
LEARNING=(apexreplay/{files/file_lock,frame_blob,rate_limiter,types,'store/*'}
  apex/{types,config/{tree,dpg,algorithm_choice,codec},sizing,acting/{segment_builder,sequence_builder},'algorithms/*','algorithms/kernels/*'}
  apex/dqn/{algorithm,autograd_update,losses,networks,target_forward,'manual_backward/*'}
  apex/{{dpg,iqn,r2d2,sac}/{algorithm,networks,update},runtime/importer})
TESTS_OF_LEARNING=(tests/unit/{algorithms,config,dpg,dqn,iqn,r2d2,sac,test_command_line.py,test_sizing.py}
  tests/unit/acting/test_{segment,sequence}_builder.py
  tests/unit/apexreplay/{frames,process/test_freed_memory.py,store,test_rate_limiter.py,test_selection.py})

ruff format --check .
ruff check .
# Without its cache, mypy occupies one core for half a minute. Tests run meanwhile on the others.
types_log="$(mktemp)"
mypy >"$types_log" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$types_log"' EXIT
require_types() { wait "$types" || { cat "$types_log" >&2 && return 1; }; }
lint-imports --no-logo
if shellcheck --version >/dev/null 2>&1; then
  shellcheck run.sh test.sh venv.sh bench/gpu.sh bench/peers/setup.sh .ci/run
else
  echo "shellcheck does not run on this host: skipped the shell scripts" >&2
fi

cores=$(nproc)
# More processes than cores, because many tests wait for programs, sockets or deadlines.
run() { pytest --dist loadgroup --no-loadscope-reorder --numprocesses "$@"; }
require_learning() {
  for part in "${LEARNING[@]}"; do
    compgen -G "$part.py" >/dev/null || { echo "test.sh: LEARNING names $part.py, which does not exist" >&2 && return 1; }
  done
  coverage report --include="$(printf '%s.py,' "${LEARNING[@]}")" --fail-under=100
}
# Programs that tests start in other folders must write their coverage data here too.
export COVERAGE_FILE="$PWD/.coverage"
coverage erase
case "${1-}" in
--fast)
  run $((cores + 2)) tests/unit
  require_types
  ;;
--coverage)
  run $((cores + 1)) --cov --cov-report=
  require_types
  coverage report --fail-under=90
  require_learning
  ;;
"")
  run $((cores + 2)) --cov --cov-report= --cover "${TESTS_OF_LEARNING[@]}"
  require_types
  require_learning
  ;;
*)
  require_types
  pytest "$@"
  ;;
esac
