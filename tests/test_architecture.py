"""Who may import whom, who may touch what is heavy or dangerous, and that nothing here executes what it reads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import apex

PACKAGE = Path(apex.__file__).parent

# A module imports from the floors above its line only; modules of one line never import one another.
FLOORS = [
    # 0 and 1: the standard library, NumPy and, where its owners are, torch.
    {"types", "config", "native"},
    {"convolution", "factories"},
    {"pixel_convolution"},
    {
        "sum_tree",
        "n_step",
        "rate_limiter",
        "rates",
        "exploration",
        "networks",
        "losses",
        "optimizers",
        "sizing",
        "blocks",
        "allocator",
        "files",
        "checkpoint_place",
        "extras",
        "tensor_file",
        "arguments",
        "axis",
        "markup",
        "plain_parser",
    },
    {"header", "leases", "send_window", "stacks", "terminal_layout", "cuda", "sample_ring", "svg_chart"},
    {"gradient_step"},
    {"written_layers"},
    {"vector_body", "pixel_body"},
    {"written_update"},
    # 2: memory that processes share. No I/O beyond the mapped file.
    {"store_layout", "store_place", "parameter_board"},
    {"store_file"},
    {"store_admission", "store_reader", "segments", "priority_histogram", "fields"},
    {"store_writer"},
    {"bottleneck"},
    # 3: what the outside world looks like.
    {"watchdog", "charts"},
    {
        "curves",
        "wire",
        "peers",
        "lifecycle",
        "checkpoint",
        "metrics",
        "presets",
        "run_folder",
        "run_lock",
        "run_status",
        "machine",
        "ports",
        "needs",
    },
    {"key_folder", "patience", "disk_watch", "video", "caption", "window"},
    {"atari", "gymnasium_environment", "options", "terminal_picture", "leftovers"},
    {"environment", "terminal_view", "snapshot_folder", "checkpoint_folder", "policies"},
    {"snapshot", "snapshot_restore", "saves"},
    # 4: sockets and processes.
    {"authenticator", "processes"},
    {"sockets"},
    {"transport", "control_client", "async_receiver"},
    # 5: the parts of roles, then the roles, which never import one another.
    {"best_policy", "curve_rows", "scores", "run_history", "agent_environment"},
    {"publishing", "session", "experience_link", "sampler", "coordinator", "games", "copyist", "agent"},
    {"loader", "update", "actor_host"},
    {"feed", "bad_batches", "actor_worker", "replay_server", "replay_memory"},
    {"trainer", "recording", "snapshot_timing", "chaos_saver", "turns"},
    {"learner_loop", "chaos_saves"},
    {"actor", "replay", "learner", "evaluator"},
    # 6: what people start.
    {"newest_policy", "single_process", "nursery"},
    {"supervisor", "evaluation", "watch", "status", "resume", "keys", "learning_curves", "run_facts", "report_video"},
    {"curve_picture", "report_page"},
    {"plot", "report"},
    {"host_settings", "host_metadata", "host_logs"},
    {"host_role", "host_keys", "host_bucket", "host_end"},
    {"host"},
    {"cluster_aws", "cluster_prices"},
    {"cluster_inventory"},
    {"cluster_view", "cluster_tail", "cluster_resize", "cluster_things", "cluster_audit"},
    {"cluster_kill"},
    {"cluster"},
    {"resume_survey"},
    {"recorded_writer", "replay_timing", "chaos_strangers", "model_card"},
    {"replay_bed", "weights"},
    {"bench_report", "sizes_picture", "bench_programs", "bench_command", "chaos_hostile"},
    {"bench_replay", "bench_actor", "bench_learner", "bench_ledger", "bench_curve"},
    {"bench_system", "bench_connections"},
    {"bench"},
    {"checks"},
    {"fitting", "farewell", "run_watch"},
    {"hosts_file", "ssh_guard"},
    {"ssh_program"},
    {"ssh_check"},
    {"host_programs"},
    {"launch_hosts"},
    {"launch", "doctor"},
    {"training"},
    # What proves it: a run of the product's own programs under faults.
    {"chaos_environment", "chaos_digests", "chaos_proxy", "chaos_processes"},
    {"chaos_ledger", "chaos_faults"},
    {"chaos_audit", "chaos_actor", "chaos_launcher"},
    {"chaos_run", "chaos_report"},
    {"chaos_recovery"},
    {"chaos_growth"},
    {"chaos_scenarios"},
    {"chaos"},
    {"command_line"},
    {"__main__"},
]
OWNERS = {
    "zmq": {"authenticator", "sockets", "transport", "control_client", "async_receiver", "peers"},
    "gymnasium": {"environment", "gymnasium_environment", "chaos_environment", "agent_environment"},
    "ale_py": {"environment", "atari"},
    "cv2": {"environment", "gymnasium_environment", "video", "report_video"},
    "PIL": {"video", "caption"},
    "pygame": {"window"},
    "setproctitle": {"nursery"},
    "tensorboardX": {"metrics"},
    "torch": {
        "pixel_convolution",
        "networks",
        "losses",
        "optimizers",
        "chaos_saver",
        "chaos_saves",
        "checkpoint",
        "policies",
        "agent",
        "weights",
        "saves",
        "tensor_file",
        "trainer",
        "gradient_step",
        "written_layers",
        "vector_body",
        "pixel_body",
        "written_update",
        "update",
        "feed",
        "bench_actor",
        "bench_learner",
        "actor_worker",
        "learner",
        "evaluator",
        "evaluation",
        "newest_policy",
        "watch",
        "single_process",
    },
    "safetensors": {"checkpoint", "tensor_file", "bad_batches"},
    "subprocess": {
        "launch",
        "supervisor",
        "nursery",
        "run_folder",
        "replay_bed",
        "bench_report",
        "bench_programs",
        "chaos_run",
        "report_video",
        "host",
        "ssh_program",
        "ssh_check",
    },
    "boto3": {"cluster_aws", "host"},
    "botocore": {"cluster_aws", "host"},
    "tyro": {"options"},
    "rich": {"terminal_layout", "terminal_picture", "terminal_view", "doctor"},
    "matplotlib": {"sizes_picture", "curve_picture"},
}
# What reads or writes objects as programs: whoever sends such bytes runs code here.
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING_NAMES = {"send_pyobj", "recv_pyobj", "allow_pickle", "pickle_module", "eval", "exec"}
EXECUTING_CALLS = {("torch", "load"), ("torch", "save")}

WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "clock_gettime"}  # Python's names
TIMESTAMPS = {  # Who may write down when something was, for people to read.
    "cluster": {"datetime.now"},
    "metrics": {"time.time", "time.time_ns"},
    "curve_rows": {"time.time"},
    "actor_worker": {"time.time"},
    "run_folder": {"datetime.now", "time.time"},
    "chaos": {"datetime.now"},
}

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


@pytest.mark.parametrize("module", ["launch", "doctor", "status"])
def test_what_people_start_does_not_wait_for_torch(module):
    program = f"import sys, apex.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


def wall_clocks(tree):
    """Where a source looks at the wall clock, which people and time servers move."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("time", "datetime", "date"):  # Not message.time, nor asyncio's loop.time().
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if alias.name in WALL_CLOCKS)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_the_wall_clock_is_for_timestamps_only_and_no_interval_is_measured_by_it(module):
    assert set(wall_clocks(SOURCES[module])) <= TIMESTAMPS.get(module, set())


@pytest.mark.parametrize(
    "source",
    ["time.time() - began", "from time import time", "datetime.now()", "time.time_ns()", "datetime.datetime.utcnow()"],
)
def test_a_source_that_looks_at_the_wall_clock_would_be_seen(source):
    assert len(list(wall_clocks(ast.parse(source)))) == 1


def test_no_module_stands_on_two_floors():
    assert sum(map(len, FLOORS)) == len(set().union(*FLOORS))
