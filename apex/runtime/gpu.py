"""Reads which GPUs this host has and whether torch can use them, without loading torch or CUDA, which takes seconds."""

import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

BFLOAT16_SINCE = (8, 0)  # compute capability of Ampere; earlier GPUs emulate bfloat16


class Gpu(NamedTuple):
    """One GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def has_bfloat16(self) -> bool:
        """Whether the GPU multiplies bfloat16 in hardware."""
        return self.capability >= BFLOAT16_SINCE


class Cuda(NamedTuple):
    """The GPUs, and the CUDA versions of driver and torch. A version is a number such as 12040 for CUDA 12.4."""

    driver: int  # newest version that the driver supports; 0: there is no driver
    torch: int  # version that torch was built for; 0: torch was built for CPUs only
    gpus: tuple[Gpu, ...]  # the GPUs that CUDA_VISIBLE_DEVICES allows

    @property
    def usable(self) -> bool:
        """Whether torch can compute on a GPU: a GPU exists, and torch's major CUDA version is not above the driver's.

        Minor versions do not matter.
        """
        return bool(self.gpus) and 0 < self.torch // 1000 <= self.driver // 1000


def read_cuda(nvml: Any = pynvml) -> Cuda:
    """Reads the GPUs from NVML, the driver's management library, and the CUDA version from the installed torch."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    built_for = torch_version(file.read_text()) if file is not None and file.exists() else 0
    try:
        nvml.nvmlInit()
        try:
            driver = nvml.nvmlSystemGetCudaDriverVersion_v2()
            return Cuda(driver, built_for, tuple(_read_gpu(nvml, device) for device in _visible_devices(nvml)))
        finally:
            nvml.nvmlShutdown()
    except pynvml.NVMLError:  # The driver is missing or does not respond, or libcuda.so.1 is missing.
        return Cuda(0, built_for, ())


class GpuMeter:
    """Measures the load of the first GPU that CUDA shows to this process. The load includes all users of the GPU."""

    def __init__(self, nvml: Any = pynvml) -> None:
        self._nvml = nvml
        self._device: Any = None
        with suppress(pynvml.NVMLError):
            nvml.nvmlInit()  # Never shut down: initializing is slow, measuring is fast.
            self._device = next(iter(_visible_devices(nvml)), None)

    def measure(self) -> tuple[float | None, int | None]:
        """Returns the recent share of time in which the GPU worked, and its used memory in bytes; None if unknown."""
        share = used = None
        if self._device is not None:
            with suppress(pynvml.NVMLError):
                used = self._nvml.nvmlDeviceGetMemoryInfo(self._device).used
                share = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100  # fails on MIG partitions
        return share, used


def means_gpu(device: object) -> bool:
    """Returns whether a learner with the setting `device` uses a GPU of this host; None means "auto"."""
    return device == "cuda" or (device != "cpu" and read_cuda().usable)


def version_name(version: int) -> str:
    """Returns the name of a CUDA version: 12040 -> 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def torch_version(text: str) -> int:
    """Returns the CUDA version of a torch build from the text of its version.py; 0 if the build has no CUDA."""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    return int(found[1]) * 1000 + int(found[2]) * 10 if found else 0


def _visible_devices(nvml: Any) -> list[Any]:
    """Returns the devices that CUDA_VISIBLE_DEVICES names by number or UUID. Like CUDA, stops at an invalid name."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(nvml.nvmlDeviceGetCount())) if text is None else map(str.strip, text.split(","))
    devices = []
    for name in names:
        try:
            by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
            devices.append(by_index(int(name)) if name.isdecimal() else by_uuid(name))
        except pynvml.NVMLError:
            break
    return devices


def _read_gpu(nvml: Any, device: Any) -> Gpu:
    is_part = nvml.nvmlDeviceIsMigDeviceHandle(device)
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) if is_part else device
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetMemoryInfo(device).total, (major, minor))
