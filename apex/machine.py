"""Reads what this host has, or what a container may use of it."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

from apex.sizing import Machine

PROCESS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def read_machine() -> Machine:
    """Cores and memory within the limits of affinity and control groups; a GPU if CUDA's driver shows one."""
    membership = PROCESS.read_text() if PROCESS.exists() else ""
    cores = [float(len(os.sched_getaffinity(0))), *core_limits(membership, ROOT)]
    memory = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits(membership, ROOT)]
    return Machine(cores=max(1, math.ceil(min(cores))), memory_bytes=min(memory), gpu=has_gpu())


def core_limits(membership: str, root: Path) -> list[float]:
    """Cores' worth of time that each control group allows; `membership` is the text of /proc/self/cgroup."""
    limits = []
    for folder in _groups(membership, root, "cpu"):
        words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdecimal():  # "max" or -1: no limit
            limits.append(int(words[0]) / int(words[1]))
    return limits


def memory_limits(membership: str, root: Path) -> list[int]:
    """Bytes that each control group allows."""
    limits = []
    for folder in _groups(membership, root, "memory"):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        limits += [int(word) for word in words if word.isdecimal()]
    return limits


def has_gpu() -> bool:
    """Asks CUDA's driver, which also obeys CUDA_VISIBLE_DEVICES; torch need not be loaded for it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _groups(membership: str, root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of those above them: any of them may set a limit."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root  # version 1 has a tree for each controller
        group = top / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
