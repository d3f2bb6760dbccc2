"""What import-linter cannot see: nothing executes what it reads, no wall clock measures an interval, the wheel is full.

The layers and the owners of heavy libraries are contracts in pyproject.toml, which `lint-imports` checks.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from apex import errors

ROOT = Path(__file__).parents[2]

# What reads or writes objects as programs: whoever sends such bytes runs code here.
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING_NAMES = {"send_pyobj", "recv_pyobj", "allow_pickle", "pickle_module", "eval", "exec"}
EXECUTING_CALLS = {("torch", "load"), ("torch", "save")}

WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "clock_gettime"}  # Python's names
TIMESTAMPS = {  # Modules that may record when something happened, or number lives that are lost count of.
    "apex.cloud.host.bucket": {"time.time", "time.time_ns"},
    "apex.cloud.cluster.command": {"datetime.now"},
    "apex.runs.metrics.writer": {"time.time", "time.time_ns"},
    "apex.learning.coordinator.metric_rows": {"time.time"},
    "apex.acting.worker": {"time.time"},
    "apex.launch.serial.run": {"time.time"},
    "apex.runs.folder": {"datetime.now", "time.time"},
}

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in (ROOT / "apex").rglob("*.py")
}


def imports(tree):
    """Every module that a source names in an import, at the top or not, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "relative"


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


@pytest.mark.parametrize("module", ["apex.launch.local", "apex.launch.preflight.doctor", "apex.launch.status"])
def test_what_people_start_does_not_wait_for_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


@pytest.mark.parametrize("role", ["actor", "replay", "learner", "evaluator"])
def test_a_role_does_not_wait_for_the_parser_of_all_settings(role):
    program = f"import sys, apex.{role}, apex.config.command_line; sys.exit('tyro' in sys.modules)"
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


def test_every_file_that_is_no_code_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    names = {f"{package.replace('.', '/')}/{name}" for package, names in listed.items() for name in names}
    files = {path for path in (ROOT / "apex").rglob("*") if path.is_file()}
    data = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".py", ".pyc", ".c", ".so")}
    assert data == names


def test_every_error_that_programs_report_stands_in_the_one_tree():
    bases = {name for name in vars(errors) if name.endswith("Error")} | {"EnvironmentFailure"}
    elsewhere = [
        f"{module}.{node.name}"
        for module, tree in SOURCES.items()
        if module != "apex.errors"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and bases & {ast.unparse(base).split(".")[-1] for base in node.bases}
    ]
    assert elsewhere == []


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__, re.M)

    def family(error, depth=0):
        yield depth, error.__name__
        for child in error.__subclasses__():
            yield from family(child, depth + 1)

    is_here = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert sorted((len(lines) // 4, name) for lines, name in drawn) == sorted(
        (depth, name) for depth, name in family(errors.ApexError) if name in is_here
    )
