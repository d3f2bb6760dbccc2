"""Reads the resources of this host, within the limits of the container."""

import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from apex.config.validation import require_setting
from apex.runtime.gpu import Cuda, read_cuda
from apexreplay.process.limits import ROOT, core_limits, read_membership, read_memory, read_text

PROCESSOR = Path("/proc/cpuinfo")
INTERFACES = Path("/sys/class/net")

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


def read_link(address: str) -> int:
    """Returns the bits per second of the network interface with this address, or of the fastest one; 0 if unknown."""
    try:
        interfaces, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return 0
    names = [
        name.partition(":")[0] for name, found in interfaces.items() if address in {each.address for each in found}
    ]
    # Without such an address: not the bridges of containers, which claim any speed.
    names = names or [name for name in states if (INTERFACES / name / "device").exists()]
    return max((states[name].speed for name in names if name in states and states[name].isup), default=0) * 10**6


def read_bfloat16() -> bool:
    """Returns whether the CPU of this host multiplies bfloat16 in hardware."""
    return has_bfloat16(read_text(PROCESSOR))


def has_bfloat16(cpuinfo: str) -> bool:
    """Returns whether the CPU multiplies bfloat16 in hardware, from the text of /proc/cpuinfo."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return flags is not None and not BFLOAT16_FLAGS.isdisjoint(flags[1].split())


def read_file_limit() -> FileLimit:
    """Returns this process's limit of open files. Child processes inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FileLimit(*(2**62 if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard)))


def raise_file_limit(needed: int) -> None:
    """Raises the soft limit of open files to `needed` if the hard limit allows it."""
    limit = read_file_limit()
    if limit.soft < needed <= limit.hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
