#!/usr/bin/env bash
# Checks what deploy/ brings up, without an account: real Terraform and Packer against an AWS emulated on loopback.
#
#   deploy/test.sh                    every part but the images
#   deploy/test.sh images             builds every image, which takes 3 to 8 minutes more
#   deploy/test.sh terraform policy   these parts
#
# Installs what it needs into .venv and deploy/.venv. What cannot be had here is left out, and listed by name at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=../venv.sh
source ../venv.sh
ensure_venv "$(dirname "$PWD")" dev,cloud
PATH="$(dirname "$PWD")/.venv/bin:$PATH"

PARTS=(shell units cluster terraform policy namespaces)
VENV="$PWD/.venv"
SCRATCH="$(mktemp -d)"
trap 'rm -rf "$SCRATCH"' EXIT
SKIPPED=()

say() { printf '\n== %s\n' "$*"; }
skip() {
  SKIPPED+=("$1: $2")
  echo "left out: $1: $2"
}
have() { command -v "$1" >/dev/null; }

# environment NAME REQUIREMENTS: a virtual environment of its own, made when the requirements have changed.
environment() {
  local folder="$VENV/$1"
  if ! cmp -s "$2" "$folder/requirements.txt"; then
    rm -rf "$folder"
    python3 -m venv "$folder" &&
      "$folder/bin/pip" install --quiet --disable-pip-version-check -r "$2" &&
      cp "$2" "$folder/requirements.txt"
  fi
}

# Where cloud-init's own checker is: its sources are enough, so that no machine gets a service that runs at boot.
cloud_init() {
  local package=usr/lib/python3/dist-packages
  if [[ -d /$package/cloudinit ]]; then
    echo "/$package"
  elif have apt-get && have dpkg; then
    (cd "$SCRATCH" && { apt-get download -qq cloud-init || { apt-get update -qq && apt-get download -qq cloud-init; }; } &&
      dpkg -x cloud-init_*.deb cloud-init) >"$SCRATCH/cloud-init.log" 2>&1 && echo "$SCRATCH/cloud-init/$package"
  fi
}

part_shell() {
  local scripts
  if ! shellcheck --version >/dev/null 2>&1; then
    skip shellcheck "it does not run here"
    return
  fi
  mapfile -t scripts < <(find . -path ./.venv -prune -o -name '*.sh' -print)
  shellcheck -x "${scripts[@]}" units/bin/*
}

# pytest lists what it skips, and why; the end of all names it again.
part_units() {
  if ! have systemd-analyze; then skip "units: systemd-analyze verify" "systemd-analyze is not installed"; fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_units.py tests/test_host.py tests/test_bucket.py
  if have packer; then
    python -m pytest -q -rs -p no:cacheprovider tests/test_packer.py -m "not build"
  else
    skip "packer: fmt, validate, refusals" "packer is not installed"
  fi
}

part_images() {
  if ! have packer; then
    skip "images: builds and what is in them" "packer is not installed"
    return
  fi
  if ((EUID)) || ! have unshare; then
    skip "images: builds and what is in them" "a changed root needs root, and unshare"
    return
  fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_packer.py -m build
}

part_cluster() {
  python -m pytest -q -rs -p no:cacheprovider tests/test_cluster_command.py
}

part_terraform() {
  if ! have terraform; then
    skip "terraform: fmt, validate, test, apply, rules, mutations, first boot, destroy" "terraform is not installed"
    return
  fi
  terraform fmt -check -diff -recursive terraform
  local cloud_init
  cloud_init="$(cloud_init || true)"
  if [[ -z $cloud_init ]]; then skip "cloud-init schema" "cloud-init is not to be had"; fi
  APEX_CLOUD_INIT="$cloud_init" APEX_KEEP_PLAN="$SCRATCH/plan.json" \
    python -m pytest -q -p no:cacheprovider --numprocesses 3 --dist loadfile tests/test_terraform_*.py # They wait a lot.
}

part_policy() {
  if ! environment policy tests/requirements-policy.txt; then
    skip "policy: checkov" "it could not be installed"
    return
  fi
  "$VENV/policy/bin/checkov" --directory terraform --framework terraform --quiet --compact --skip-download
  if [[ -s $SCRATCH/plan.json ]]; then
    "$VENV/policy/bin/checkov" --file "$SCRATCH/plan.json" --framework terraform_plan \
      --repo-root-for-plan-enrichment terraform --quiet --compact --skip-download
  else
    skip "policy: checkov on the plan" "the part terraform did not make one"
  fi
}

# The cluster, run: as root, because it makes its machines of namespaces.
part_namespaces() {
  local missing
  missing="$(cd tests && python -c 'import namespaces; print(namespaces.missing())')"
  if ! have terraform; then missing="terraform is not installed"; fi
  if [[ -n $missing ]]; then
    skip "namespaces: the cluster trains, bears faults, is open to nobody else" "$missing"
    return
  fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_cluster_namespaces.py
}

asked=" ${*:-${PARTS[*]}} "
for part in $asked; do
  if ! declare -F "part_$part" >/dev/null; then
    echo "there is no part $part; there are ${PARTS[*]} images" >&2
    exit 2
  fi
done
for part in "${PARTS[@]}" images; do # In this order whatever was typed: policy looks at the plan that terraform made.
  if [[ $asked == *" $part "* ]]; then
    say "$part"
    "part_$part"
  fi
done

say "${#SKIPPED[@]} left out"
if ((${#SKIPPED[@]})); then printf '  %s\n' "${SKIPPED[@]}"; fi
