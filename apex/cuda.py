"""What CUDA's driver and torch's build say of the GPUs here; torch need not be loaded for it, nor a GPU be woken."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BFLOAT16_SINCE = (8, 0)  # compute capability: Ampere. Earlier GPUs emulate it.
_MAJOR, _MINOR = 75, 76  # of the compute capability, among CUDA's device attributes


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
    """Asks the driver, and reads which build of torch is installed."""
    built_for = _torch_version()
    try:
        driver = load("libcuda.so.1")
    except OSError:
        return Cuda(0, built_for, ())
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return Cuda(version.value, built_for, ())
    return Cuda(version.value, built_for, tuple(_read_gpu(driver, index) for index in range(count.value)))


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


def _read_gpu(driver: Any, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    name, memory = ctypes.create_string_buffer(100), ctypes.c_size_t(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), memory.value, (major.value, minor.value))
