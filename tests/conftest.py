"""Which tests run beside which, when several processes share them (`pytest -n 2 --dist loadfile`, as ./test.sh does).

A file's tests stay together, but for those of `APART`. Files that start programs of ours come first, as they take
longest. They would share the host's ports and its memory files, of which a start removes what dead runs left: so each
process has its own, where it may. Where it may not, these files run in turn, in one process.
"""

from __future__ import annotations

from functools import cache

import pytest
from support.own_namespaces import can_enter_namespaces, enter_namespaces

PROGRAMS = (
    '"-m", "apex',
    "-m apex ",
    "store_path(",
    "choose_ports(",
    "open_programs(",
    "gpu.sh",
    "bench.test_replay import",
    "machines import",
    "test_smoke import",
    "EXAMPLES",
)
APART = ("test_smoke.py",)  # Its tests take four minutes of a process, and share nothing: they begin first, on all.


@cache
def starts_programs(path):
    return path.name != "conftest.py" and any(sign in path.read_text() for sign in PROGRAMS)


def pytest_configure(config):
    if getattr(config, "workerinput", {}).get("own_namespaces"):
        enter_namespaces()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["own_namespaces"] = may_isolate()


@cache
def may_isolate():
    return can_enter_namespaces()


@pytest.fixture(autouse=True)
def _coverage_of_programs(request, monkeypatch):
    """Leaves started programs out of coverage, which makes them half as fast, unless a test is there to cover them."""
    if request.node.get_closest_marker("covers_programs") is None:
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: (not starts_programs(item.path), item.path.name not in APART))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = config.rootpath / nodeid.partition("::")[0]
            if starts_programs(path) and not may_isolate():
                return "programs"
            return nodeid.partition("[" if path.name in APART else "::")[0]

    return Files(config, log)


@pytest.fixture
def one_thread():
    """torch computes each operation on one thread, as the native loops want it; afterwards as before."""
    import torch  # Most tests do without.

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
