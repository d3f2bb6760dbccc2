#!/usr/bin/env bash
# Tests deploy/ without an account of a cloud: runs real Terraform and Packer against an AWS emulator on loopback, and
# real Slurm.
#
#   deploy/test.sh                    runs all parts except sky and images, in two lanes, and prints the output of each part
#                                     when it has ended; container builds only if its files have changed
#   deploy/test.sh images             makes both images in changed roots, which takes minutes
#   deploy/test.sh sky                installs SkyPilot, which takes a minute, and lets it read its task
#   deploy/test.sh container          builds the container's image in any case, which takes minutes
#   deploy/test.sh terraform policy   runs only these parts, one after the other
#
# Installs its Python packages into .venv and deploy/.venv. Skips checks whose tools are missing and lists them at the end.
set -euo pipefail
# A shell without job control starts programs in the background with SIGINT ignored, and pytest would not see it.
if [[ -z ${APEX_TEST_STARTED-} ]]; then APEX_TEST_STARTED=1 exec env --default-signal=INT bash "${BASH_SOURCE[0]}" "$@"; fi
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=../venv.sh
source ../venv.sh
ensure_venv "$(dirname "$PWD")" dev,cloud
PATH="$(dirname "$PWD")/.venv/bin:$PATH"

# The lanes run beside each other, and the parts of a lane one after the other: policy reads the plan of terraform, and
# terraform and slurm lock the lists of apt.
LANES=("shell namespaces kubernetes units" "terraform policy slurm container")
read -ra PARTS <<<"${LANES[*]}"
VENV="$PWD/.venv"
SCRATCH="$(mktemp -d)"
: >"$SCRATCH/skipped"

# Ends the lanes that still run, also after Ctrl-C: pytest removes what its tests have started when it is interrupted.
clean_up() {
  local lane signal part
  trap '' INT TERM HUP # a second signal must not end this
  for signal in INT KILL; do
    for lane in $(jobs -rp); do kill -s "$signal" -- "-$lane" || true; done
    for _ in {1..60}; do [[ -z $(jobs -rp) ]] || sleep 1; done
  done
  for part in "${PARTS[@]}"; do # of parts that a signal has ended
    if [[ -s $SCRATCH/$part.output && ! -e $SCRATCH/$part.shown ]]; then
      say "$part (interrupted)"
      cat "$SCRATCH/$part.output"
    fi
  done
  rm -rf "$SCRATCH"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

say() { printf '\n== %s\n' "$*"; }
skip() {
  echo "skipped: $1: $2"
  echo "  $1: $2" >>"$SCRATCH/skipped"
}
have() { command -v "$1" >/dev/null; }

# environment NAME REQUIREMENTS: creates a separate virtual environment, again if the requirements have changed.
environment() {
  local folder="$VENV/$1"
  if ! cmp -s "$2" "$folder/requirements.txt"; then
    rm -rf "$folder"
    python3 -m venv "$folder" &&
      "$folder/bin/pip" install --quiet --disable-pip-version-check -r "$2" &&
      cp "$2" "$folder/requirements.txt"
  fi
}

# Prints the folder of cloud-init's schema checker. Unpacks only its sources, because installing the package would add a
# service that runs at boot.
cloud_init() {
  local package=usr/lib/python3/dist-packages
  if [[ -d /$package/cloudinit ]]; then
    echo "/$package"
  elif have apt-get && have dpkg; then
    (cd "$SCRATCH" && { apt-get download -qq cloud-init || { apt-get update -qq && apt-get download -qq cloud-init; }; } &&
      dpkg -x cloud-init_*.deb cloud-init) >"$SCRATCH/cloud-init.log" 2>&1 && echo "$SCRATCH/cloud-init/$package"
  fi
}

# Prints the folder of Slurm's programs, or nothing if they are installed. Unpacks Debian's packages, because installing them
# would add users, and services that run at boot.
slurm() {
  local package program debs="$SCRATCH/debs"
  if have slurmctld || [[ -x /usr/sbin/slurmctld ]] || ! have apt-get || ! have dpkg; then return; fi
  mkdir -p "$debs/partial"
  fetch() {
    apt-get install --yes --quiet --no-install-recommends --download-only -o Dir::Cache::archives="$debs" slurmctld slurmd munge
  }
  { fetch || { apt-get update -qq && fetch; }; } >"$SCRATCH/slurm.log" 2>&1 || return 0
  for package in "$debs"/*.deb; do dpkg -x "$package" "$SCRATCH/slurm"; done
  for program in slurmctld slurmd slurmstepd; do ln -s "$program-wlm" "$SCRATCH/slurm/usr/sbin/$program"; done
  echo "$SCRATCH/slurm"
}

part_shell() {
  local scripts
  if ! shellcheck --version >/dev/null 2>&1; then
    skip shellcheck "shellcheck does not run on this host"
    return
  fi
  mapfile -t scripts < <(find . -path ./.venv -prune -o -name '*.sh' -print)
  shellcheck -x "${scripts[@]}" units/bin/* slurm/apex.sbatch
}

# pytest lists skipped tests with the reason.
part_units() {
  if ! have systemd-analyze; then skip "units: systemd-analyze verify" "systemd-analyze is not installed"; fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_lanes.py tests/test_units.py tests/test_host.py tests/test_stall.py \
    tests/test_bucket.py tests/test_sky.py tests/test_ray_hosts.py tests/test_packer.py -m "not build"
}

part_images() {
  if ((EUID)) || ! have unshare; then
    skip "images: builds and contents" "chroot needs root and unshare"
    return
  fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_packer.py -m build
}

# A good build records the hashes of the files that decide whether a build succeeds: commit them with your change.
part_container() {
  if environment compose tests/requirements-compose.txt; then
    "$VENV/compose/bin/check-jsonschema" --builtin-schema vendor.compose-spec ../compose.yaml
  else
    skip "container: schema of compose.yaml" "the installation of check-jsonschema failed"
  fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_container.py -m "not build"
  if ((asked_parts == 0)) && (cd .. && sha256sum --status --check deploy/tests/container.built); then
    skip "container: build and contents of the image" "its files have not changed since the last good build"
  else
    python -m pytest -q -rs -p no:cacheprovider tests/test_container.py -m build
  fi
}

# Builds and validates the manifests, and runs their pods as Linux namespaces, which needs root.
part_kubernetes() {
  if ! environment kubernetes tests/requirements-kubernetes.txt; then
    skip kubernetes "the installation of kubectl and kubernetes-validate failed"
    return
  fi
  PATH="$PATH:$VENV/kubernetes/bin" python -m pytest -q -rs -p no:cacheprovider tests/test_kubernetes.py
}

part_sky() {
  local python=""
  if environment sky tests/requirements-sky.txt; then python="$VENV/sky/bin/python"; fi
  APEX_SKY_PYTHON="$python" python -m pytest -q -rs -p no:cacheprovider tests/test_sky.py
}

part_terraform() {
  if ! have terraform; then
    skip "terraform: fmt, test, apply, rules, mutations, first boot, destroy" "terraform is not installed"
    return
  fi
  terraform fmt -check -diff -recursive terraform
  local cloud_init
  cloud_init="$(cloud_init || true)"
  if [[ -z $cloud_init ]]; then skip "cloud-init schema" "cloud-init is neither installed nor downloadable"; fi
  APEX_CLOUD_INIT="$cloud_init" APEX_KEEP_PLAN="$SCRATCH/plan.json" \
    python -m pytest -q -p no:cacheprovider --numprocesses 3 --dist loadgroup tests/test_terraform_*.py # 3: these tests mostly wait.
}

part_policy() {
  if ! environment policy tests/requirements-policy.txt; then
    skip "policy: checkov" "the installation of checkov failed"
    return
  fi
  "$VENV/policy/bin/checkov" --directory terraform --framework terraform --quiet --compact --skip-download
  if [[ -s $SCRATCH/plan.json ]]; then
    "$VENV/policy/bin/checkov" --file "$SCRATCH/plan.json" --framework terraform_plan \
      --repo-root-for-plan-enrichment terraform --quiet --compact --skip-download
  else
    skip "policy: checkov on the plan" "the part terraform has not created a plan"
  fi
}

# Runs a cluster whose hosts are Linux namespaces; needs root.
part_namespaces() {
  local missing
  missing="$(cd tests && python -c 'import namespaces; print(namespaces.missing())')"
  if ! have terraform; then missing="terraform is not installed"; fi
  if [[ -n $missing ]]; then
    skip "namespaces: training, faults and access control of a cluster" "$missing"
    return
  fi
  python -m pytest -q -rs -p no:cacheprovider tests/test_cluster_namespaces.py
}

# Runs a Slurm cluster whose nodes are Linux namespaces; needs root.
part_slurm() {
  local folder missing
  folder="$(slurm)"
  missing="$(cd tests && APEX_SLURM="$folder" python -c 'import slurm_cluster; print(slurm_cluster.missing())')"
  if [[ -n $missing ]]; then
    skip "slurm: training, lost nodes and requeued jobs" "$missing"
    return
  fi
  APEX_SLURM="$folder" python -m pytest -q -rs -p no:cacheprovider tests/test_slurm.py
}

asked_parts=$#
asked=" ${*:-${PARTS[*]}} "
for part in $asked; do
  if ! declare -F "part_$part" >/dev/null; then
    echo "unknown part '$part': use ${PARTS[*]}, sky or images" >&2
    exit 2
  fi
done

# run_lane "PART ...": runs the parts. Writes the output and the exit status of each into files.
run_lane() {
  local part
  trap 'exit 130' INT
  set +e # Otherwise a failed part ends its lane. In a command whose status is tested, `set -e` has no effect.
  for part in $1; do
    (
      set -e
      "part_$part"
    ) >"$SCRATCH/$part.output" 2>&1
    echo $? >"$SCRATCH/$part.status"
  done
}

failed=()
if ((asked_parts)); then
  for part in "${PARTS[@]}" sky images; do # in this order, because policy reads the plan of terraform
    if [[ $asked == *" $part "* ]]; then
      say "$part"
      "part_$part"
    fi
  done
else
  set -m # gives each lane its own process group, which clean_up ends
  for lane in "${LANES[@]}"; do run_lane "$lane" </dev/null & done
  set +m
  for part in "${PARTS[@]}"; do
    until [[ -s $SCRATCH/$part.status || -z $(jobs -rp) ]]; do sleep 1; done
    say "$part"
    : >"$SCRATCH/$part.shown"
    if ! { cat "$SCRATCH/$part.output" && [[ $(<"$SCRATCH/$part.status") == 0 ]]; }; then failed+=("$part"); fi
  done
fi

say "$(wc -l <"$SCRATCH/skipped") skipped"
cat "$SCRATCH/skipped"
if ((${#failed[@]})); then
  say "failed: ${failed[*]}" >&2
  exit 1
fi
