#!/usr/bin/env bash
# Packs the current commit for the images, without uncommitted changes. The build machine builds the wheel, because
# the compiled modules must match the image's version of Python.
#
#   ./source.sh && packer build .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(git rev-parse --show-toplevel)
contents=(apex apexreplay deploy/install.sh pyproject.toml setup.py constraints.txt LICENSE README.md)

if ! git -C "$root" diff --quiet HEAD -- "${contents[@]}" deploy; then
  echo "source.sh: warning: uncommitted changes in ${contents[*]} will not be part of the images" >&2
fi
mkdir -p build
git -C "$root" rev-parse HEAD >build/COMMIT
git -C "$root" archive --prefix=source/ HEAD "${contents[@]}" | gzip --no-name >build/source.tar.gz
echo "packed $(cat build/COMMIT): $(wc -c <build/source.tar.gz) bytes"
