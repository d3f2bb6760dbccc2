"""The resources of a machine: control groups of either version, at any level, may allow less than the hardware has."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from apex.runtime import hardware
from apex.runtime.gpu import Cuda, Gpu
from apex.runtime.hardware import has_bfloat16, read_link, read_machine
from apexreplay.process.limits import available_memory, core_limits, memory_limits, read_memory, read_space


def write(root, **files):
    """Files of a control group's folder, by name with `__` for the dot."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text + "\n")


def test_version_2_limits_hold_at_every_level(tmp_path):
    write(tmp_path / "jobs", memory__max="4096", cpu__max="150000 100000")
    write(tmp_path / "jobs" / "mine", memory__max="max", cpu__max="max 100000")
    assert memory_limits("0::/jobs/mine\n", tmp_path) == [4096]
    assert core_limits("0::/jobs/mine\n", tmp_path) == [1.5]


def test_version_1_limits_are_in_a_tree_for_each_controller(tmp_path):
    write(tmp_path / "memory" / "mine", memory__limit_in_bytes="4096")
    write(tmp_path / "cpu,cpuacct" / "mine", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    membership = "9:memory:/mine\n4:cpu,cpuacct:/mine\n1:name=systemd:/\n"
    assert memory_limits(membership, tmp_path) == [4096]
    assert core_limits(membership, tmp_path) == [0.5]


def test_version_1_controllers_may_have_any_order(tmp_path):
    write(tmp_path / "cpu,cpuacct" / "mine", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(tmp_path / "cpuset" / "mine", cpu__cfs_quota_us="10000", cpu__cfs_period_us="100000")
    assert core_limits("4:cpuacct,cpu:/mine\n", tmp_path) == [0.5]


@pytest.mark.parametrize("text", ["100000", "100000 x", "100000 0", "x y z", ""])
def test_an_invalid_limit_is_ignored(tmp_path, text):
    write(tmp_path / "mine", cpu__max=text)
    assert core_limits("0::/mine\n", tmp_path) == []


def test_version_1_without_a_quota_sets_no_limit(tmp_path):
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert core_limits("4:cpu:/\n", tmp_path) == []


@pytest.mark.parametrize("membership", ["", "0::/gone\n"])
def test_without_control_groups_there_are_no_limits(tmp_path, membership):
    assert memory_limits(membership, tmp_path) == []
    assert core_limits(membership, tmp_path) == []


def test_this_machine_has_cores_and_memory():
    machine = read_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory_bytes > 2**20


# free memory, and the instructions of the processor


HOST = 400 * 1024  # unused bytes of the host


def test_free_memory_is_that_of_the_host():
    assert available_memory(HOST, "", Path("/nowhere")) == HOST


def test_a_control_group_limits_free_memory_except_its_cache(tmp_path):
    write(tmp_path / "mine", memory__max="300000", memory__current="250000", memory__stat="anon 1\ninactive_file 50000")
    assert available_memory(HOST, "0::/mine\n", tmp_path) == 100_000
    write(tmp_path / "mine", memory__max="100000")
    assert available_memory(HOST, "0::/mine\n", tmp_path) == 0
    write(tmp_path / "mine", memory__max="max")
    assert available_memory(HOST, "0::/mine\n", tmp_path) == HOST


def test_version_1_limits_free_memory(tmp_path):
    folder = tmp_path / "memory" / "mine"
    write(
        folder, memory__limit_in_bytes="300000", memory__usage_in_bytes="250000", memory__stat="total_inactive_file 9"
    )
    assert available_memory(HOST, "9:memory:/mine\n", tmp_path) == 50_009


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("sse4_2 avx2", False), ("avx512f avx512_vnni", False), ("avx2 avx512_bf16", True), ("amx_bf16 amx_tile", True)],
)
def test_a_processor_has_bfloat16_by_its_flags(flags, expected):
    assert has_bfloat16(f"processor : 0\nmodel name : amx_bf16\nflags\t\t: fpu {flags}\nbugs : x\n") is expected


def test_without_flags_there_is_no_bfloat16():
    assert not has_bfloat16("")


@pytest.mark.parametrize(
    ("gpus", "built_for", "expected"),
    [
        ((), 12_000, (False, False)),
        ((Gpu("new", 1, (9, 0)), Gpu("old", 1, (7, 0))), 12_000, (True, True)),
        ((Gpu("old", 1, (7, 0)), Gpu("new", 1, (9, 0))), 12_000, (True, False)),  # The learner uses the first GPU.
        ((Gpu("new", 1, (9, 0)),), 0, (False, True)),
    ],
)
def test_a_machine_has_a_gpu_if_torch_can_use_it(gpus, built_for, expected):
    machine = read_machine(Cuda(12_000, built_for, gpus))
    assert (machine.gpu, machine.gpu_bfloat16) == expected


def test_this_file_system_has_a_size():
    space = read_space(Path("/"))
    assert 0 <= space.free <= space.size


RAISE = """
import resource
from apex.runtime.hardware import raise_file_limit, read_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
print([(raise_file_limit(n), read_file_limit().soft)[1] for n in (60, 100, 100, 200)], read_file_limit().hard)
"""


def test_the_soft_limit_of_open_files_is_raised_up_to_the_hard_limit():
    done = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[64, 100, 100, 100] 128\n"


def test_memory_is_that_of_the_host_without_a_control_group(tmp_path):
    assert read_memory(tmp_path / "cgroup", tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_link_is_that_of_the_address_or_the_fastest_real_one(tmp_path, monkeypatch):
    def speed(up, mbit):
        return SimpleNamespace(isup=up, speed=mbit)

    def address(text):
        return [SimpleNamespace(address=text)]

    (tmp_path / "eth0/device").mkdir(parents=True)
    monkeypatch.setattr(hardware, "INTERFACES", tmp_path)
    addresses = {"eth0": address("10.0.0.1"), "eth0:1": address("10.0.0.2"), "docker0": address("172.17.0.1")}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: addresses)
    states = {"eth0": speed(True, 1_000), "docker0": speed(True, 10_000), "eth1": speed(False, 40_000)}
    monkeypatch.setattr("psutil.net_if_stats", lambda: states)
    assert read_link("10.0.0.1") == read_link("10.0.0.2") == read_link("0.0.0.0") == 10**9
    assert read_link("172.17.0.1") == 10**10

    def fail():
        raise OSError("no such interface")

    monkeypatch.setattr("psutil.net_if_stats", fail)
    assert read_link("10.0.0.1") == 0
