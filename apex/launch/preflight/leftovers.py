"""Finds files and processes that crashed runs left on this host, and the runs that are running."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.replay_memory.store.location import MEMORY, has_owner, is_wanted
from apex.types import PROGRAMS

MODULES = tuple(f"apex.{role}" for role in PROGRAMS)


class Orphan(NamedTuple):
    """A process of a run whose launcher has ended."""

    pid: int
    role: str


class Leftovers(NamedTuple):
    """Files in tmpfs and processes of runs on this host."""

    dead: dict[Path, int]  # path of each file of dead runs -> size in bytes; the start of a replay server removes them
    in_use: dict[Path, int]  # path of each live run's replay memory file -> size in bytes
    orphans: list[Orphan]


def find_leftovers(memory: Path = MEMORY, processes: Path = Path("/proc")) -> Leftovers:
    """Finds leftovers without changing anything."""
    dead, in_use = {}, {}
    for path in sorted([*memory.glob("apex-*.replay"), *memory.glob("apex-*.counters")]):
        store = path.with_suffix(".replay")
        try:
            num_bytes = path.stat().st_size
            alive = is_wanted(store) or has_owner(store)
        except FileNotFoundError:  # The file has just been removed.
            continue
        except PermissionError:  # The file belongs to another user.
            alive = True
        if not alive:
            dead[path] = num_bytes
        elif path == store:
            in_use[path] = num_bytes
    return Leftovers(dead, in_use, find_orphans(processes))


def find_orphans(processes: Path) -> list[Orphan]:
    """Returns the role processes whose parent is process 1, because their launcher has ended.

    Returns none if process 1 is itself a program of Ape-X, as in a container.
    """
    with suppress(OSError):
        if b"apex" in (processes / "1" / "cmdline").read_bytes():
            return []
    orphans = []
    for folder in processes.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
            status = (folder / "status").read_text(errors="replace")
        except OSError:  # The process has ended.
            continue
        role = next((each for each in arguments if each in MODULES), None)
        if role is not None and re.search(r"^PPid:\s+1$", status, re.MULTILINE) and int(folder.name) != os.getpid():
            orphans.append(Orphan(int(folder.name), role))
    return sorted(orphans)


def bytes_to_come(leftovers: Leftovers, own: Path | None) -> int:
    """Returns how many bytes of memory the start of a run frees, plus the size of its own replay memory file `own`."""
    return sum(leftovers.dead.values()) + (leftovers.in_use.get(own, 0) if own is not None else 0)
