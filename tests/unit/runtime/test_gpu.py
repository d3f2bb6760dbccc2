"""Reads GPUs from the driver, and decides whether this build of torch can use them."""

from types import SimpleNamespace

import pynvml
import pytest

from apex.runtime.gpu import Cuda, Gpu, GpuMeter, read_cuda, torch_version, version_name

H200 = Gpu("NVIDIA H200", 140 * 2**30, (9, 0))
T4 = Gpu("Tesla T4", 15 * 2**30, (7, 5))
SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", 18 * 2**30, (9, 0))


class Nvml:
    """The driver's library with these GPUs, whose UUIDs are GPU-0, GPU-1 ...; MIG-0 is a part of the first one."""

    def __init__(self, *gpus, missing=""):
        self.gpus = gpus
        self.missing = missing  # the function that the driver does not support
        self.is_open = False

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "missing"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        return object.__getattribute__(self, name)

    def nvmlInit(self):  # noqa: N802 - NVML's names, here and below
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlSystemGetCudaDriverVersion_v2(self):  # noqa: N802
        return 12_040

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        found = {"MIG-0": SLICE, **{f"GPU-{i}": gpu for i, gpu in enumerate(self.gpus)}}.get(uuid)
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    def nvmlDeviceIsMigDeviceHandle(self, device):  # noqa: N802
        return device == SLICE

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device):  # noqa: N802
        return self.gpus[0]

    def nvmlDeviceGetCudaComputeCapability(self, device):  # noqa: N802
        assert device in self.gpus
        return device.capability

    def nvmlDeviceGetName(self, device):  # noqa: N802
        return device.name

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return SimpleNamespace(total=device.memory_bytes)


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_every_gpu_is_described():
    nvml = Nvml(H200, T4)
    cuda = read_cuda(nvml)
    assert (cuda.driver, cuda.gpus) == (12_040, (H200, T4))
    assert not nvml.is_open


def test_a_driver_without_a_gpu_has_a_version_only():
    assert read_cuda(Nvml())._replace(torch=0) == Cuda(12_040, 0, ())


@pytest.mark.parametrize(
    ("names", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("1", (T4,)),
        ("1, 0", (T4, H200)),
        ("GPU-1", (T4,)),
        ("MIG-0", (SLICE,)),
        ("0,7,1", (H200,)),  # CUDA ignores all GPUs after an invalid one.
    ],
)
def test_only_what_cuda_shows_to_a_program_counts(monkeypatch, names, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert read_cuda(Nvml(H200, T4)).gpus == gpus


@pytest.mark.parametrize("missing", ["nvmlInit", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetName"])
def test_without_a_driver_that_answers_there_is_nothing(missing):
    nvml = Nvml(H200, missing=missing)
    assert read_cuda(nvml)._replace(torch=0) == Cuda(0, 0, ())
    assert not nvml.is_open


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
def test_the_cuda_version_of_torch_is_read_from_its_version_file(text, version):
    assert torch_version(text) == version


@pytest.mark.parametrize(
    ("driver", "built_for", "gpus", "usable"),
    [
        (12_040, 12_040, (H200,), True),
        (12_020, 12_080, (H200,), True),  # a newer minor version
        (12_080, 11_080, (H200,), True),
        (12_080, 13_000, (H200,), False),
        (12_080, 0, (H200,), False),  # torch is built for the CPU only
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


class BusyNvml(Nvml):
    """The same library, with GPUs in use."""

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return SimpleNamespace(used=3 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, device):  # noqa: N802
        return SimpleNamespace(gpu=87)


@pytest.mark.parametrize(
    ("nvml", "usage"),
    [
        (BusyNvml(H200), (0.87, 3 * 2**30)),
        (BusyNvml(), (None, None)),
        (BusyNvml(H200, missing="nvmlInit"), (None, None)),
        (BusyNvml(SLICE, missing="nvmlDeviceGetUtilizationRates"), (None, 3 * 2**30)),
    ],
)
def test_a_gpu_says_how_busy_it_is_where_it_can(nvml, usage, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuMeter(nvml).measure() == usage
