#!/usr/bin/env bash
# Packs this commit for the images, without changes that are not committed. The image builds the wheel, because its
# compiled part belongs to the image's version of Python.
#
#   ./source.sh && packer build .
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$(git rev-parse --show-toplevel)
contents=(apex pyproject.toml setup.py constraints.txt LICENSE README.md)

if ! git -C "$root" diff --quiet HEAD -- "${contents[@]}" deploy; then
  echo "source.sh: there are changes that are not committed; the images will not have those in ${contents[*]}" >&2
fi
mkdir -p build
git -C "$root" rev-parse HEAD >build/COMMIT
git -C "$root" archive --prefix=source/ HEAD "${contents[@]}" | gzip --no-name >build/source.tar.gz
echo "packed $(cat build/COMMIT): $(wc -c <build/source.tar.gz) bytes"
