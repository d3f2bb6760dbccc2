#!/usr/bin/env bash
# Packs the current commit for the images, without uncommitted changes. The build machine builds the wheel, because
# the compiled modules must match the image's version of Python.
#
#   ./source.sh && packer build -var 'only_from=["198.51.100.7/32"]' .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(git rev-parse --show-toplevel)
contents=(apex apexreplay deploy/install.sh pyproject.toml setup.py constraints.txt LICENSE README.md)

if ! git -C "$root" diff --quiet HEAD -- "${contents[@]}" deploy/units; then
  echo "source.sh: warning: uncommitted changes in ${contents[*]} deploy/units will not be part of the images" >&2
fi
mkdir -p build
git -C "$root" rev-parse HEAD >build/COMMIT
rm -rf build/units
git -C "$root" archive HEAD deploy/units | tar --extract --directory build --strip-components=1
git -C "$root" archive --prefix=source/ HEAD "${contents[@]}" | gzip --no-name >build/source.tar.gz
echo "packed $(cat build/COMMIT): $(wc -c <build/source.tar.gz) bytes"
