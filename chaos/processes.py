"""The processes of a run as the kernel tells of them: who they are, what they hold, and signals to them."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.types import PROGRAMS, Role

ROLE_OF_MODULE: dict[str, str] = {
    **{f"apex.{role}": role for role in PROGRAMS},
    "chaos.programs.actor": Role.ACTOR,
    "chaos.programs.launcher": "launcher",
}
NOT_ITS_OWN = ("/dev/shm/apex-", "/usr/", "/lib", *{f"{path}/" for path in (sys.prefix, sys.base_prefix)})


class Process(NamedTuple):
    """One process of a run."""

    pid: int
    parent: int
    role: str
    is_child: bool  # of a program of the same role


class Footprint(NamedTuple):
    """What the processes of one role hold together."""

    memory_bytes: int  # PSS less that of the replay memory's file, and less programs and libraries
    num_files: int  # open descriptors
    num_processes: int


def find(launcher: int) -> list[Process]:
    """The launcher's process and all below it that lives; the children of a killed launcher are not found."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found: list[Process] = []
    pending = [launcher] if launcher in parents else []
    roles = {launcher: "launcher"}
    while pending:
        pid = pending.pop()
        for child in [child for child, parent in parents.items() if parent == pid]:
            roles[child] = _program(child) or roles[pid]
            pending.append(child)
        found.append(Process(pid, parents[pid], roles[pid], pid != launcher and roles[pid] == roles.get(parents[pid])))
    return found


def kill(process: Process) -> None:
    """SIGKILL; that it is gone already is no error."""
    send(process.pid, signal.SIGKILL)


def send(pid: int, signum: signal.Signals) -> None:
    """Sends a signal; that the process is gone already is no error."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and no zombie of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def maps_memory(pid: int) -> bool:
    """Whether the process sees the replay memory. Of the learner's children loaders do, the coordinator does not."""
    try:
        return ".replay" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def footprints(processes: list[Process]) -> dict[str, Footprint]:
    """By role. What has gone meanwhile is left out."""
    total: dict[str, Footprint] = {}
    for process in processes:
        try:
            memory = _own_memory(process.pid)
            files = len(os.listdir(f"/proc/{process.pid}/fd"))
        except OSError:
            continue
        before = total.get(process.role, Footprint(0, 0, 0))
        total[process.role] = Footprint(
            before.memory_bytes + memory, before.num_files + files, before.num_processes + 1
        )
    return total


def _own_memory(pid: int) -> int:
    """The process's proportional share of its memory, without the replay memory, programs and libraries, in bytes.

    Of a library everybody who maps it has a share: it would grow whenever a stranger's program ends.
    """
    total, counts = 0, True
    with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                path = rest.split(maxsplit=4)[4:]
                counts = not (path and path[0].startswith(NOT_ITS_OWN))
            elif name == "Pss:" and counts:
                total += 1_024 * int(rest.split()[0])
    return total


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
    except OSError:
        return ""
    return next((role for module, role in ROLE_OF_MODULE.items() if module in words), "")
