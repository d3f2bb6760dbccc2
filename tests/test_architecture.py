"""Who may import whom, who may touch what is heavy or dangerous, and that nothing here executes what it reads."""

import ast
from pathlib import Path

import pytest

import apex

PACKAGE = Path(apex.__file__).parent

# A module imports from the floors above its line only; modules of one line never import one another.
FLOORS = [
    # 0 and 1: the standard library, NumPy and, where its owners are, torch.
    {"types", "config"},
    {
        "sum_tree",
        "n_step",
        "rate_limiter",
        "exploration",
        "networks",
        "losses",
        "optimizers",
        "sizing",
        "blocks",
        "allocator",
    },
    {"header", "leases", "send_window", "stacks", "terminal_layout", "cuda"},
    # 2: memory that processes share. No I/O beyond the mapped file.
    {"store_layout", "parameter_board"},
    {"store_admission", "store_reader", "segments", "priority_histogram"},
    {"store_writer"},
    # 3: what the outside world looks like.
    {"wire", "lifecycle", "checkpoint", "metrics", "presets", "run_folder", "run_status", "machine", "ports", "needs"},
    {"atari", "gymnasium_environment", "options", "terminal_picture", "leftovers"},
    {"environment", "terminal_view", "snapshot_folder"},
    {"snapshot", "snapshot_restore"},
    # 4: sockets and processes.
    {"transport", "processes"},
    # 5: the parts of roles, then the roles, which never import one another.
    {"session", "experience_link", "sampler", "coordinator", "games", "copyist"},
    {"loader", "update"},
    {"feed", "replay_server", "replay_memory"},
    {"trainer", "recording", "snapshot_timing"},
    {"actor", "replay", "learner", "evaluator"},
    # 6: what people start.
    {"supervisor", "evaluate", "status", "resume"},
    {"recorded_writer", "replay_timing"},
    {"replay_bed"},
    {"bench_report", "sizes_picture", "bench_programs"},
    {"bench_replay", "bench_actor"},
    {"bench_learner"},
    {"bench_system", "bench_connections"},
    {"bench"},
    {"checks"},
    {"fitting"},
    {"launch", "doctor"},
    # What proves it: a run of the product's own programs under faults.
    {"chaos_environment", "chaos_digests", "chaos_proxy", "chaos_processes"},
    {"chaos_ledger", "chaos_faults"},
    {"chaos_audit", "chaos_actor", "chaos_launcher"},
    {"chaos_run", "chaos_report"},
    {"chaos_recovery"},
    {"chaos_scenarios"},
    {"chaos"},
    {"command_line"},
    {"__main__"},
]
OWNERS = {
    "zmq": {"transport"},
    "gymnasium": {"environment", "gymnasium_environment", "chaos_environment"},
    "ale_py": {"environment", "atari"},
    "cv2": {"environment", "gymnasium_environment", "evaluate"},
    "tensorboardX": {"metrics"},
    "torch": {
        "networks",
        "losses",
        "optimizers",
        "checkpoint",
        "trainer",
        "update",
        "feed",
        "bench_actor",
        "bench_learner",
        "actor",
        "learner",
        "evaluator",
        "evaluate",
    },
    "safetensors": {"checkpoint"},
    "subprocess": {"launch", "supervisor", "run_folder", "replay_bed", "bench_report", "bench_programs", "chaos_run"},
    "tyro": {"options"},
    "rich": {"terminal_layout", "terminal_picture", "terminal_view", "doctor"},
    "matplotlib": {"sizes_picture"},
}
# What reads or writes objects as programs: whoever sends such bytes runs code here.
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING_NAMES = {"send_pyobj", "recv_pyobj", "allow_pickle", "pickle_module", "eval", "exec"}
EXECUTING_CALLS = {("torch", "load"), ("torch", "save")}

SOURCES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def imports(tree):
    """Every module that a source names in an import, at the top or not, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "apex":
            yield from (f"apex.{alias.name}" for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "relative"


def reachable(module):
    """All names that importing a module of ours leads to."""
    found, pending = set(), [module]
    while pending:
        for name in imports(SOURCES[pending.pop()]):
            if name not in found:
                found.add(name)
                if name.startswith("apex."):
                    pending.append(name.removeprefix("apex."))
    return found


def executing(tree):
    """What a source names that executes what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in EXECUTING_NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if (owner, node.attr) in EXECUTING_CALLS or node.attr in EXECUTING_NAMES - {
                "eval"
            }:  # module.eval() is torch's.
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in EXECUTING_NAMES:
            yield node.arg
    yield from (name for name in imports(tree) if name.partition(".")[0] in EXECUTING_MODULES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_imports_point_downward(module):
    floor = next((number for number, names in enumerate(FLOORS) if module in names), None)
    assert floor is not None, f"give apex/{module}.py a floor"
    below = set().union(*FLOORS[:floor])
    for name in imports(SOURCES[module]):
        package, _, submodule = name.partition(".")
        if package == "apex":
            assert submodule in below, f"{module} may not import {name}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_what_is_heavy_or_dangerous_has_owners(module):
    for name in imports(SOURCES[module]):
        assert module in OWNERS.get(name.partition(".")[0], {module}), f"{module} may not import {name}"


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_nothing_executes_what_it_reads(module):
    assert list(executing(SOURCES[module])) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, cloudpickle",
        "def f():\n    import marshal",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "socket.send_pyobj(segment)",
        "eval(text)",
    ],
)
def test_a_source_that_executes_what_it_reads_would_be_seen(source):
    assert len(list(executing(ast.parse(source)))) == 1


def test_the_replay_server_never_reaches_torch():
    assert "torch" not in {name.partition(".")[0] for name in reachable("replay")}
    assert "torch" in reachable("learner")  # So the search does find things.


def test_no_module_stands_on_two_floors():
    assert sum(map(len, FLOORS)) == len(set().union(*FLOORS))
