#!/usr/bin/env bash
# Runs as root on the machine that becomes an image, last: takes away what only the build needed, and what must differ
# between the machines that start from it.
set -euo pipefail
rm -rf /tmp/apex-image /root/.cache /var/lib/apex/runs/* /var/lib/apt/lists/*
apt-get clean
if command -v cloud-init >/dev/null; then cloud-init clean --logs; fi
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub # Each machine makes its own at its first boot.
: >/etc/machine-id
find /var/log -type f -exec truncate --size 0 {} +
# Packer removes its own public key last; no other may be there, and nobody has a password.
if grep -Eqs '^[^:]+:\$' /etc/shadow; then
  echo "clean.sh: somebody has a password in this image" >&2
  exit 1
fi
