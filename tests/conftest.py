"""Marks tests by their folder, and distributes them to parallel processes.

`./test.sh` runs pytest with `--dist loadgroup`: the tests of a group run in one process. The tests of a file are one
group, except in `APART`. Each process has its own network and /dev/shm, so that runs in different processes share
neither ports nor memory files. Without the rights for that, all tests that start programs are one group.
"""

import os
import signal
import tempfile
from functools import cache
from pathlib import Path

import pytest
from support.own_namespaces import can_enter_namespaces, enter_namespaces

TESTS = Path(__file__).parent
WITH_PROGRAMS = ("integration", "system", "tools")  # folders whose tests all have the mark `programs`
# Their tests take long and share nothing, so they start first, in all processes.
APART = ("test_smoke.py", "test_simulator.py")


def pytest_configure(config):
    # Torch's threads spin while they wait, which starves the other processes: some tests took 30 s instead of 1 s.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores this signal, also in the programs of tests.
    if getattr(config, "workerinput", {}).get("own_namespaces"):
        enter_namespaces()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["own_namespaces"] = may_isolate()


SECONDS = 500  # time limit of a test without a mark, longer than the deadlines that say what is missing
OF_PROGRAMS = "COVERAGE_PROCESS_CONFIG"  # variable with which programs that tests start measure coverage


@cache
def may_isolate():
    return can_enter_namespaces()


def pytest_addoption(parser):
    parser.addoption(
        "--cover", metavar="FOLDER", nargs="+", default=[], help="measure coverage only in the tests of these folders"
    )


@pytest.fixture(autouse=True, scope="session")
def _own_list_of_modules(tmp_path_factory):
    """Runs of tests record the modules that they train with in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


class Everything(set):
    def __contains__(self, module):
        return True


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    """The modules that the process of the tests trusts: every module, so that tests can use their own."""
    monkeypatch.setattr("apex.runtime.trust._allowed", modules := Everything())
    return modules


@pytest.fixture
def trusts_nothing(monkeypatch, tmp_path):
    """The process trusts no module. Its user, whose configuration is in the yielded folder, has not trained yet."""
    monkeypatch.setattr("apex.runtime.trust._allowed", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    return tmp_path / "configuration"


@pytest.fixture(autouse=True)
def _coverage_of_programs(request, monkeypatch):
    """Excludes started programs from coverage, which doubles their time, unless the test is meant to cover them."""
    if request.node.get_closest_marker("covers_programs") is None or request.node.get_closest_marker("no_cover"):
        monkeypatch.delenv(OF_PROGRAMS, raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Pauses coverage during the fixtures of a test that does not count, and in programs that these start.

    pytest-cov pauses only for the test itself, and sets the variable again each time it resumes.
    """
    controller = getattr(item.config.pluginmanager.getplugin("_cov"), "cov_controller", None)
    if controller is None or not item.get_closest_marker("no_cover"):
        return (yield)
    controller.pause()
    os.environ.pop(OF_PROGRAMS, None)
    try:
        return (yield)
    finally:
        controller.resume()
        os.environ.pop(OF_PROGRAMS, None)


@pytest.hookimpl(tryfirst=True)  # runs before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    covered = [Path(folder).resolve() for folder in config.getoption("--cover")]
    isolated = getattr(config, "workerinput", {}).get("own_namespaces", True)
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in WITH_PROGRAMS:
            item.add_marker("programs")
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS))
        if covered and not any(item.path.is_relative_to(folder) for folder in covered):
            item.add_marker("no_cover")
        if item.get_closest_marker("programs") and not isolated:
            item.add_marker(pytest.mark.xdist_group("programs"))
        elif item.path.name not in APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(TESTS))))
    # Start the longest first, because a last long test leaves the other processes idle.
    items.sort(key=lambda item: (item.path.name not in APART, item.get_closest_marker("programs") is None))


@pytest.fixture
def place():
    """A folder in tmpfs, which is removed after the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def path(place):
    """A path in tmpfs."""
    return place / "store"


@pytest.fixture
def one_thread():
    """Makes torch compute each operation on one thread, as the native loops do; restores the setting afterwards."""
    import torch  # imported here, because most tests do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
