#!/usr/bin/env bash
# Builds the documentation site strictly into docs/_build/html: a warning is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=../venv.sh
source ./venv.sh
ensure_venv "$PWD" docs
.venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs docs/_build/html
echo "Built docs/_build/html/index.html"
