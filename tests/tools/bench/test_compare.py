"""`python -m bench compare`: which code it measures, in which order, its ratios, its errors, and what it leaves behind.

The repositories are stand-ins: their benches print the rates of their commit, and note on a tape how they were run.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import until

from apex.errors import FAILED, FINISHED, REFUSED
from apex.runtime.lifecycle import KILLED_BY_CTRL_C
from bench import __main__ as bench
from bench.compare import BENCHES, METRICS

PACKAGE = "NAME, RATES = {name!r}, {rates!r}\n"
BENCH = """
import json, os, sys
import apex
tape = open(os.environ["TAPE"], "a+")
tape.seek(0)
run = {"name": apex.NAME, "words": sys.argv[1:], "layout": __package__, "cwd": os.getcwd(), "apex": apex.__file__}
before = [line for line in map(json.loads, tape) if (line["name"], line["words"]) == (run["name"], run["words"])]
print(json.dumps(run), file=tape, flush=True)
rate = apex.RATES[len(before) % len(apex.RATES)]
keys = ["sample_batches_per_s", "insert_transitions_per_s", "actor_steps_per_s", "learner_updates_per_s"]
print("a table")
print(json.dumps({key: rate for key in keys}))
"""
FAIL = "import sys\nprint('first', 'second', 'third', 'fourth', sep='\\n', file=sys.stderr)\nsys.exit(3)\n"
# Leaves a program in a session of its own and replay memory behind, as a bench does that is killed.
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
facts = {"pids": [os.getpid(), left.pid], "paths": [str(store), str(run), os.getcwd()]}
with open(os.environ["TAPE"], "a") as tape:
    print(json.dumps(facts), file=tape)
time.sleep(600)
"""
# Stands for the compiler: as setup.py does, it makes _fast.*.so of fast.c.
SETUP = "from pathlib import Path\nPath('apex/_fast.cpython.so').write_bytes(bytes(4096))\n"
MAP = """
import mmap, pathlib, time
file = open(pathlib.Path(apex.__file__).with_name("_fast.cpython.so"))
fast = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
time.sleep(2.5)
"""


class Repository:
    """A git repository of stand-ins, with the tape of their runs."""

    def __init__(self, place):
        self.root = place / "repository"
        self.root.mkdir()
        self._tape = place / "tape"
        self.git("init", "--quiet", "--initial-branch", "main")

    def git(self, *words):
        """What git says."""
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *words], cwd=self.root, text=True)

    def write(self, name, text):
        """Writes a file of the working tree."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, name, *rates, layout="bench/__main__.py", bench=BENCH, **files):
        """Commits a tree whose benches print these rates, one after the other; returns its hash."""
        self.git("rm", "-rq", "--ignore-unmatch", ".")
        self.write("apex/__init__.py", PACKAGE.format(name=name, rates=rates))
        self.write(layout, bench)
        for path, text in files.items():
            self.write(path, text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", name)
        return self.git("rev-parse", "HEAD").strip()

    @property
    def runs(self):
        """The tape."""
        return [json.loads(line) for line in self._tape.read_text().splitlines()] if self._tape.exists() else []


@pytest.fixture
def repository(tmp_path, monkeypatch):
    made = Repository(tmp_path)
    monkeypatch.setenv("TAPE", str(tmp_path / "tape"))
    monkeypatch.chdir(made.root)
    return made


def compare(*arguments):
    return bench.main(["compare", *arguments])


def read_figures(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_order_of_the_sides_alternates_and_both_sides_of_a_bench_run_one_after_the_other(repository):
    old, _ = repository.commit("old", 1.0), repository.commit("new", 1.0)
    assert compare(old, "--pairs", "3", "--only", "actor,replay", "--seconds", "3") == FINISHED
    assert [(run["name"], run["words"][0]) for run in repository.runs] == [
        *[("new", "actor"), ("old", "actor"), ("new", "replay"), ("old", "replay")],
        *[("old", "actor"), ("new", "actor"), ("old", "replay"), ("new", "replay")],
        *[("new", "actor"), ("old", "actor"), ("new", "replay"), ("old", "replay")],
    ]
    assert repository.runs[0]["words"] == [*BENCHES["actor"].split(), "--seconds", "3", "--json"]


def test_the_result_is_the_median_of_the_ratios_of_the_pairs_and_not_the_ratio_of_the_medians(repository, capsys):
    old, new = repository.commit("old", 10.0, 10.0, 40.0), repository.commit("new", 10.0, 30.0, 20.0)
    assert compare(old, "--pairs", "3", "--only", "actor", "--json") == FINISHED
    assert read_figures(capsys) == {
        "a": f"working tree on {new}",
        "b": old,
        "pairs": 3,
        "metrics": {
            "actor_steps_per_s": {
                "a": 20.0,
                "b": 10.0,
                "ratio": 1.0,
                "ratio_min": 0.5,
                "ratio_max": 3.0,
                "a_rates": [10.0, 30.0, 20.0],
                "b_rates": [10.0, 10.0, 40.0],
            }
        },
    }


def test_every_metric_has_its_line_and_its_bench(repository, capsys):
    old, _ = repository.commit("old", 4.0), repository.commit("new", 3.0)
    assert compare(old, "--pairs", "1") == FINISHED
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "_per_s" in line]
    assert lines == [[metric, "3.00", "4.00", *["0.750"] * 3] for metric in METRICS]
    words = [run["words"] for run in repository.runs if run["name"] == "new"]
    assert [each[: len(command.split())] for each, command in zip(words, BENCHES.values(), strict=True)] == [
        command.split() for command in BENCHES.values()
    ]


def test_a_commit_from_before_the_benches_moved_runs_them_by_apex(repository):
    script = "import sys\nassert sys.argv.pop(1) == 'bench'\n" + BENCH
    old = repository.commit("old", 1.0, layout="apex/__main__.py", bench=script, **{"bench/records.py": ""})
    repository.commit("new", 1.0)
    assert compare(old, "--pairs", "1", "--only", "actor") == FINISHED
    new_run, old_run = repository.runs
    assert (new_run["layout"], old_run["layout"]) == ("bench", "apex")
    assert new_run["words"] == old_run["words"]


def test_each_side_imports_its_own_checkout_which_is_gone_at_the_end(repository):
    old, _ = repository.commit("old", 1.0), repository.commit("new", 1.0)
    before = repository.git("status", "--porcelain"), sorted(repository.root.rglob("*"))
    assert compare(old, "--pairs", "1", "--only", "actor") == FINISHED
    for run in repository.runs:
        assert run["apex"] == f"{run['cwd']}/apex/__init__.py"
        assert not Path(run["cwd"]).parent.exists()
    assert len({run["cwd"] for run in repository.runs} | {str(repository.root)}) == 3
    assert (repository.git("status", "--porcelain"), sorted(repository.root.rglob("*"))) == before
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_the_working_tree_is_measured_as_it_is_and_another_commit_on_request(repository, capsys):
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
def test_a_median_ratio_below_the_limit_is_a_failure_with_the_name_of_the_metric(repository, capsys, least, status):
    old, _ = repository.commit("old", 4.0), repository.commit("new", 3.0)
    assert compare(old, "--pairs", "1", "--only", "pong", "--at-least", least) == status
    assert ("below 0.76: pong_updates_per_s (0.750)\n" in capsys.readouterr().err) == (status == FAILED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "unknown commit 'nowhere'"),
        (["HEAD", "--with", "nowhere"], "unknown commit 'nowhere'"),
        (["HEAD", "--only", "replay,repaly"], "--only: unknown bench 'repaly'; known: replay, actor, learner, pong"),
        (["HEAD", "--pairs", "0"], "--pairs: must be an integer of at least 1, got 0"),
        (["HEAD", "--seconds", "nan"], "--seconds: must be a number above 0, got nan"),
        (["HEAD", "--at-least", "nan"], "--at-least: must be a number of at least 0, got nan"),
    ],
)
def test_a_mistake_is_a_sentence_and_status_2(repository, capsys, arguments, words):
    repository.commit("new", 1.0)
    assert compare(*arguments) == REFUSED
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("python -m bench: ")
    assert words in said


def test_a_folder_without_git_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert compare("HEAD") == REFUSED
    assert capsys.readouterr().err == f"python -m bench: {tmp_path} is not in a git checkout\n"


def test_code_from_elsewhere_is_refused(repository, capsys):
    repository.commit("new", 1.0)
    repository.write("apex/__init__.py", "__file__ = '/elsewhere/apex/__init__.py'")
    assert compare("HEAD") == REFUSED
    words = "A imports /elsewhere/apex/__init__.py, which is not in its own checkout"
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("python -m bench: ")
    assert words in said


@pytest.mark.parametrize("missing", ["apex", "bench"])
def test_a_side_without_the_product_or_without_benches_is_refused(repository, capsys, missing):
    """The editable installation of these tests would offer its own."""
    repository.commit("new", 1.0)
    repository.git("mv", missing, "renamed")
    assert compare("HEAD") == REFUSED
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("python -m bench: A has no apex or no benches: status 1; last lines: ")
    Path(error.partition("; log: ")[2]).unlink()


def test_a_module_that_a_side_lacks_does_not_come_from_an_editable_installation(repository, capsys):
    repository.commit("new", 1.0, bench="import apex.errors")
    assert compare("HEAD") == FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert "ModuleNotFoundError: No module named 'apex.errors'" in error
    Path(error.partition("; log: ")[2]).unlink()


def test_packages_elsewhere_on_the_path_are_not_imported(repository, monkeypatch):
    """A folder without __init__.py in the checkout would lose against a package with one further down the path."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    repository.commit("new", 1.0)
    assert compare("HEAD", "--pairs", "1", "--only", "actor") == FINISHED
    assert len(repository.runs) == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (FAIL, "measured nothing: status 3; last lines: second | third | fourth; log: "),
        ("print('no figures')", "measured nothing: status 0; last lines: no figures; log: "),
        ("print('{}')", "measured nothing: status 0; last lines: {}; log: "),
        (BENCH.replace("key: rate", "key: 0"), "measured nothing: status 0; last lines: a table | "),
    ],
    ids=["status", "text", "key", "zero"],
)
def test_a_bench_that_fails_is_named_with_its_last_lines_and_its_log(repository, capsys, script, words):
    old, _ = repository.commit("old", 1.0, bench=script), repository.commit("new", 1.0)
    assert compare(old, "--only", "actor") == FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"actor on B ({old}) {words}" in error
    log = Path(error.partition("; log: ")[2])
    assert log.read_text().splitlines()[-1] in error
    log.unlink()
    assert not Path(repository.runs[0]["cwd"]).parent.exists()


def test_a_source_that_is_not_compiled_is_refused(repository, capsys):
    repository.commit("new", 1.0, **{"apex/kernels/fast.c": "", "setup.py": "print('no compiler')"})
    assert compare("HEAD") == REFUSED
    error = capsys.readouterr().err.splitlines()[-1]
    assert "A: cannot compile apex/kernels/fast.c: status 0; last lines: no compiler; log: " in error
    Path(error.partition("; log: ")[2]).unlink()


def test_an_extension_that_only_one_side_loads_is_a_warning(repository, capsys):
    files = {"apex/fast.c": "", "setup.py": SETUP}
    old = repository.commit("old", 1.0, **files)
    repository.commit("new", 1.0, bench=BENCH + MAP, **files)
    assert compare(old, "--pairs", "1", "--only", "actor") == FINISHED
    warning = "warning: the ratio compares compiled code with slower code: "
    assert f"{warning}compiled extensions that actor loaded: A: _fast; B: none\n" in capsys.readouterr().err


def test_one_ctrl_c_ends_it_and_leaves_nothing_behind(repository):
    repository.commit("new", 1.0, bench=HANG)
    root = Path(__file__).parents[3]
    command = [sys.executable, "-P", "-m", "bench", "compare", "HEAD"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: repository.runs or process.poll() is not None, "bench", seconds=60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == KILLED_BY_CTRL_C, said
    (left,) = repository.runs
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left["pids"]), "end of all processes", seconds=30)
    assert [path for path in left["paths"] if Path(path).exists()] == []
