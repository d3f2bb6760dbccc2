"""Marks tests by their folder, and decides which run beside which when several processes share them.

`./test.sh` runs pytest with `--dist loadgroup`: a group of tests stays in one process. The tests of a file are one
group, except in `APART`. Each process has network and /dev/shm of its own, so that runs in different processes share
neither ports nor memory files. Where the rights for that are missing, all tests that start programs are one group.
"""

from __future__ import annotations

import signal
import tempfile
from functools import cache
from pathlib import Path

import pytest
from support.own_namespaces import can_enter_namespaces, enter_namespaces

TESTS = Path(__file__).parent
WITH_PROGRAMS = ("integration", "system", "tools")  # folders: every test there is marked `programs`
APART = ("test_smoke.py",)  # Its tests take minutes and share nothing, so they begin first, in all processes.


def pytest_configure(config):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it is ignored, also by what a test starts.
    if getattr(config, "workerinput", {}).get("own_namespaces"):
        enter_namespaces()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["own_namespaces"] = may_isolate()


@cache
def may_isolate():
    return can_enter_namespaces()


def pytest_addoption(parser):
    parser.addoption("--cover", metavar="FOLDER", nargs="+", default=[], help="measure coverage in tests of these only")


@pytest.fixture(autouse=True)
def _coverage_of_programs(request, monkeypatch):
    """Leaves started programs out of coverage, which makes them half as fast, unless a test is there to cover them."""
    if request.node.get_closest_marker("covers_programs") is None or request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    covered = [Path(folder).resolve() for folder in config.getoption("--cover")]
    isolated = getattr(config, "workerinput", {}).get("own_namespaces", True)
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in WITH_PROGRAMS:
            item.add_marker("programs")
        if covered and not any(item.path.is_relative_to(folder) for folder in covered):
            item.add_marker("no_cover")
        if item.get_closest_marker("programs") and not isolated:
            item.add_marker(pytest.mark.xdist_group("programs"))
        elif item.path.name not in APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
    # The longest begin first: an end with one busy process wastes the others.
    items.sort(key=lambda item: (item.path.name not in APART, item.get_closest_marker("programs") is None))


@pytest.fixture
def place():
    """A folder in tmpfs, which goes with the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def path(place):
    """A name in tmpfs."""
    return place / "store"


@pytest.fixture
def one_thread():
    """torch computes each operation on one thread, as the native loops want it; afterwards as before."""
    import torch  # Most tests do without.

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
