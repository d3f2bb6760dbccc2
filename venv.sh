# Sourced by run.sh and test.sh: finds Python, and creates or updates .venv from pyproject.toml and constraints.txt.
# Prints only to standard error. PYTHON=/path/to/python selects the interpreter of a new .venv.
# shellcheck shell=bash

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# Sets `python` to an interpreter that is new enough and can create virtual environments. Otherwise prints an error.
find_python() {
  local candidate found="" candidates=(python3.13 python3.12 python3.11 python3)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # Runs each candidate, because commands of a version manager may only print "not found".
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    found=$candidate
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      python=$candidate
      return
    fi
  done
  if [[ -n $found ]]; then
    fail "$found cannot create virtual environments: install its venv module (Debian and Ubuntu: apt install python3-venv)."
  elif [[ -n ${PYTHON:-} ]]; then
    fail "PYTHON=$PYTHON is not Python 3.11 or newer: $("$PYTHON" --version 2>&1 | head -n 1 || true)"
  fi
  fail "Python 3.11 or newer is required; tried ${candidates[*]}. Install it, or set its path: PYTHON=/path/to/python $0"
}

# Copies pip's output. On a terminal, also shows its newest line; elsewhere, the first line of each stage, and each
# download of at least 10 MB.
show_progress() {
  local line stage shown=""
  while IFS= read -r line; do
    printf '%s\n' "$line"
    if [[ -t 2 ]]; then
      printf '\r\033[K  %s' "${line:0:76}" >&2
      continue
    fi
    for stage in "Installing build" Collecting Building "Installing collected" "Downloading*[0-9][0-9].[0-9] MB"; do
      # shellcheck disable=SC2053  # The last stage is a pattern.
      if [[ $line == *$stage* && $shown != *"$stage;"* ]]; then
        printf '  %s\n' "${line:0:76}" >&2
        if [[ $stage != Downloading* ]]; then shown+="$stage;"; fi
      fi
    done
  done
  if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

# leave_out_silent_indexes PYTHON: removes the indexes from PIP_EXTRA_INDEX_URL that cannot be reached: pip would wait for
# each of them at each package.
leave_out_silent_indexes() {
  # The address is in the environment, because other users can read arguments; it is asked without user and password,
  # which urllib would take for a part of the host.
  local url kept="" ask='import os, ssl, sys, urllib.error, urllib.parse, urllib.request
try:
    address = urllib.parse.urlsplit(os.environ["INDEX"])
    host = address.netloc.rpartition("@")[2]
    urllib.request.urlopen(address._replace(netloc=host).geturl(), timeout=5)
except urllib.error.URLError as error:
    sys.exit(isinstance(error.reason, OSError) and not isinstance(error.reason, ssl.SSLError))
except TimeoutError:
    sys.exit(1)
except Exception: pass  # It has answered, or pip will report the mistake.'
  for url in ${PIP_EXTRA_INDEX_URL:-}; do
    if INDEX=$url timeout 10 "$1" -c "$ask"; then
      kept+="$url "
    else
      echo "The package index ${url##*@} (PIP_EXTRA_INDEX_URL) cannot be reached; installing without it" >&2
    fi
  done
  if [[ -n ${PIP_EXTRA_INDEX_URL:-} ]]; then export PIP_EXTRA_INDEX_URL=$kept; fi
}

# ensure_venv ROOT [EXTRA[,EXTRA]]: installs the package and its extras into ROOT/.venv unless they are up to date.
ensure_venv() {
  local root=$1 extra=${2:-} venv=$1/.venv python what update=yes
  local stamp=$venv/.installed unfinished=$venv/.unfinished log=$venv/install.log
  # The stamp includes the path, because a moved virtual environment does not work.
  what="$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/setup.py" "$root"/apex/algorithms/kernels/*.c "$root"/apexreplay/{pyproject.toml,setup.py,frames/*.c} <(echo "$root") | sha256sum | cut -d ' ' -f 1)"
  # The extra dev contains the extra docs.
  is_installed() { grep -qsx -e "$what $extra" -e "$what ${extra/#docs/dev}" "$stamp" && [[ -x $venv/bin/python ]]; }
  is_installed && return
  # One installation at a time: a second one would take the first one for interrupted, and remove it.
  local lock
  exec {lock}>"$venv.lock"
  if command -v flock >/dev/null && ! flock -n "$lock"; then
    echo "Waiting for another installation into $venv" >&2
    flock "$lock"
  fi
  if is_installed; then  # by that installation, which may have ended just now
    exec {lock}>&-
    return
  fi

  # Recreates the environment after an interrupted installation, and after a move, which breaks the paths of its programs.
  # pip's cache keeps this fast.
  if [[ -e $unfinished || ! -x $venv/bin/python ]] || ! grep -qsF "$venv/bin/python" "$venv/bin/pip"; then
    if [[ -e $venv && ! -e $stamp && ! -e $unfinished && $(ls -A "$venv") ]]; then
      fail "$venv was not made by this script. Remove it, and run the same command again."
    fi
    update=
    echo "Installing PyTorch, the Atari emulator and other packages${extra:+, and those of the extra $extra,} into $venv (once: a minute, or several on a slow connection)" >&2
    find_python
    mkdir -p "$venv"
    touch "$unfinished"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +
    "$python" -m venv "$venv" || fail "$python could not create $venv; see the error above."
  fi
  if [[ $update ]]; then echo "Updating $venv${extra:+ for the extra $extra}" >&2; fi
  touch "$unfinished"
  rm -f "$stamp"
  : >"$log"
  leave_out_silent_indexes "$venv/bin/python"
  local extras=$extra
  # Box2D, for LunarLander, has no wheel for Python 3.14.
  if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 14))'; then extras="box2d${extra:+,$extra}"; fi
  if [[ ! -t 2 ]]; then echo "Follow it: tail -f $log" >&2; fi
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    --constraint "$root/constraints.txt" --editable "$root/apexreplay" --editable "$root${extras:+[$extras]}" 2>&1 | show_progress >"$log"; then
    tail -n 20 "$log" >&2
    fail "The installation failed; the lines above are the end of $log. Run the same command again to retry."
  fi
  if [[ $update ]]; then sed -n 's/^Successfully installed /Installed /p' "$log" >&2; fi
  # An environment with extras also satisfies requests without them.
  printf '%s\n' "$what " "$what ${extra%%,*}" "$what $extra" >"$stamp"
  rm "$unfinished"
  exec {lock}>&-
}
