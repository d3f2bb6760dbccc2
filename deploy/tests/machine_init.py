"""The first process of a machine in namespaces: mounts the image's folders, and replaces systemd for the units of a
role.

    machine_init.py FOLDER    reads "start UNIT" from its standard input, and ends with it

FOLDER has `etc` (/etc/apex), `home` (/var/lib/apex) and `log`, a file for each unit. Units, drop-ins and scripts are
those of deploy/units. Dependencies of a unit start before it. Of the scripts' calls of systemctl, only try-restart has
an effect; the others are recorded. Not supported: User= (all run as root, without capabilities unless a command has
"+"), the rest of the sandbox, and units that need the journal or systemd itself.
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

UNITS = Path(__file__).parents[1] / "units"
# They read the journal, or wait for a spot notice and call systemctl. Tests do not wait a minute for a key or a check.
LEFT_OUT = {"apex-logs.service", "apex-spot.service", "apex-keys.timer", "apex-stall.timer"}
SYSTEMCTL = """#!/bin/sh
echo "$*" >> /var/lib/apex/systemctl
case "$*" in *try-restart*) echo "$*" > /opt/apex/asked ;; esac
"""
RUNNING: dict[str, subprocess.Popen[bytes]] = {}  # newest program by unit
RUN = Path("/var/lib/apex/run")  # in place of /run, which the machine shares with the host of the tests
LOCKS: dict[str, threading.Lock] = {}  # lock by unit, for one run at a time
TIMER_SPEED = 6  # Timers wait a sixth of their time: 20 s instead of 2 minutes.
WITHOUT_CAPABILITIES = ("setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")


class Unit:
    """The settings of a unit's file and its drop-ins."""

    def __init__(self, name: str) -> None:
        """`name` as in `systemctl start name`."""
        self.name = name
        stem, dot, kind = name.rpartition(".")
        stem, at, self.instance = stem.partition("@")
        self._values: dict[str, list[str]] = {}
        for path in (UNITS / f"{stem}{at}{dot}{kind}", *sorted((UNITS / f"{name}.d").glob("*.conf"))):
            for line in path.read_text().splitlines():
                key, equals, value = line.partition("=")
                if equals and not line.startswith(("#", ";")):
                    self._values.setdefault(key, []).append(value)

    def all(self, key: str) -> list[str]:
        """Returns all values of `key`, with %i and %n replaced."""
        return [value.replace("%i", self.instance).replace("%n", self.name) for value in self._values.get(key, [])]

    def last(self, key: str, default: str = "") -> str:
        """Returns the value of `key`, which may occur only once."""
        return (self.all(key) or [default])[-1]

    def before(self) -> list[str]:
        """Returns the services and timers that the unit wants."""
        wanted = {name for names in self.all("Wants") for name in names.split()}
        return sorted(name for name in wanted - LEFT_OUT if name.endswith((".service", ".timer")))

    def waits_for(self, name: str) -> bool:
        """Returns whether `name` must run or have ended before this unit."""
        return name in {other for names in self.all("After") for other in names.split()}

    def environment(self) -> dict[str, str]:
        """Returns the environment of its programs."""
        lines = [line for assignments in self.all("Environment") for line in shlex.split(assignments)]
        for path in self.all("EnvironmentFile"):
            lines += Path(path.removeprefix("-")).read_text().splitlines()
        if folder := self.last("RuntimeDirectory"):
            (RUN / folder).mkdir(parents=True, exist_ok=True)
            lines.append(f"RUNTIME_DIRECTORY={RUN / folder}")
        return {**os.environ, **dict(line.split("=", 1) for line in lines if "=" in line)}

    def restarts(self, status: int) -> bool:
        """Returns whether the unit restarts after this exit status."""
        if str(status) in self.last("RestartPreventExitStatus").split():
            return False
        return {"always": True, "on-failure": status != 0}.get(self.last("Restart"), False)


def run(unit: Unit, line: str, extra: dict[str, str]) -> int:
    """Runs one command of a unit to its end; returns its status, or 0 if the unit ignores it."""
    arguments = line.lstrip("+-")
    privileged, forgiven = "+" in line[: len(line) - len(arguments)], "-" in line[: len(line) - len(arguments)]
    environment = {**unit.environment(), **extra}
    command = [expand(argument, environment) for argument in shlex.split(arguments)]
    with (LOG / unit.name).open("ab") as log:
        process = subprocess.Popen(
            command if privileged else [*WITHOUT_CAPABILITIES, *command],
            cwd=unit.last("WorkingDirectory", "/"),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=int(unit.last("UMask", "0022"), 8),
            preexec_fn=lambda: prepare(unit),
        )
    RUNNING[unit.name] = process
    return 0 if process.wait() and forgiven else process.returncode


def prepare(unit: Unit) -> None:
    """Applies Nice= and LimitNOFILE= in the child."""
    os.nice(int(unit.last("Nice", "0")))
    if limit := unit.last("LimitNOFILE"):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # The root of the tests may not be allowed to raise it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(limit), most), most))


def expand(word: str, environment: dict[str, str]) -> str:
    """Returns the argument with each ${NAME} replaced."""
    for name, value in environment.items():
        word = word.replace(f"${{{name}}}", value)
    return word


def start(name: str) -> None:
    """Starts a unit and the units that it wants."""
    unit = Unit(name)
    for other in unit.before():
        if unit.waits_for(other):
            start(other)
        else:
            threading.Thread(target=tick if other.endswith(".timer") else start, args=[other], daemon=True).start()
    with LOCKS.setdefault(name, threading.Lock()):  # Two roles of a host may want the same unit.
        repeat(unit)


def tick(name: str) -> None:
    """Starts a timer's service at the timer's period."""
    timer = Unit(name)
    time.sleep(float(timer.last("OnActiveSec")) / TIMER_SPEED)
    while True:
        start(name.replace(".timer", ".service"))
        time.sleep(float(timer.last("OnUnitInactiveSec")) / TIMER_SPEED)


def repeat(unit: Unit) -> None:
    """Runs a unit's commands, and restarts them as the unit specifies."""
    while True:
        status = 0
        for line in (line for key in ("ExecStartPre", "ExecStart", "ExecStartPost") for line in unit.all(key)):
            status = run(unit, line, {})
            if status:
                break
        ended = {"EXIT_CODE": "exited" if status >= 0 else "killed", "EXIT_STATUS": str(status)}
        note(f"{unit.name} ended with {status}")
        for line in unit.all("ExecStopPost"):
            run(unit, line, ended)
        if not unit.restarts(status):
            return
        time.sleep(float(unit.last("RestartSec", "0.1")))


def restart_roles(fifo: Path) -> None:
    """Stops the roles whenever a script requests it; `start` then restarts them, as their units specify."""
    while True:
        for _ in fifo.read_text().splitlines():  # blocks until a script writes
            for name, process in list(RUNNING.items()):
                if name.startswith("apex@") and process.poll() is None:
                    process.terminate()


def note(arguments: str) -> None:
    """Records the status of a unit."""
    with (LOG / "ended").open("a") as file:
        file.write(arguments + "\n")


def mount(*arguments: str) -> None:
    """Runs a command; exits with its status if it fails."""
    subprocess.run(["mount", *arguments], check=True)


def furnish(folder: Path) -> None:
    """Mounts the image's folders in this machine's own mount namespace."""
    upper = folder / "upper"
    upper.mkdir()
    mount("-t", "tmpfs", "tmpfs", str(upper))
    for place in ("etc", "opt", "var/lib"):
        above, work = upper / place / "above", upper / place / "work"
        above.mkdir(parents=True)
        work.mkdir()
        mount("-t", "overlay", "-o", f"lowerdir=/{place},upperdir={above},workdir={work}", "overlay", f"/{place}")
    for place, source in (("/etc/apex", "etc"), ("/var/lib/apex", "home")):
        Path(place).mkdir(exist_ok=True)
        mount("--bind", str(folder / source), place)
    image = Path("/opt/apex")
    image.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "tmpfs", str(image))
    (image / "bin").mkdir()
    for script in (UNITS / "bin").iterdir():
        (image / "bin" / script.name).symlink_to(script)
    (image / "bin/systemctl").write_text(SYSTEMCTL)
    (image / "bin/systemctl").chmod(0o755)
    os.mkfifo(image / "asked")
    threading.Thread(target=restart_roles, args=[image / "asked"], daemon=True).start()
    (image / "venv").symlink_to(sys.prefix)
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    os.environ["PATH"] = f"{image / 'bin'}:{os.environ['PATH']}"


if __name__ == "__main__":
    LOG = Path(sys.argv[1]) / "log"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    furnish(Path(sys.argv[1]))
    for asked in sys.stdin:
        verb, asked_unit = asked.split()
        assert verb == "start", asked
        threading.Thread(target=start, args=[asked_unit], daemon=True).start()
