"""What machines say when they are asked over ssh, and why one of them cannot take part in a run."""

from __future__ import annotations

import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from apex.errors import ConfigError
from apex.launch.ssh.client import CONNECTION_LOST
from apex.launch.ssh.hosts_file import HostEntry, Hosts
from apex.version import VERSION

# No question is asked, as nobody could answer it. Every program has a connection of its own, whose end is soon noticed.
OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ControlPath=none", "ServerAliveInterval=5", "ServerAliveCountMax=3")
ANSWER_SECONDS = 20.0
NO_FOLDER, NO_APEX = 3, 4  # statuses of the question below
QUESTION = """\
cd {folder} || exit 3
test -x .venv/bin/apex || exit 4
.venv/bin/apex --version && nproc &&
.venv/bin/python -c "from apex.runtime.hardware import read_memory; print(read_memory())" &&
if test -e {run}; then echo there; else echo new; fi"""


class Facts(NamedTuple):
    """What a machine has."""

    cores: int
    memory_bytes: int
    has_run: bool  # of the name that was asked for


def ssh_command(hosts: Hosts, place: HostEntry, script: str, *options: str) -> tuple[str, ...]:
    """The command that has `script` run on a place's machine by its sh, whatever its user's shell is."""
    given = [word for option in OPTIONS for word in ("-o", option)]
    return (*hosts.ssh, "-T", *given, *options, place.host, f"exec sh -c {shlex.quote(script)}")


def ask_hosts(hosts: Hosts, run: str) -> dict[HostEntry, Facts]:
    """Asks all machines at once what they have; raises ConfigError that names each which cannot take part.

    `run` is a folder below the installation's.
    """

    def ask(place: HostEntry) -> Facts | str:
        try:
            return _ask(hosts, place, run)
        except ConfigError as error:
            return str(error)

    asked = {(place.host, place.folder): place for place in hosts.places}
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = dict(zip(asked, threads.map(ask, asked.values()), strict=True))
    problems = [answer for answer in answers.values() if isinstance(answer, str)]
    if problems:
        raise ConfigError("\n  ".join(["these machines cannot take part:", *problems] if problems[1:] else problems))
    by_place = {place: answers[place.host, place.folder] for place in hosts.places}
    return {place: answer for place, answer in by_place.items() if isinstance(answer, Facts)}


def _ask(hosts: Hosts, place: HostEntry, run: str) -> Facts:
    host, folder = place.host, place.folder
    question = QUESTION.format(folder=shlex.quote(folder), run=shlex.quote(run))
    by_hand = shlex.join([*hosts.ssh, host])
    try:
        answer = subprocess.run(
            ssh_command(hosts, place, question),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot run {hosts.ssh[0]!r} here: {error.strerror}; install it, or set ssh in the file"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{host} did not answer within {ANSWER_SECONDS:.0f} s; see what `{by_hand}` does") from error
    said = answer.stderr.strip().rpartition("\n")[2] or "nothing"
    install = f"on {host} do: git clone this repository as {folder}, {folder}/run.sh --help"
    if answer.returncode == CONNECTION_LOST:
        raise ConfigError(f"{host} cannot be reached ({said}): `{by_hand} true` must work without a question")
    if answer.returncode in (NO_FOLDER, NO_APEX):
        missing = folder if answer.returncode == NO_FOLDER else f"{folder}/.venv/bin/apex"
        raise ConfigError(f"{host} has no {missing}: name its folder, or {install}")
    lines = answer.stdout.splitlines()[-4:]  # A shell may greet before.
    if answer.returncode or len(lines) < 4 or not (lines[1].isdecimal() and lines[2].isdecimal()):
        raise ConfigError(f"{host} cannot run {folder}/.venv/bin/apex (status {answer.returncode}: {said}): {install}")
    if lines[0] != f"apex {VERSION}":
        raise ConfigError(f"{host} has {lines[0]} in {folder}, here is apex {VERSION}: bring both to one version")
    return Facts(int(lines[1]), int(lines[2]), lines[3] == "there")


def guard_script(place: HostEntry) -> str:
    """What a machine is to run for a program of this place."""
    return f"cd {shlex.quote(place.folder)} && exec .venv/bin/python -u -m apex.launch.ssh.remote_guard"
