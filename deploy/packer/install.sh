#!/usr/bin/env bash
# Runs as root on the build machine: installs Ape-X, its dependencies and its systemd units. Enables no role: the first
# boot of a host enables the host's roles.
#
# Environment: KIND (cpu or gpu), COMMIT and, for cpu, CPU_WHEELS.
set -euo pipefail
staged=/tmp/apex-image
home=/opt/apex

# The machine may still run cloud-init, which holds apt's lock.
if command -v cloud-init >/dev/null; then cloud-init status --wait >/dev/null || true; fi
export DEBIAN_FRONTEND=noninteractive
# Soon after the first boot, Ubuntu's timers hold the locks of apt, on which `update` does not wait.
if [[ -d /run/systemd/system ]]; then
  systemctl stop apt-daily.timer apt-daily-upgrade.timer apt-daily.service apt-daily-upgrade.service \
    unattended-upgrades.service || true
fi
apt=(apt-get -o DPkg::Lock::Timeout=300 -qq)
"${apt[@]}" update
wanted=(ca-certificates libgl1 libglib2.0-0 liblz4-1 python3 python3-venv)
tools=(gcc libc6-dev)
added=()
for tool in "${tools[@]}"; do dpkg -s "$tool" >/dev/null 2>&1 || added+=("$tool"); done
"${apt[@]}" install --yes --no-install-recommends "${wanted[@]}" "${added[@]}" >/dev/null

install -d -m 0755 "$home" "$home/bin" /etc/apex
id apex >/dev/null 2>&1 || useradd --system --home-dir /var/lib/apex --shell /usr/sbin/nologin apex
install -d -o apex -g apex -m 0750 /var/lib/apex /var/lib/apex/runs

# The CPU image gets PyTorch without CUDA.
tar -xzf "$staged/source.tar.gz" -C "$staged"
export TORCH_INDEX=""
if [[ $KIND == cpu ]]; then TORCH_INDEX=${CPU_WHEELS:-}; fi
python=("$staged/source/deploy/install.sh" "$home/venv")
"${python[@]}" packages aws,ray
"${python[@]}" wheels "$staged/wheel"
"${python[@]}" package "$staged/wheel"

install -m 0755 "$staged"/units/bin/* "$home/bin"
install -m 0644 "$staged"/units/*.{service,timer} /etc/systemd/system
for folder in "$staged"/units/*.service.d; do
  install -D -m 0644 -t "/etc/systemd/system/$(basename "$folder")" "$folder"/*.conf
done
install -m 0644 "$staged/units/60-apex.sysctl.conf" /etc/sysctl.d/60-apex.conf
printf '%s\n' "$COMMIT" >"$home/COMMIT"
ln -sf "$home/venv/bin/apex" /usr/local/bin/apex
# Ends a host after its maximum hours, even if no other unit was ever started.
systemctl enable --quiet apex-max-hours.timer

if ((${#added[@]})); then
  "${apt[@]}" purge --yes "${added[@]}" >/dev/null
  "${apt[@]}" autoremove --purge --yes >/dev/null
fi
