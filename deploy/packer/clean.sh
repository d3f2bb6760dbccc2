#!/usr/bin/env bash
# Runs as root on the build machine as the last step: removes files that only the build needed, and files that must differ
# between hosts, such as SSH host keys.
set -euo pipefail
rm -rf /tmp/apex-image /root/.cache /var/lib/apex/runs/* /var/lib/apt/lists/*
apt-get clean
if command -v cloud-init >/dev/null; then cloud-init clean --logs; fi
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub # Each host creates new ones at its first boot.
: >/etc/machine-id
find /var/log -type f -exec truncate --size 0 {} +
# No user may have a password. Packer removes its own public key after this script.
if grep -Eqs '^[^:]+:\$' /etc/shadow; then
  echo "clean.sh: /etc/shadow of this image has a password" >&2
  exit 1
fi
