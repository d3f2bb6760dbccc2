"""What all trackers do. The store of this file is a list; tests/system/test_trackers.py has the real ones."""

import json
import sys
from importlib.machinery import ModuleSpec

import pytest
from support.messages import make_run_status

from apex import UsageError
from apex.command_line import ConfigError
from apex.config import Config
from apex.facts import EndReason
from apex.launch.callbacks import LiveRun
from apex.launch.trackers import tracker
from apex.launch.trackers.choice import TRACKERS, make_trackers
from apex.launch.trackers.tracker import MOST_FAILURES, Row, Tracker
from apex.launch.train import main, read_start
from apexreplay.errors import REFUSED
from apexreplay.process.spawn import spawn


class Tape(Tracker):
    package = "json"

    def __init__(self, made=("tracked-film", "tracked-report")):
        super().__init__()
        self.rows, self.kept, self.ended, self._made = [], [], [], made

    def open(self, run, run_id):
        self.run_id = run_id

    def log_rows(self, rows):
        self.rows += rows

    def keep(self, kind, path):
        self.kept.append((kind, path.name))

    def finish(self, *, failed):
        self.ended.append(failed)

    def _makes(self, run, path, command, *arguments):
        return path.stem in self._made


@pytest.fixture
def run(tmp_path):
    (tmp_path / "curves").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps({"run_id": "12054628089093851413"}))
    return LiveRun(Config(), tmp_path)


def write(run, role, *rows, mode="a"):
    """Appends rows: step, seconds from now, and the value of a figure."""
    with (run.folder / f"curves/{role}.jsonl").open(mode) as file:
        for steps, seconds, value in rows:
            row = {"steps": steps, "time": 1e12 + seconds, "scalars": {"a/b": value, "none": None}}
            file.write(json.dumps(row) + "\n")


def steps(tape):
    return [row.steps for row in tape.rows]


def test_each_row_of_the_curves_is_logged_once(run):
    tape, status = Tape(), make_run_status()
    tape.on_start(run)
    assert tape.run_id == "12054628089093851413"
    write(run, "learner", (1, 0, 0.5), (2, 1, 0.25))
    tape.on_status(run, status)
    assert tape.rows[0] == Row(1, 1e12, {"a/b": 0.5})
    write(run, "learner", (3, 2, 0.0))
    write(run, "actor", (3, 2, 9.0))
    with (run.folder / "curves/actor.jsonl").open("a") as file:
        file.write('{"steps": 4, "ti')  # not whole yet
    tape.on_status(run, status)
    tape.on_status(run, status)
    assert steps(tape) == [1, 2, 3, 3]


def test_rows_that_could_not_be_logged_follow(run):
    faults = [OSError("database is locked")]

    class Failing(Tape):
        def log_rows(self, rows):
            if faults:
                raise faults.pop()
            super().log_rows(rows)

    tape = Failing()
    tape.on_start(run)
    write(run, "learner", (1, 0, 0.5))
    with pytest.raises(OSError, match="locked"):
        tape.on_status(run, make_run_status())
    write(run, "learner", (2, 1, 0.5))
    tape.on_status(run, make_run_status())
    assert steps(tape) == [1, 2]


def test_rows_that_are_never_accepted_keep_no_later_ones(run):
    class Failing(Tape):
        def log_rows(self, rows):
            super().log_rows(rows)
            if any(row.steps == 1 for row in rows):
                raise OSError("invalid")

    tape = Failing()
    tape.on_start(run)
    write(run, "learner", (1, 0, 0.5))
    for _ in range(MOST_FAILURES):
        with pytest.raises(OSError, match="invalid"):
            tape.on_status(run, make_run_status())
    write(run, "learner", (2, 1, 0.5))
    tape.on_status(run, make_run_status())
    assert steps(tape) == [1] * MOST_FAILURES + [2]


def test_a_record_that_could_not_be_opened_is_tried_again(run, monkeypatch):
    tape, manifest = Tape(), run.folder / "manifest.json"
    manifest.rename(run.folder / "away")
    with pytest.raises(FileNotFoundError):
        tape.on_start(run)
    write(run, "learner", (1, 0, 0.5))
    (run.folder / "away").rename(manifest)
    tape.on_status(run, make_run_status())  # too early
    assert steps(tape) == []
    monkeypatch.setattr(tape, "_open_at", 0.0)
    tape.on_status(run, make_run_status())
    assert steps(tape) == [1]


def test_half_a_line_of_a_killed_learner_is_passed_over(run):
    tape = Tape()
    tape.on_start(run)
    with (run.folder / "curves/learner.jsonl").open("a") as file:
        file.write('{"steps": 1, "ti\n')
    write(run, "learner", (2, 1, 0.5))
    tape.on_status(run, make_run_status())
    assert steps(tape) == [2]


def test_a_curve_that_a_resumed_learner_shortens_continues(run):
    tape, status = Tape(), make_run_status()
    tape.on_start(run)
    write(run, "learner", *[(step, step - 2e12, 0.0) for step in range(9)])  # before this start
    tape.on_status(run, status)
    assert steps(tape) == []
    write(run, "learner", (0, -2e12, 0.0), (1, 5, 0.0), mode="w")
    tape.on_status(run, status)
    write(run, "learner", (2, 6, 0.0))
    tape.on_status(run, status)
    assert steps(tape) == [1, 2]


def save(run):
    for name in ("000000005", "000000007"):
        (run.folder / "checkpoints" / name).mkdir(parents=True)
        (run.folder / "checkpoints" / name / "manifest.json").touch()
    (run.folder / "checkpoints/best.safetensors").touch()


def test_the_end_keeps_rows_policy_checkpoint_film_and_page(run):
    save(run)
    tape, run.status = Tape(), make_run_status()
    tape.on_start(run)
    write(run, "learner", (1, 0, 0.5))
    tape.on_end(run, EndReason("steps", 9.0))
    assert tape.kept == [
        ("policy", "best.safetensors"),
        ("checkpoint", "000000007"),
        ("film", "tracked-film.mp4"),
        ("report", "tracked-report.html"),
    ]
    assert (steps(tape), tape.ended) == ([1], [False])


def test_what_cannot_be_made_is_left_out(run):
    tape = Tape(made=())
    tape.on_start(run)
    tape.on_end(run, EndReason("failed"))
    assert (tape.kept, tape.ended) == ([], [True])


def test_a_record_is_closed_although_an_artifact_cannot_be_stored(run):
    class Refusing(Tape):
        def keep(self, kind, path):
            super().keep(kind, path)
            raise OSError("no space")

    save(run)
    tape = Refusing()
    tape.on_start(run)
    with pytest.raises(OSError, match="no space"):
        tape.on_end(run, EndReason("steps", 9.0))
    assert (tape.kept, tape.ended) == ([("policy", "best.safetensors")], [False])


def test_a_tracker_that_could_not_open_its_record_makes_and_stores_nothing(run):
    save(run)
    tape = Tape()
    (run.folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError):
        tape.on_start(run)
    write(run, "learner", (1, 0, 0.5))
    tape.on_status(run, make_run_status())
    tape.on_end(run, EndReason("steps", 9.0))
    assert (tape.rows, tape.kept, tape.ended) == ([], [], [])


def test_a_film_that_takes_too_long_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("apex.launch.trackers.tracker.PROGRAM_SECONDS", 0.0)
    assert not Tracker._makes(Tape(), LiveRun(Config(), tmp_path), tmp_path / "film.mp4", "evaluate", "--video")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "film.mp4" in line
    assert "longer than 0 s" in line


def test_a_file_is_tried_once_and_a_failed_command_is_logged(tmp_path, caplog):
    run = LiveRun(Config(), tmp_path)
    page = tmp_path / "page.html"
    page.write_text("an older one")
    for _ in range(2):
        assert not Tracker._makes(Tape(), run, page, "report", "--no-video", "--out")
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"status {REFUSED}" in line
    assert page.read_text() == "an older one"


def test_a_file_appears_when_it_is_whole(tmp_path, monkeypatch):
    run, page = LiveRun(Config(), tmp_path), tmp_path / "page.html"
    write_it = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').write('whole')"]
    monkeypatch.setattr(tracker, "spawn", lambda words, **options: spawn([*write_it, words[-1]], **options))
    assert Tracker._makes(Tape(), run, page, "report", "--out")
    assert page.read_text() == "whole"
    page.unlink()
    assert Tracker._makes(Tape(), run, page, "report", "--out"), "another tracker has made it"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_and_an_unknown_tracker_are_refused(monkeypatch, capsys):
    for missing in (None, ModuleSpec("wandb", None)):  # The second one is a folder without a module.
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=missing: spec)
        with pytest.raises(UsageError, match="wandb") as error:
            make_trackers(["wandb"])
    assert "pip install wandb" in error.value.remedy
    with pytest.raises(ConfigError, match="tensorbord"):
        read_start(["--preset", "cartpole", "--track", "tensorbord"])
    assert main(["--preset", "cartpole", "--track", "mlflow"]) == REFUSED
    assert "mlflow" in capsys.readouterr().err


def test_the_option_makes_each_tracker_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    assert [each.package for each in make_trackers(["wandb", "mlflow", "wandb"])] == [*TRACKERS]
    assert make_trackers([]) == []
    start = read_start(["--preset", "cartpole", "--track", "wandb"])
    assert [each.package for each in start.callbacks.all] == ["wandb"]
