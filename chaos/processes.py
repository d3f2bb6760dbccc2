"""Finds the processes of a run in /proc, reads their memory and descriptors, and sends signals."""

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
    is_child: bool  # whether it is a child of a program of the same role


class Footprint(NamedTuple):
    """Memory and descriptors of all processes of a role."""

    memory_bytes: int  # PSS without the replay memory's file, programs and libraries, in bytes
    num_files: int  # open descriptors
    num_processes: int


def find(launcher: int) -> list[Process]:
    """Returns the launcher's process and its living descendants; children of a killed launcher are not found."""
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
    """Sends SIGKILL; ignores processes that have ended."""
    send(process.pid, signal.SIGKILL)


def send(pid: int, signum: signal.Signals) -> None:
    """Sends a signal; ignores processes that have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def is_alive(pid: int) -> bool:
    """Returns whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def maps_memory(pid: int) -> bool:
    """Returns whether the process maps the replay memory. Of the learner's children, loaders do; the coordinator does
    not.
    """
    try:
        return ".replay" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False


def footprints(processes: list[Process]) -> dict[str, Footprint]:
    """Returns footprints by role, without processes that have ended."""
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
    """Returns the proportional set size of the process in bytes, without replay memory, programs and libraries.

    The share in a library grows whenever another program that maps it ends.
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
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
    except OSError:
        return ""
    return next((role for module, role in ROLE_OF_MODULE.items() if module in arguments), "")
