#!/usr/bin/env bash
# Runs as root on the build machine. If any of these checks fails, no image is created.
#
# Environment: KIND, COMMIT and CHECK_GPU (true or false).
set -euo pipefail
apex=/opt/apex/venv/bin/apex
as_apex=(runuser -u apex --)
cd /var/lib/apex

"${as_apex[@]}" "$apex" --version
[[ $(cat /opt/apex/COMMIT) == "$COMMIT" ]]

device=cpu
if [[ $KIND == gpu && $CHECK_GPU == true ]]; then
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  device=cuda
fi
report=$("${as_apex[@]}" "$apex" doctor --preset cartpole --device "$device" --run.folder /var/lib/apex/runs) || {
  printf '%s\n' "$report"
  exit 1
}
printf '%s\n' "$report"
# Without the native loops, training would be slower.
grep -Eq '^ok +native loops' <<<"$report"

# systemd-analyze prints nothing if all units are valid.
status=0
complaints=$(systemd-analyze verify --man=no /etc/systemd/system/apex*.{service,timer} 2>&1) || status=$?
if ((status)) || [[ -n $complaints ]]; then
  printf 'systemd-analyze verify:\n%s\n' "$complaints" >&2
  exit 1
fi
echo "smoke test of the $KIND image: passed"
