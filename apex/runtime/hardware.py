"""Reads what this host has, or what a container may use of it."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from apex.config.sizing import Machine
from apex.runtime.gpu import Cuda, read_cuda

PROCESS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY, PROCESSOR = Path("/proc/meminfo"), Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # What torch multiplies bfloat16 with; without either it emulates.


class Space(NamedTuple):
    """A file system."""

    size: int  # bytes
    free: int  # bytes that a user may still write
    flaw: str = ""  # why nothing can be written at all


class FileLimit(NamedTuple):
    """How many files a process may have open."""

    soft: int
    hard: int  # up to which it may raise the soft one itself


def read_machine(cuda: Cuda | None = None) -> Machine:
    """Cores and memory within the limits of affinity and control groups; a GPU if torch can use one."""
    cuda = read_cuda() if cuda is None else cuda
    membership = read_membership()
    cores = [float(len(os.sched_getaffinity(0))), *core_limits(membership, ROOT)]
    return Machine(
        cores=max(1, math.ceil(min(cores))),
        memory_bytes=read_memory(),
        gpu=cuda.usable,
        cpu_bfloat16=read_bfloat16(),
        gpu_bfloat16=bool(cuda.gpus) and cuda.gpus[0].has_bfloat16,  # the first is the learner's
    )


def read_memory() -> int:
    """Bytes, within the limits of control groups."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(read_membership(), ROOT)])


def read_membership() -> str:
    """Which control groups this process is in."""
    return read_text(PROCESS)


def core_limits(membership: str, root: Path) -> list[float]:
    """Cores' worth of time that each control group allows; `membership` is the text of /proc/self/cgroup."""
    limits = []
    for folder in _groups(membership, root, "cpu"):
        words = (
            read_text(folder / "cpu.max").split()
            or read_text(folder / "cpu.cfs_quota_us").split() + read_text(folder / "cpu.cfs_period_us").split()
        )
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # "max" or -1: no limit
            limits.append(int(words[0]) / int(words[1]))
    return limits


def memory_limits(membership: str, root: Path) -> list[int]:
    """Bytes that each control group allows."""
    limits = []
    for folder in _groups(membership, root, "memory"):
        words = read_text(folder / "memory.max").split() or read_text(folder / "memory.limit_in_bytes").split()
        limits += [int(word) for word in words if word.isdecimal()]
    return limits


def available_memory(meminfo: str, membership: str, root: Path) -> int:
    """Bytes that nobody uses now: of the host, and within each control group that has a limit. Swap is not counted."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = [int(found[1]) * 1024] if found else []
    for folder in _groups(membership, root, "memory"):
        limit = read_text(folder / "memory.max").split() or read_text(folder / "memory.limit_in_bytes").split()
        usage = read_text(folder / "memory.current").split() or read_text(folder / "memory.usage_in_bytes").split()
        if limit and usage and limit[0].isdecimal():
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            used = int(usage[0]) - (int(cached[1]) if cached else 0)  # What the kernel would drop is not in the way.
            available.append(max(0, int(limit[0]) - used))
    return min(available, default=2**62)  # Where nothing says, nothing is refused.


def read_available_memory() -> int:
    """The same for this process, now."""
    return available_memory(read_text(MEMORY), read_membership(), ROOT)


def read_bfloat16() -> bool:
    """Whether this host's processor multiplies bfloat16."""
    return has_bfloat16(read_text(PROCESSOR))


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the processor multiplies bfloat16, by the text of /proc/cpuinfo."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def read_space(path: Path) -> Space:
    """The file system below `path`; of size 0 where there is none."""
    try:
        facts = os.statvfs(path)
    except OSError as error:
        return Space(0, 0, f"cannot be used: {error.strerror}")
    flaw = "" if os.access(path, os.W_OK | os.X_OK) else "may not be written to"
    return Space(facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize, flaw)


def read_file_limit() -> FileLimit:
    """This process's, which its children inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FileLimit(*(2**62 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def raise_file_limit(needed: int) -> bool:
    """Raises the soft limit of open files to `needed` where it is lower and the hard one allows; tells if it did."""
    limit = read_file_limit()
    if not limit.soft < needed <= limit.hard:
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return True


def _groups(membership: str, root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of those above them: any of them may set a limit."""
    for line in membership.splitlines():
        _, colon, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if not (colon and second) or (controllers and controller not in controllers.split(",")):
            continue
        top = _tree(root, controller) if controllers else root
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _tree(root: Path, controller: str) -> Path:
    """Version 1 has a tree for each controller, or for several; the kernel may name them in another order."""
    trees = sorted(folder for folder in root.glob(f"*{controller}*") if controller in folder.name.split(","))
    return trees[0] if trees else root / controller


def read_text(path: Path) -> str:
    """What is in a file; nothing if there is none that may be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
