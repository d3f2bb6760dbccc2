#!/usr/bin/env bash
# Checks the images, the units and what a machine of a cluster does for itself, without an account: Packer builds on an
# emulated EC2. What cannot be run here is named at the end as skipped.
#
#   deploy/packer/test.sh                        all of it
#   deploy/packer/test.sh deploy/tests/test_units.py -x   arguments go to pytest
#   APEX_BASE_ROOT=DIR deploy/packer/test.sh     images from a fresh system (debootstrap) and not from this machine's own
#
# PYTHON has apex-zeromq[dev]; default: the repository's .venv, which is made where it lacks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${PYTHON:-} ]]; then
  # shellcheck source=venv.sh
  source ./venv.sh
  ensure_venv "$PWD" dev
  PYTHON=$PWD/.venv/bin/python
fi
shellcheck=$(dirname "$PYTHON")/shellcheck
if [[ -x $shellcheck ]]; then
  "$shellcheck" -x deploy/packer/*.sh deploy/units/bin/*
else
  echo "skipped: shellcheck is not installed: the scripts of deploy/packer and deploy/units were not checked" >&2
fi
if (($# == 0)); then set -- deploy/tests/test_packer.py deploy/tests/test_units.py deploy/tests/test_host.py; fi
exec "$PYTHON" -m pytest -q -rs -p no:xdist --timeout 900 "$@"
