# Sourced by run.sh and test.sh: finds a Python, and keeps .venv as pyproject.toml and constraints.txt say.
# Speaks on standard error only. PYTHON=/path/to/python chooses the interpreter of a new .venv.
# shellcheck shell=bash

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

# Sets `python` to one that is new enough and can make virtual environments, or fails saying what is missing.
find_python() {
  local candidate found="" candidates=(python3.13 python3.12 python3.11 python3)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # Each is tried, not only looked up: a version manager puts commands in the path that only say "not found".
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
    found=$candidate
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      python=$candidate
      return
    fi
  done
  if [[ -n $found ]]; then
    fail "$found cannot make virtual environments: install its venv module (Debian and Ubuntu: apt install python3-venv)."
  elif [[ -n ${PYTHON:-} ]]; then
    fail "PYTHON=$PYTHON is not Python 3.11 or newer: $("$PYTHON" --version 2>&1 | head -n 1 || true)"
  fi
  fail "Python 3.11 or newer is needed; tried ${candidates[*]}. Install one, or name it: PYTHON=/path/to/python $0"
}

# ensure_venv ROOT [EXTRA[,EXTRA]]: returns at once when ROOT/.venv holds exactly what is wanted.
ensure_venv() {
  local root=$1 extra=${2:-} venv=$1/.venv python what
  local stamp=$venv/.installed unfinished=$venv/.unfinished log=$venv/install.log
  # The path belongs to the stamp: a virtual environment that was moved does not work.
  what="$(cat "$root/pyproject.toml" "$root/constraints.txt" "$root/setup.py" "$root"/apex/dqn/kernels/*.c "$root"/apex/replay_memory/frames/*.c <(echo "$root") | sha256sum | cut -d ' ' -f 1)"
  grep -qsx "$what $extra" "$stamp" && [[ -x $venv/bin/python ]] && return

  echo "Installing into $venv (once, about a minute)" >&2
  # What an interrupted start left behind may look complete, and the programs of a moved environment name an interpreter
  # that is elsewhere: both are thrown away. pip's cache makes up for it.
  if [[ -e $unfinished || ! -x $venv/bin/python ]] || ! grep -qsF "$venv/bin/python" "$venv/bin/pip"; then
    find_python
    mkdir -p "$venv"
    touch "$unfinished"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +
    "$python" -m venv "$venv" || fail "$python could not make $venv; the lines above say why."
  fi
  touch "$unfinished"
  rm -f "$stamp"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
    --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "The installation failed; the lines above are the end of $log. The next start tries again."
  fi
  # Whoever has an extra has what goes without it.
  printf '%s\n' "$what " "$what ${extra%%,*}" "$what $extra" >"$stamp"
  rm "$unfinished"
}
