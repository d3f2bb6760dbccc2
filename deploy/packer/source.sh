#!/usr/bin/env bash
# Packs what the images are made of: this commit, nothing that is not committed. The image makes the wheel of it, because a
# wheel with a compiled part belongs to one version of Python, and the two base images have different ones.
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
