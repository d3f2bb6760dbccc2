"""What runs that ended badly have left on this host, and which runs go on."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.replay_memory.store.location import MEMORY, has_owner, is_wanted
from apex.types import PROGRAMS

MODULES = tuple(f"apex.{role}" for role in PROGRAMS)


class Orphan(NamedTuple):
    """A program of ours whose launcher is gone."""

    pid: int
    role: str


class Leftovers(NamedTuple):
    """Files in tmpfs, and programs."""

    dead: dict[Path, int]  # nobody's, with their bytes: the next replay server to start removes them
    in_use: dict[Path, int]  # replay memory of runs that go on, with its bytes
    orphans: list[Orphan]


def find_leftovers(memory: Path = MEMORY, processes: Path = Path("/proc")) -> Leftovers:
    """Looks, and touches nothing."""
    dead, in_use = {}, {}
    for path in sorted([*memory.glob("apex-*.replay"), *memory.glob("apex-*.board")]):
        store = path.with_suffix(".replay")
        try:
            num_bytes = path.stat().st_size
            alive = is_wanted(store) or has_owner(store)
        except FileNotFoundError:  # just removed
            continue
        except PermissionError:  # another user's
            alive = True
        if not alive:
            dead[path] = num_bytes
        elif path == store:
            in_use[path] = num_bytes
    return Leftovers(dead, in_use, find_orphans(processes))


def find_orphans(processes: Path) -> list[Orphan]:
    """Roles that the first process of the host has inherited, unless that is a program of ours: a container's is."""
    with suppress(OSError):
        if b"apex" in (processes / "1" / "cmdline").read_bytes():
            return []
    orphans = []
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
            status = (folder / "status").read_text(errors="replace")
        except OSError:  # It has ended.
            continue
        role = next((word for word in words if word in MODULES), None)
        if role is not None and re.search(r"^PPid:\s+1$", status, re.MULTILINE) and int(folder.name) != os.getpid():
            orphans.append(Orphan(int(folder.name), role))
    return sorted(orphans)


def bytes_to_come(leftovers: Leftovers, own: Path | None) -> int:
    """Bytes of memory that the start of a run frees, or that its own store `own` has already."""
    return sum(leftovers.dead.values()) + (leftovers.in_use.get(own, 0) if own is not None else 0)
