"""What a machine has: control groups of both versions may allow less than the hardware, at any level."""

import os

import pytest

from apex.machine import core_limits, memory_limits, read_machine


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
