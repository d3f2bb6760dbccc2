#!/usr/bin/env bash
# Installs this package for the images of hosts (packer/install.sh) and of containers (../Dockerfile), with exactly the
# versions in constraints.txt, with which the tests ran. A container has the steps in separate layers.
#
#   install.sh VENV packages EXTRAS   installs what pyproject.toml requires, with these extras ("ray,s3"; "" for none)
#   install.sh VENV wheels FOLDER     builds the wheels of this package; needs a C compiler
#   install.sh VENV package FOLDER    installs these wheels
#
# Environment: TORCH_INDEX, the package index of PyTorch without CUDA; empty: PyTorch with CUDA.
#
# Versions are pinned, but not hashes: one constraints.txt serves PyTorch with and without CUDA and several versions of Python,
# which have different files of the same version.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$1
if [[ ! -x $venv/bin/python ]]; then /usr/bin/python3 -m venv "$venv"; fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input --quiet)

case $2 in
packages)
  "$venv/bin/python" - "$root" "$3" >"$venv/requirements.txt" <<'PYTHON'
import sys, tomllib

files = (f"{sys.argv[1]}/pyproject.toml", f"{sys.argv[1]}/apexreplay/pyproject.toml")
own, library = (tomllib.load(open(file, "rb"))["project"] for file in files)
known, wanted = own["optional-dependencies"], [name for name in sys.argv[2].split(",") if name]
if unknown := set(wanted) - set(known):
    sys.exit(f"install.sh: unknown extras {', '.join(unknown)}; known: {', '.join(known)}")
for requirement in sum((known[name] for name in wanted), own["dependencies"] + library["dependencies"]):
    if not requirement.startswith("apexreplay="):
        print(requirement)
PYTHON
  # Only PyTorch comes from its index: with two indexes at once, pip may take any package from either (dependency confusion).
  if [[ ${TORCH_INDEX:-} ]]; then
    "${pip[@]}" install --no-deps --index-url "$TORCH_INDEX" --constraint "$root/constraints.txt" torch
  fi
  # Keeps PyTorch X+cpu, which satisfies the constraint ==X, and installs what it needs.
  "${pip[@]}" install --constraint "$root/constraints.txt" --requirement "$venv/requirements.txt"
  ;;
wheels) "${pip[@]}" wheel --no-deps --wheel-dir "$3" "$root/apexreplay" "$root" ;;
package)
  "${pip[@]}" install --no-deps "$3"/apex*.whl
  "${pip[@]}" check
  ;;
*)
  echo "install.sh: unknown step '$2': use packages, wheels or package" >&2
  exit 2
  ;;
esac
