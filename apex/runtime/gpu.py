"""What CUDA's driver and torch's build say of the GPUs here; torch need not be loaded for it.

The driver is asked in a child: a process that has once begun with CUDA cannot fork another that uses it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BFLOAT16_SINCE = (8, 0)  # compute capability: Ampere. Earlier GPUs emulate it.
_MAJOR, _MINOR = 75, 76  # of the compute capability, among CUDA's device attributes
ANSWER_SECONDS = 60.0  # that a driver may take to begin; then there is no GPU to be used


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16."""
        return self.capability >= BFLOAT16_SINCE


class Cuda(NamedTuple):
    """GPUs, and what stands between them and torch. Versions are CUDA's, as in 12040 for 12.4."""

    driver: int  # the newest that the driver runs; 0: there is no driver
    torch: int  # what torch was built for; 0: for the CPU alone
    gpus: tuple[Gpu, ...]  # that CUDA_VISIBLE_DEVICES leaves

    @property
    def usable(self) -> bool:
        """Whether torch can compute on a GPU: a driver runs every minor version of its major one."""
        return bool(self.gpus) and 0 < self.torch // 1000 <= self.driver // 1000


def read_cuda(load: Callable[[str], Any] = ctypes.CDLL) -> Cuda:
    """Asks the driver, and reads which build of torch is installed; this process begins nothing with CUDA."""
    built_for = _torch_version()
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return Cuda(0, built_for, ())
    version, gpus = _ask_in_child(driver)
    return Cuda(version, built_for, tuple(Gpu(name, memory, (major, minor)) for name, memory, (major, minor) in gpus))


def means_gpu(device: object) -> bool:
    """Whether a learner that is told `device` computes on a GPU of this host; None stands for "auto"."""
    return device == "cuda" or (device != "cpu" and read_cuda().usable)


def version_name(version: int) -> str:
    """12040 is 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def torch_version(text: str) -> int:
    """The version of CUDA that a build of torch is for, from the text of its version.py; 0 if it is for none."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return int(found[1]) * 1000 + int(found[2]) * 10 if found else 0


def _torch_version() -> int:
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    return torch_version(file.read_text()) if file is not None and file.exists() else 0


def _ask_in_child(driver: Any) -> tuple[int, list[Any]]:
    """The driver's version and its GPUs; none from a driver that dies of the question, or does not answer."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(_ask(driver)).encode())  # A pipe takes 64 KiB at once: some hundred GPUs.
        finally:
            os._exit(0)  # Nothing of the parent's is to be ended here.
    os.close(writer)
    try:
        told = os.read(reader, 1 << 16) if select.select([reader], [], [], ANSWER_SECONDS)[0] else b""
        return tuple(json.loads(told)) if told else (0, [])
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _ask(driver: Any) -> tuple[int, list[Gpu]]:
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return version.value, []
    return version.value, [_read_gpu(driver, index) for index in range(count.value)]


def _read_gpu(driver: Any, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    name, memory = ctypes.create_string_buffer(100), ctypes.c_size_t(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))
