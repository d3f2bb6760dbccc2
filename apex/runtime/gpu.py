"""What NVIDIA's driver and torch's build say of the GPUs here; neither torch nor CUDA is loaded for it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

BFLOAT16_SINCE = (8, 0)  # compute capability: Ampere. Earlier GPUs emulate it.


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


def read_cuda(nvml: Any = pynvml) -> Cuda:
    """Asks NVML, the driver's management library, and reads which build of torch is installed."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    built_for = torch_version(file.read_text()) if file is not None and file.exists() else 0
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:  # There is no driver, or it does not answer.
        return Cuda(0, built_for, ())
    try:
        driver = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Cuda(driver, built_for, tuple(_read_gpu(nvml, device) for device in _visible_devices(nvml)))
    except pynvml.NVMLError:  # There is no libcuda.so.1, say.
        return Cuda(0, built_for, ())
    finally:
        nvml.nvmlShutdown()


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


def _visible_devices(nvml: Any) -> list[Any]:
    """The devices that CUDA_VISIBLE_DEVICES names by number or UUID. Like CUDA, stops at a name that is wrong."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(nvml.nvmlDeviceGetCount())) if text is None else map(str.strip, text.split(","))
    devices = []
    for name in names:
        try:
            is_number = name.isdecimal()
            devices.append(
                nvml.nvmlDeviceGetHandleByIndex(int(name)) if is_number else nvml.nvmlDeviceGetHandleByUUID(name)
            )
        except pynvml.NVMLError:
            break
    return devices


def _read_gpu(nvml: Any, device: Any) -> Gpu:
    is_part = nvml.nvmlDeviceIsMigDeviceHandle(device)
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device) if is_part else device
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(nvml.nvmlDeviceGetName(device), nvml.nvmlDeviceGetMemoryInfo(device).total, (major, minor))
