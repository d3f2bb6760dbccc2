"""`python -m bench compare`: sides, order, ratios, repetition, refusals, and what it leaves behind.

The repositories are stand-ins: their benches print the rates of their commit, and record how they were run.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import until

from apexreplay.errors import FAILED, FINISHED, REFUSED
from apexreplay.process.lifecycle import KILLED_BY_CTRL_C
from bench import __main__ as bench
from bench.compare import BENCHES, PairedRates
from bench.harness import serial_updates

PACKAGE = "NAME, RATES = {name!r}, {rates!r}\n"
BENCH = """
import json, os, sys
import apex
record = open(os.environ["RECORD"], "a+")
record.seek(0)
run = {"name": apex.NAME, "arguments": sys.argv[1:], "cwd": os.getcwd(), "apex": apex.__file__}
before = [line for line in map(json.loads, record) if line["name"] == run["name"]]
print(json.dumps(run), file=record, flush=True)
rate = apex.RATES[len(before) % len(apex.RATES)]
keys = ["sample_batches_per_s", "insert_transitions_per_s", "bytes_per_transition", "actor_steps_per_s"]
print("a table")
print(json.dumps(dict.fromkeys([*keys, "learner_updates_per_s"], rate)))
"""
FAIL = "import sys\nprint('first', 'second', 'third', 'fourth', sep='\\n', file=sys.stderr)\nsys.exit(3)\n"
# Leaves a program in a session of its own and a replay memory behind, like a bench that is killed.
HANG = """
import json, os, subprocess, sys, tempfile, time
from pathlib import Path
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
run_id = int.from_bytes(os.urandom(8), "big")
run = Path(tempfile.mkdtemp()) / "run"
run.mkdir()
(run / "manifest.json").write_text(json.dumps({"run_id": run_id}))
store = Path(f"/dev/shm/apex-{run_id:016x}-0.replay")
store.touch()
left_behind = {"pids": [os.getpid(), left.pid], "paths": [str(store), str(run), os.getcwd()]}
with open(os.environ["RECORD"], "a") as record:
    print(json.dumps(left_behind), file=record)
time.sleep(600)
"""
# Replaces the compiler: makes _fast.*.so of fast.c, as setup.py does.
SETUP = "from pathlib import Path\nPath('apex/_fast.cpython.so').write_bytes(bytes(4096))\n"
MAP = """
import mmap, pathlib, time
file = open(pathlib.Path(apex.__file__).with_name("_fast.cpython.so"))
fast = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
time.sleep(6)
"""


class Repository:
    """A git repository of stand-ins, with the record of their runs."""

    def __init__(self, place):
        self.root = place / "repository"
        self.root.mkdir()
        self._record = place / "record"
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *arguments):
        """Returns the output of git."""
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *arguments], cwd=self.root, text=True)

    def write(self, name, text):
        """Writes a file of the working tree."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, name, *rates, bench=BENCH, **files):
        """Commits a tree whose benches print these rates, one after the other; returns its hash."""
        self.git("rm", "-rq", "--ignore-unmatch", ".")
        self.write("apex/__init__.py", PACKAGE.format(name=name, rates=rates))
        self.write("bench/__main__.py", bench)
        for path, text in files.items():
            self.write(path, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", name)
        return self.git("rev-parse", "HEAD").strip()

    @property
    def runs(self):
        """The record."""
        return [json.loads(line) for line in self._record.read_text().splitlines()] if self._record.exists() else []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.chdir(made.root)
    return made


def compare(*arguments, repeat=0):
    return bench.main(["compare", "--repeat", str(repeat), *arguments])


def read_figures(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def read_error(capsys):
    """Returns the last line of standard error, without the log that it names."""
    error, _, log = capsys.readouterr().err.splitlines()[-1].partition("; log: ")
    if log:
        Path(log).unlink()
    return error


def test_sides_alternate_and_both_sides_of_a_bench_run_in_succession(repository):
    old, _ = repository.commit("old", 1.0), repository.commit("new", 1.0)
    before = repository.git("status", "--porcelain"), sorted(repository.root.rglob("*"))
    assert compare(old, "--pairs", "3", "--only", "actor,replay", "--seconds", "3") == FINISHED
    runs = repository.runs
    assert [(run["name"], run["arguments"][0]) for run in runs] == [
        *[("new", "actor"), ("old", "actor"), ("new", "replay"), ("old", "replay")],
        *[("old", "actor"), ("new", "actor"), ("old", "replay"), ("new", "replay")],
        *[("new", "actor"), ("old", "actor"), ("new", "replay"), ("old", "replay")],
    ]
    assert runs[2]["arguments"] == [*BENCHES["replay"].command.split(), "--seconds", "3", "--json"]
    # Each side has imported its own checkout, which is removed at the end.
    assert {run["apex"] == f"{run['cwd']}/apex/__init__.py" for run in runs} == {True}
    assert len({run["cwd"] for run in runs} | {str(repository.root)}) == 3
    assert not any(Path(run["cwd"]).parent.exists() for run in runs)
    assert (repository.git("status", "--porcelain"), sorted(repository.root.rglob("*"))) == before
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_the_result_is_the_median_of_the_ratios_of_the_pairs(repository, capsys):
    old, new = repository.commit("old", 10.0, 10.0, 40.0), repository.commit("new", 10.0, 30.0, 20.0)
    assert compare(old, "--pairs", "3", "--only", "actor", "--json") == FINISHED
    metric = {"a": 20.0, "b": 10.0, "ratio": 1.0, "ratio_min": 0.5, "ratio_max": 3.0}
    metric |= {"a_rates": [10.0, 30.0, 20.0], "b_rates": [10.0, 10.0, 40.0]}
    versions = {"a": f"working tree on {new}", "b": old}
    assert read_figures(capsys) == {**versions, "pairs": 3, "metrics": {"actor_steps_per_s": metric}}


def test_a_metric_below_the_bar_is_measured_again_and_that_result_counts(repository, capsys):
    old, _ = repository.commit("old", 10.0), repository.commit("new", 5.0, 10.0, 10.0, 20.0)
    status = compare(old, "--pairs", "1", "--only", "actor,replay", "--at-least", "1", "--json", repeat=3)
    metrics = read_figures(capsys)["metrics"]
    # The new commit's first run is that of the actor, whose three further runs are 10, 20 and 5.
    assert status == FINISHED
    assert [run["arguments"][0] for run in repository.runs] == ["actor"] * 2 + ["replay"] * 2 + ["actor"] * 6
    repeated = metrics.pop("actor_steps_per_s")
    assert (repeated["ratio"], repeated["first_ratio"], len(repeated["a_rates"])) == (1.0, 0.5, 3)
    assert {each["ratio"] for each in metrics.values()} == {1.0}


def test_the_ratio_of_bytes_is_inverted_because_fewer_are_better():
    rates = PairedRates([10.0, 20.0, 40.0], [20.0, 20.0, 20.0], less_is_better=True).summarize()
    assert (rates["ratio"], rates["ratio_min"], rates["ratio_max"]) == (1.0, 0.5, 2.0)


def test_every_metric_has_a_line_and_a_bench(repository, capsys):
    old, _ = repository.commit("old", 4.0), repository.commit("new", 3.0)
    names = [name for name, bench in BENCHES.items() if not bench.serial_updates]
    assert compare(old, "--pairs", "1", "--only", ",".join(names)) == FINISHED
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "_per_" in line]
    metrics = [metric for name in names for metric in BENCHES[name].metrics]
    assert [line[:3] for line in lines] == [[metric, "3.00", "4.00"] for metric in metrics]
    assert {line[0]: line[3] for line in lines if line[3] != "0.750"} == {"bytes_per_transition": "1.333"}
    arguments = [" ".join(run["arguments"]) for run in repository.runs if run["name"] == "new"]
    expected = [f"{BENCHES[name].command} --seconds 10 --json" for name in names]
    assert arguments == expected


def test_a_bench_whose_package_is_missing_is_skipped(repository, capsys, monkeypatch):
    repository.commit("new", 1.0)
    monkeypatch.setitem(BENCHES, "cartpole", BENCHES["cartpole"]._replace(needs=("no_such_module", "some[extra]")))
    assert compare("HEAD", "--pairs", "1", "--only", "cartpole,actor") == FINISHED
    assert "skipped cartpole: some[extra]" in capsys.readouterr().err
    assert {run["arguments"][0] for run in repository.runs} == {"actor"}


def test_updates_of_a_run_in_one_process_are_counted(capfd):
    serial_updates.main(20, ["--preset", "control"])
    assert read_figures(capfd)["serial_updates_per_s"] > 0


def test_side_a_is_the_working_tree_or_another_commit(repository, capsys):
    old = repository.commit("old", 1.0, **{".gitignore": "ignored.py\n", "apex/deleted.py": ""})
    repository.write("apex/__init__.py", "from apex.untracked import NAME, RATES\n")
    repository.write("apex/untracked.py", PACKAGE.format(name="changed", rates=[2.0]))
    repository.write("ignored.py", "")
    (repository.root / "apex/deleted.py").unlink()
    check = "import os\nassert not {'ignored.py', 'deleted.py'} & {*os.listdir(), *os.listdir('apex')}\n"
    repository.write("bench/__main__.py", check + BENCH)
    assert compare("HEAD", "--pairs", "1", "--only", "actor", "--json") == FINISHED
    assert read_figures(capsys)["metrics"]["actor_steps_per_s"]["ratio"] == 2
    assert compare("HEAD", "--with", "main", "--pairs", "1", "--only", "actor", "--json") == FINISHED
    assert read_figures(capsys)["a"] == old
    assert [run["name"] for run in repository.runs] == ["changed", "old", "old", "old"]


@pytest.mark.parametrize(("least", "status"), [("0.75", FINISHED), ("0.76", FAILED)])
def test_a_median_ratio_below_the_limit_is_a_failure(repository, capsys, least, status):
    old, _ = repository.commit("old", 4.0), repository.commit("new", 3.0)
    assert compare(old, "--pairs", "1", "--only", "pong", "--at-least", least) == status
    assert ("pong_updates_per_s (0.750)" in read_error(capsys)) == (status == FAILED)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["HEAD", "--with", "nowhere"], ["'nowhere'"]),
        (["HEAD", "--only", "replay,repaly"], ["--only", "'repaly'"]),
        (["HEAD", "--pairs", "0"], ["--pairs", "0"]),
        (["HEAD", "--at-least", "nan"], ["--at-least", "nan"]),
    ],
)
def test_a_mistake_is_refused_with_its_name_and_value(repository, capsys, arguments, parts):
    repository.commit("new", 1.0)
    assert compare(*arguments) == REFUSED
    error = read_error(capsys)
    assert all(part in error for part in parts)


def test_a_module_from_outside_the_checkout_is_refused(repository, capsys):
    repository.commit("new", 1.0)
    repository.write("apex/__init__.py", "__file__ = '/elsewhere/apex/__init__.py'")
    assert compare("HEAD") == REFUSED
    assert "A imports /elsewhere/apex/__init__.py" in read_error(capsys)


@pytest.mark.parametrize("missing", ["apex", "bench"])
def test_a_side_without_the_product_or_without_benches_is_refused(repository, capsys, missing):
    """The editable installation of these tests has both, but they must not be used."""
    repository.commit("new", 1.0)
    repository.git("mv", missing, "renamed")
    assert compare("HEAD") == REFUSED
    assert "A has no apex or no benches" in read_error(capsys)


def test_packages_elsewhere_on_the_path_are_not_imported(repository, monkeypatch):
    """A folder without __init__.py in the checkout would lose against a package with one further down the path."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    repository.commit("new", 1.0)
    assert compare("HEAD", "--pairs", "1", "--only", "actor") == FINISHED
    assert len(repository.runs) == 2


@pytest.mark.parametrize(
    ("script", "last"),
    [
        (FAIL, "status 3; last lines: second | third | fourth"),
        ("print('no figures')", "status 0; last lines: no figures"),
        (BENCH.replace("rate))", "0))"), "status 0; last lines: a table | "),
    ],
    ids=["status", "text", "zero"],
)
def test_a_bench_that_fails_is_named_with_its_last_lines_and_log(repository, capsys, script, last):
    old, _ = repository.commit("old", 1.0, bench=script), repository.commit("new", 1.0)
    assert compare(old, "--only", "actor") == FAILED
    error, _, log = capsys.readouterr().err.splitlines()[-1].partition("; log: ")
    assert f"actor on B ({old})" in error
    assert last in error
    assert Path(log).read_text().splitlines()[-1] in error
    Path(log).unlink()
    assert not Path(repository.runs[0]["cwd"]).parent.exists()


def test_a_source_that_is_not_compiled_is_refused(repository, capsys):
    repository.commit("new", 1.0, **{"apex/kernels/fast.c": "", "setup.py": "print('no compiler')"})
    assert compare("HEAD") == REFUSED
    assert "apex/kernels/fast.c" in read_error(capsys)


def test_an_extension_that_only_one_side_loads_is_a_warning(repository, capsys):
    files = {"apex/fast.c": "", "setup.py": SETUP}
    old = repository.commit("old", 1.0, **files)
    repository.commit("new", 1.0, bench=BENCH + MAP, **files)
    assert compare(old, "--pairs", "1", "--only", "actor") == FINISHED
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert warning.endswith("A: _fast; B: none")


def test_ctrl_c_ends_a_comparison_and_leaves_nothing_behind(repository):
    repository.commit("new", 1.0, bench=HANG)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-P", "-m", "bench", "compare", "HEAD"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: repository.runs or process.poll() is not None, "bench", seconds=60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == KILLED_BY_CTRL_C, errors
    (left,) = repository.runs
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left["pids"]), "end of all processes", seconds=30)
    assert [path for path in left["paths"] if Path(path).exists()] == []
