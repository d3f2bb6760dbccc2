"""Rules that import-linter cannot check: no code executes data, wall clocks measure no interval, the wheel is complete.

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
from apexreplay import errors as library_errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("apex", "apexreplay")

# Modules and names that execute the data they read: a sender of such data could run code here.
EXECUTING_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING_NAMES = {"send_pyobj", "recv_pyobj", "allow_pickle", "pickle_module", "eval", "exec"}
EXECUTING_CALLS = {("torch", "load"), ("torch", "save")}

WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "clock_gettime"}  # Python's names
TIMESTAMPS = {  # Modules that may record the time of an event, or derive a number from the time.
    "apex.launch.trackers.tracker": {"time.time"},  # compared with the times of rows and files
    "apex.launch.mirroring": {"datetime.now"},
    "apex.cloud.cluster.command": {"datetime.now"},
    "apex.runs.metrics.writer": {"time.time", "time.time_ns"},
    "apex.learning.coordinator.metric_rows": {"time.time"},
    "apex.acting.worker": {"time.time"},
    "apex.launch.serial.run": {"time.time"},
    "apex.runs.folder": {"datetime.now", "time.time"},
    "apex.runs.new_folder": {"datetime.now"},
    "apexreplay.server.standalone": {"time.time"},
    "apex.sentences": {"time.localtime"},  # formats the time of a log entry
}

SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}


def imports(tree):
    """Yields the dotted name of every module that a source imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "relative"


def executing(tree):
    """Yields the names in a source that execute the data they read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in EXECUTING_NAMES:
            yield node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            # `module.eval()` is a method of torch.
            if (owner, node.attr) in EXECUTING_CALLS or node.attr in EXECUTING_NAMES - {"eval"}:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in EXECUTING_NAMES:
            yield node.arg
    yield from (name for name in imports(tree) if name.partition(".")[0] in EXECUTING_MODULES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_modules_do_not_execute_data(module):
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
def test_executing_sources_are_found(source):
    assert len(list(executing(ast.parse(source)))) == 1


@pytest.mark.parametrize("module", ["apex.launch.train", "apex.launch.preflight.doctor", "apex.launch.status"])
def test_commands_do_not_import_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


IMPORTERS = {  # modules that may import by a name that is computed, and what they import
    "apex.__init__",  # the Python API
    "apex.cli",  # commands
    "apexreplay.__init__",  # its public names
    "apex.algorithms.interface",  # built-in algorithms
    "apex.environments.mujoco",  # MuJoCo and dm_control
    "apex.evaluation.export.command",  # onnx
    "apex.evaluation.export.hub",  # huggingface_hub
    "apex.evaluation.saved_episodes",  # Minari
    "apex.evaluation.video",  # pygame
    "apex.launch.terminal.view",  # IPython
    "apex.runtime.importer",  # the user's modules, if the user trusts them
}


def imports_by_name(tree):
    """Yields the calls in a source that import a module whose name is a value, and imports of such functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("importlib.import_module", "gymnasium.make"):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "importlib":
            yield from (alias.name for alias in node.names if alias.name == "import_module")
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield node.id


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_only_listed_modules_import_by_a_computed_name(module):
    allowed = {"importlib.import_module", "import_module"} if module in IMPORTERS else set()
    if module == "apex.environments.factory":
        allowed = {"gymnasium.make"}  # after `require_trusted`
    assert set(imports_by_name(SOURCES[module])) <= allowed


def wall_clocks(tree):
    """Yields the reads of the wall clock in a source. Users and time servers can change that clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
            owner = ast.unparse(node.value)
            if owner.split(".")[-1] in ("time", "datetime", "date"):  # Not message.time, nor asyncio's loop.time().
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if alias.name in WALL_CLOCKS)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_only_listed_modules_read_the_wall_clock(module):
    assert set(wall_clocks(SOURCES[module])) <= TIMESTAMPS.get(module, set())


@pytest.mark.parametrize(
    "source",
    ["time.time() - began", "from time import time", "datetime.now()", "time.time_ns()", "datetime.datetime.utcnow()"],
)
def test_reads_of_the_wall_clock_are_found(source):
    assert len(list(wall_clocks(ast.parse(source)))) == 1


def test_package_data_lists_every_data_file():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    names = {f"{package.replace('.', '/')}/{name}" for package, names in listed.items() for name in names}
    files = {path for path in (ROOT / "apex").rglob("*") if path.is_file()}
    data = {str(path.relative_to(ROOT)) for path in files if path.suffix not in (".py", ".pyc", ".c", ".so")}
    assert data == names


def test_reported_errors_are_defined_in_errors_py():
    bases = {name for name in (*vars(errors), *vars(library_errors)) if name.endswith("Error")} | {"EnvironmentFailure"}
    elsewhere = [
        f"{module}.{node.name}"
        for module, tree in SOURCES.items()
        if module not in ("apex.errors", "apexreplay.errors")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and bases & {ast.unparse(base).split(".")[-1] for base in node.bases}
    ]
    assert elsewhere == []


def test_the_docstring_draws_the_tree_of_errors():
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+)", errors.__doc__, re.M)

    def descend(error, depth=0):
        yield depth, error.__name__
        for child in error.__subclasses__():
            yield from descend(child, depth + 1)

    is_here = {name for name, value in (vars(errors) | vars(library_errors)).items() if isinstance(value, type)}
    assert sorted((len(lines) // 4, name) for lines, name in drawn) == sorted(
        (depth, name) for depth, name in descend(errors.ApexError) if name in is_here
    )
