"""Reads the resources of this host, within the limits of the container."""

import math
import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from apex.config.validation import require_setting
from apex.runtime.gpu import Cuda, read_cuda

PROCESS, ROOT, PROCESSOR = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # CPU flags; without any of these, torch emulates bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The resources of this host, or of the container that this process runs in."""

    cores: int
    memory_bytes: int
    gpu: bool  # whether there is a GPU that PyTorch can use
    cpu_bfloat16: bool = False  # whether the CPU has bfloat16 instructions; emulation is 12 times slower than float32
    gpu_bfloat16: bool = True  # whether the GPU has bfloat16 instructions; true since Ampere

    def __post_init__(self) -> None:
        require_setting(min(self.cores, self.memory_bytes) >= 1, f"a machine has cores and memory, got {self}")


class Space(NamedTuple):
    """The space on a file system."""

    size: int  # total bytes
    free: int  # bytes that an ordinary user can still write
    flaw: str = ""  # why nothing can be written; "" if writing is possible


class FileLimit(NamedTuple):
    """The number of files that a process may have open."""

    soft: int
    hard: int  # maximum to which the process itself may raise the soft limit


def read_machine(cuda: Cuda | None = None) -> Machine:
    """Returns the resources that this process can use: cores, memory, GPU, and whether they support bfloat16."""
    cuda = read_cuda() if cuda is None else cuda
    membership = read_membership()
    cores = [float(len(os.sched_getaffinity(0))), *core_limits(membership, ROOT)]
    return Machine(
        cores=max(1, math.ceil(min(cores))),
        memory_bytes=read_memory(),
        gpu=cuda.usable,
        cpu_bfloat16=read_bfloat16(),
        gpu_bfloat16=bool(cuda.gpus) and cuda.gpus[0].has_bfloat16,  # the learner uses the first GPU
    )


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


def read_bfloat16() -> bool:
    """Returns whether the CPU of this host multiplies bfloat16 in hardware."""
    return has_bfloat16(read_text(PROCESSOR))


def has_bfloat16(cpuinfo: str) -> bool:
    """Returns whether the CPU multiplies bfloat16 in hardware, from the text of /proc/cpuinfo."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def read_space(path: Path) -> Space:
    """Returns the file system of `path`; its size is 0 if the path cannot be used."""
    try:
        facts = os.statvfs(path)
    except OSError as error:
        return Space(0, 0, f"cannot be used: {error.strerror}")
    flaw = "" if os.access(path, os.W_OK | os.X_OK) else "is not writable"
    return Space(facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize, flaw)


def read_file_limit() -> FileLimit:
    """Returns this process's limit of open files. Child processes inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FileLimit(*(2**62 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def raise_file_limit(needed: int) -> None:
    """Raises the soft limit of open files to `needed` if the hard limit allows it."""
    limit = read_file_limit()
    if limit.soft < needed <= limit.hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


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
