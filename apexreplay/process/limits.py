"""Reads the memory, cores and disk space that this process may use, within the limits of its control groups."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROCESS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


class Space(NamedTuple):
    """The space on a file system."""

    size: int  # total bytes
    free: int  # bytes that an ordinary user can still write
    flaw: str = ""  # why nothing can be written; "" if writing is possible


def read_memory(process: Path = PROCESS, root: Path = ROOT) -> int:
    """Returns the memory that this process may use, in bytes: the host's memory, or a lower limit of a control group.

    `process`: file that lists the control groups of this process; `root`: folder of all control groups.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(read_text(process), root)])


def read_membership() -> str:
    """Returns the text of /proc/self/cgroup, which names the control groups of this process."""
    return read_text(PROCESS)


def core_limits(membership: str, root: Path) -> list[float]:
    """Returns the core limit of each control group that has one. `membership`: text of /proc/self/cgroup."""
    limits = []
    for folder in _groups(membership, root, "cpu"):
        values = _split(folder, "cpu.max") or _split(folder, "cpu.cfs_quota_us") + _split(folder, "cpu.cfs_period_us")
        if len(values) == 2 and all(value.isdecimal() for value in values) and int(values[1]):  # "max" or -1: no limit
            limits.append(int(values[0]) / int(values[1]))
    return limits


def memory_limits(membership: str, root: Path) -> list[int]:
    """Returns the memory limit in bytes of each control group that has one."""
    limits = (_memory_limit(folder) for folder in _groups(membership, root, "memory"))
    return [limit for limit in limits if limit is not None]


def available_memory(of_host: int, membership: str, root: Path) -> int:
    """Returns the unused memory in bytes: the least of the host's and of each control group's. Swap is not counted."""
    available = [of_host]
    for folder in _groups(membership, root, "memory"):
        limit = _memory_limit(folder)
        usage = _split(folder, "memory.current") or _split(folder, "memory.usage_in_bytes")
        if limit is not None and usage:
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            used = int(usage[0]) - (int(cached[1]) if cached else 0)  # The kernel can drop its file cache.
            available.append(max(0, limit - used))
    return min(available)


def read_available_memory() -> int:
    """Returns the memory that this process can still use, in bytes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(Path("/proc/meminfo")), re.MULTILINE)
    of_host = int(found[1]) * 1024 if found else 2**62  # If nothing is known, no limit applies.
    return available_memory(of_host, read_membership(), ROOT)


def read_space(path: Path) -> Space:
    """Returns the file system of `path`; its size is 0 if the path cannot be used."""
    try:
        facts = os.statvfs(path)
    except OSError as error:
        return Space(0, 0, f"cannot be used: {error.strerror}")
    flaw = "" if os.access(path, os.W_OK | os.X_OK) else "is not writable"
    return Space(facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize, flaw)


def _memory_limit(folder: Path) -> int | None:
    """Returns the memory limit of one control group in bytes; None if it has none."""
    values = _split(folder, "memory.max") or _split(folder, "memory.limit_in_bytes")
    return int(values[0]) if values and values[0].isdecimal() else None


def _split(folder: Path, name: str) -> list[str]:
    return read_text(folder / name).split()


def _groups(membership: str, root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups and of all their parents: each of them may set a limit."""
    for line in membership.splitlines():
        _, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (colon and second) or (controllers and controller not in controllers.split(",")):
            continue
        top = _tree(root, controller) if controllers else root
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _tree(root: Path, controller: str) -> Path:
    """Returns the folder of a controller's tree in cgroup version 1.

    Several controllers can share one tree, and the order of their names in the folder name can differ.
    """
    trees = sorted(folder for folder in root.glob(f"*{controller}*") if controller in folder.name.split(","))
    return trees[0] if trees else root / controller


def read_text(path: Path) -> str:
    """Returns the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
