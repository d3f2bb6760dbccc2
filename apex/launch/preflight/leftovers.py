"""Finds files and processes that crashed runs left on this host, and the runs that are running."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.types import PROGRAMS
from apexreplay.errors import DataError
from apexreplay.store import location

MODULES = tuple(f"apex.{role}" for role in PROGRAMS)


class Orphan(NamedTuple):
    """A process of a run whose launcher has ended."""

    pid: int
    role: str


class Leftovers(NamedTuple):
    """Files in tmpfs and processes of runs on this host."""

    dead: dict[Path, int]  # path of each file that no run can use -> size in bytes; the next start removes these files
    kept: dict[Path, int]  # path of each killed run's replay memory file -> size in bytes; --resume uses them
    in_use: dict[Path, int]  # path of each live run's replay memory file -> size in bytes
    orphans: list[Orphan]


def find_leftovers(
    own: Path | None = None, *, memory: Path | None = None, processes: Path = Path("/proc")
) -> Leftovers:
    """Finds leftovers without changing anything. The stores of the run of `own`, which is resumed, count as in use.

    `memory`: by default this user's folder in tmpfs.
    """
    old = location.find_old_files()
    with suppress(DataError):  # The row `tmpfs` of the report says why there is no folder.
        memory = memory or location.memory_folder()
    dead: dict[Path, int] = {}
    kept: dict[Path, int] = {}
    in_use: dict[Path, int] = {}
    for path in [*old, *([] if memory is None else location.find_stores(memory))]:
        with suppress(FileNotFoundError):  # The file has just been removed.
            num_bytes = path.stat().st_size
            is_dead = path in old or location.is_abandoned(path)
            is_used = location.is_wanted(path) or (own is not None and location.is_same_run(path, own))
            files = in_use if is_used else dead if is_dead else kept
            files[path] = num_bytes
    return Leftovers(dead, kept, in_use, find_orphans(processes))


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
    """Returns how many bytes of memory the start of a run can free, plus the size of its own replay memory.

    The start frees kept memories only if the rest is not enough. `own`: a store of the run.
    """
    own_bytes = (n for path, n in leftovers.in_use.items() if own is not None and location.is_same_run(path, own))
    return sum(leftovers.dead.values()) + sum(leftovers.kept.values()) + sum(own_bytes)
