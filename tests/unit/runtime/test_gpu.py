"""GPUs: what the driver answers, and whether this build of torch can use them."""

import ctypes
import os
import time
from pathlib import Path

import pytest

from apex.runtime import gpu as cuda_module
from apex.runtime.gpu import Cuda, Gpu, read_cuda, torch_version, version_name

H200 = Gpu("NVIDIA H200", 140 * 2**30, (9, 0))
T4 = Gpu("Tesla T4", 15 * 2**30, (7, 5))


class Driver:
    """libcuda.so.1 with these GPUs. Arguments are references to C numbers, as the real one takes them."""

    def __init__(self, *gpus, status=0):
        self.gpus = gpus
        self.status = status
        self.begun_in = 0

    def __call__(self, name):
        assert name == "libcuda.so.1"
        return self

    def cuDriverGetVersion(self, version):  # noqa: N802 - CUDA's names, here and below
        version._obj.value = 12_040
        return 0

    def cuInit(self, flags):  # noqa: N802
        if self.begun_in not in (0, os.getpid()):
            return 3  # not initialized: what CUDA says to the child of a process that has begun with it
        self.begun_in = os.getpid()
        return self.status

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 100 + index
        return 0

    def cuDeviceGetName(self, name, length, device):  # noqa: N802
        name.value = self.gpus[device.value - 100].name.encode()[: length - 1]
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):  # noqa: N802
        memory._obj.value = self.gpus[device.value - 100].memory_bytes
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        value._obj.value = self.gpus[device.value - 100].capability[attribute - 75]
        return 0


def test_every_gpu_is_described():
    cuda = read_cuda(Driver(H200, T4))
    assert (cuda.driver, cuda.gpus) == (12_040, (H200, T4))


def test_a_driver_without_a_gpu_has_a_version_only():
    assert read_cuda(Driver(H200, status=100))._replace(torch=0) == Cuda(12_040, 0, ())
    assert read_cuda(Driver())._replace(torch=0) == Cuda(12_040, 0, ())


def test_who_asks_has_not_begun_with_cuda_so_its_children_may():
    driver = Driver(H200)
    assert read_cuda(driver).gpus == (H200,)
    assert driver.begun_in == 0
    assert read_cuda(driver).gpus == (H200,)


def children():
    """The children of this thread; other tests may have left some."""
    return set(Path("/proc/thread-self/children").read_text().split())


def test_a_driver_that_dies_of_the_question_or_never_answers_has_no_gpu(monkeypatch):
    dying, silent = Driver(H200), Driver(H200)
    dying.cuInit = lambda flags: os._exit(1)
    silent.cuInit = lambda flags: time.sleep(60)
    monkeypatch.setattr(cuda_module, "ANSWER_SECONDS", 0.1)
    before = children()
    for driver in (dying, silent):
        assert read_cuda(driver)._replace(torch=0) == Cuda(0, 0, ())
    assert children() <= before


def test_without_a_driver_there_is_nothing():
    def missing(name):
        raise OSError(name)

    assert read_cuda(missing)._replace(torch=0) == Cuda(0, 0, ())


def test_here_it_agrees_with_torch():
    torch = pytest.importorskip("torch")
    cuda = read_cuda()
    assert version_name(cuda.torch) == (torch.version.cuda or "0.0")
    assert cuda.usable == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None", 0),
        ("cuda: Optional[str] = '12.8'\n", 12_080),
        ('debug = False\ncuda = "13.0"', 13_000),
        ("__version__ = '2.9.0'\ngit_version = 'cuda 12.1'", 0),
        ("", 0),
    ],
)
def test_what_torch_is_built_for_stands_in_its_version_file(text, version):
    assert torch_version(text) == version


@pytest.mark.parametrize(
    ("driver", "built_for", "gpus", "usable"),
    [
        (12_040, 12_040, (H200,), True),
        (12_020, 12_080, (H200,), True),  # a newer minor version
        (12_080, 11_080, (H200,), True),
        (12_080, 13_000, (H200,), False),
        (12_080, 0, (H200,), False),  # built for the CPU alone
        (12_080, 12_080, (), False),
        (0, 12_080, (), False),
    ],
)
def test_a_gpu_is_of_use_with_a_build_that_the_driver_runs(driver, built_for, gpus, usable):
    assert Cuda(driver, built_for, gpus).usable is usable


def test_bfloat16_came_with_ampere():
    assert H200.has_bfloat16
    assert Gpu("A10", 1, (8, 6)).has_bfloat16
    assert not T4.has_bfloat16


def test_a_reference_is_what_the_fake_driver_takes_it_for():
    number = ctypes.c_int(0)
    ctypes.byref(number)._obj.value = 7
    assert number.value == 7
