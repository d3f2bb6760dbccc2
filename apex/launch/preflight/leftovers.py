"""What runs that ended badly have left on this host, and which runs go on."""

from __future__ import annotations

import os
import re
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
    roles: dict[int, tuple[str, int]] = {}
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split(" ")
            status = (folder / "status").read_text(errors="replace")
        except OSError:  # It has ended.
            continue
        parent = re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)
        role = next((word for word in words if word in MODULES), None)
        if role is not None and parent is not None:
            roles[int(folder.name)] = role, int(parent[1])
    if _is_ours(processes / "1"):
        return []
    return [Orphan(pid, role) for pid, (role, parent) in sorted(roles.items()) if parent == 1 and pid != os.getpid()]


def bytes_to_come(leftovers: Leftovers, own: Path | None) -> int:
    """Bytes of memory that the start of a run frees, or that its own store `own` has already."""
    return sum(leftovers.dead.values()) + (leftovers.in_use.get(own, 0) if own is not None else 0)


def _is_ours(folder: Path) -> bool:
    try:
        return b"apex" in (folder / "cmdline").read_bytes()
    except OSError:
        return False
