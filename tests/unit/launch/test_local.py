"""The launcher: what it starts, what it shows, and what it says at the end. Roles are played by `sh -c`."""

import dataclasses
import socket
import sys
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.builders import VECTORS
from support.launches import cartpole, stand_in
from support.messages import make_run_status

from apex.config import (
    Config,
    LearnerConfig,
    RunConfig,
    TransportConfig,
    load_toml,
)
from apex.errors import FAILED, FINISHED, REFUSED, UsageError
from apex.facts import Ending, EndReason, Failure, LogEntry, ProgramEvent, Waiting
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.start import RunOutcome, Start
from apex.launch.summary import command_name, summary
from apex.launch.terminal.dashboard import History
from apex.launch.train import execute, main, show
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop
from apex.runtime.logs import LogTail
from apex.sentences import describe_entry, describe_event, describe_failure
from apex.transport.messages.control import RefusedAnswer, StatusRequest
from apex.transport.messages.run_status import EvaluatorSummary

pytestmark = pytest.mark.programs


class Tape:
    """A view, a clock and a source of statuses that note and play back."""

    def __init__(self, statuses=()):
        self.statuses = list(statuses)
        self.events = []
        self.now = 0.0

    def clock(self):
        return self.now

    def source(self):
        return self.statuses.pop(0) if self.statuses else None

    def show(self, status, history):
        self.events.append(("show", status and status.phase, history.silent_seconds))

    def note(self, sentence):
        self.events.append(("note", sentence))


def make_watch(tape, folder=Path("nowhere")):
    return RunMonitor(tape.source, tape, LogTail(folder).entries, History(), tape.clock)


def make_folder(path, **run):
    config = dataclasses.replace(Config(), run=RunConfig(folder=str(path), name="mine", **run))
    return RunFolder.create(config, VECTORS, started=datetime(2025, 1, 31))


# --- the watch --------------------------------------------------------------------------------------------------------


def test_a_status_is_shown_when_it_comes_and_silence_once_a_second():
    tape = Tape([None, None, make_run_status(phase="training")])
    watch = make_watch(tape)
    for tape.now in (0.0, 0.5, 0.6, 0.7, 1.5, 1.6, 2.6):
        watch.tick()
    assert tape.events == [
        ("show", None, 0.0),
        ("show", "training", 0.0),
        ("show", "training", pytest.approx(1.0)),
        ("show", "training", pytest.approx(2.0)),
    ]


def test_a_supervisor_message_is_shown_at_once():
    tape = Tape()
    make_watch(tape).tell("stopping actor")
    assert tape.events == [("note", "stopping actor"), ("show", None, 0.0)]


def write_entry(folder, message, waiting=None, role="replay", name="replay"):
    entry = LogEntry(time=0.0, role=role, level="WARNING", message=message, waiting=waiting)
    with (folder / f"{name}.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    return describe_entry(entry)


def test_warnings_of_programs_are_shown(tmp_path):
    tape = Tape()
    watch = make_watch(tape, tmp_path)
    text = write_entry(tmp_path, "slow")
    write_entry(tmp_path, "slow", name="units", role="actor 3")
    watch.tick()
    assert tape.events[0] == ("note", text)
    assert "units actor 3 WARNING slow" in tape.events[1][1]


def test_a_repeated_message_is_shown_once():
    history = History()
    watch = RunMonitor(Tape().source, Tape(), LogTail(Path("nowhere")).entries, history)
    for sentence in ("first", "second", "first"):
        watch.tell(sentence)
    assert [note.text for note in history.notes] == ["second", "first"]


def test_a_wait_is_one_note_until_its_next_entry_is_late(tmp_path):
    history, tape = History(), Tape()
    watch = RunMonitor(tape.source, tape, LogTail(tmp_path).entries, history, tape.clock)
    for tape.now in (10.0, 20.0):
        waits = write_entry(tmp_path, f"for {tape.now}", Waiting("samples", who="replay", seconds=tape.now))
        watch.tick()
    full = write_entry(tmp_path, "full")
    for tape.now, expected in ((21.0, [waits, full]), (44.0, [waits, full]), (46.0, [full])):
        watch.tick()
        assert [note.text for note in history.notes] == expected


class Client:
    """A control client: what was sent, and what it will receive."""

    def __init__(self):
        self.sent = 0
        self.inbox = []

    def send(self, message):
        assert message == StatusRequest()
        self.sent += 1

    def receive(self, timeout):
        assert timeout == 0.0
        return self.inbox.pop(0) if self.inbox else None


def test_the_learner_is_asked_once_a_second_while_it_answers():
    client, tape = Client(), Tape()
    ask = StatusClient(client, tape.clock)
    sent = []
    for tape.now in (0.0, 0.2, 0.4, 1.0, 1.2):
        answer = make_run_status(elapsed_seconds=tape.now) if tape.now in (0.2, 1.2) else None
        client.inbox = [answer] if answer else []
        assert ask() == answer
        sent.append(client.sent)
    assert sent == [1, 1, 1, 2, 2]


def test_a_question_without_an_answer_is_asked_again_after_three_seconds():
    client, tape = Client(), Tape()
    ask = StatusClient(client, tape.clock)
    sent = []
    for tape.now in (0.0, 1.0, 2.9, 3.0, 3.1):
        ask()
        sent.append(client.sent)
    assert sent == [1, 1, 1, 2, 2]


def test_the_newest_of_several_answers_counts_and_others_are_no_status():
    client = Client()
    client.inbox = [make_run_status(steps=1), make_run_status(steps=2), RefusedAnswer("no")]
    assert StatusClient(client)() == make_run_status(steps=2)


# --- last words -------------------------------------------------------------------------------------------------------


def summarize(ending, status, folder):
    return summary(RunOutcome(folder.config, folder.path, ending, status))


STATUS = make_run_status(
    phase="finished",
    end=EndReason("score", 475.0),
    elapsed_seconds=61.0,
    evaluator={"score": 497.25, "best": 500.0},
    actors={"score": 12.0, "highest_id": 31},
)


NO_GAMES = make_run_status(updates=0, actors={"score": None}, evaluator={"score": None})


def finish_checkpoint(folder, num_updates):
    path = folder.checkpoints / f"{num_updates:09d}"
    path.mkdir()
    (path / "manifest.json").touch()


@pytest.mark.parametrize(
    ("saved", "there"),
    [([], "the run has no checkpoint"), ([200, 300], "the newest checkpoint is of update 300"), ([300, 345], None)],
)
def test_a_last_checkpoint_that_was_not_written_is_said(tmp_path, saved, there):
    folder = make_folder(tmp_path)
    for num_updates in saved:
        finish_checkpoint(folder, num_updates)
    lines = summarize(Ending(FINISHED, "learner"), STATUS, folder)
    said = [line for line in lines if line.startswith("the last checkpoint")]
    expected = f"the last checkpoint was not written: {there}; see {folder.logs / 'learner.log'}"
    assert said == ([expected] if there else [])


def test_a_finished_run_says_why_how_well_and_what_to_type_next(tmp_path):
    folder = make_folder(tmp_path)
    finish_checkpoint(folder, 345)
    (folder.tensorboard / "events").touch()
    assert summarize(Ending(FINISHED, "learner"), STATUS, folder) == [
        "finished: reached the score 475",
        "score: 497.2 in the evaluator's games of update 300, best evaluation 500",
        "123,456 steps, 345 updates in 0:01:01",
        f"run folder: {folder.path}",
        f"next: {command_name('apex')} evaluate {folder.path} --episodes 30 --video game.mp4",
        f"curves: {command_name('tensorboard')} --logdir {folder.tensorboard}",
    ]


def test_without_an_evaluator_the_summary_shows_the_least_exploring_actor(tmp_path):
    lines = summarize(
        Ending(FINISHED, "learner"),
        replace(STATUS, evaluator=EvaluatorSummary(score=None, best=None, episodes=None, updates=None)),
        make_folder(tmp_path),
    )
    assert "score: 12 of actor 31, which explores least" in lines


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path):
    folder = make_folder(tmp_path)
    (folder.checkpoints / "000000345").mkdir()
    lines = summarize(Ending(FINISHED), replace(STATUS, end=None), folder)
    assert f"resume: {command_name('apex')} train --resume {folder.path}" in lines


def test_the_summary_offers_only_existing_files(tmp_path):
    folder = make_folder(tmp_path)
    lines = summarize(Ending(FINISHED), NO_GAMES, folder)
    assert lines[0] == "finished: interrupted"
    assert lines[1] == "score: none: no game was finished"
    assert lines[-1] == f"run folder: {folder.path}"


def test_a_failed_run_says_the_cause_and_what_the_log_said_before(tmp_path):
    folder = make_folder(tmp_path)
    (folder.logs / "replay.log").write_text("first\nValueError: bad\n")
    lines = summarize(Ending(FAILED, "replay", Failure(role="replay", kind="exit", value=1, times=4)), None, folder)
    assert lines == [
        "the run ended with status 1: replay ended with status 1 4 times",
        "    first",
        "    ValueError: bad",
        f"run folder: {folder.path}",
    ]


def test_a_command_that_is_not_on_the_path_is_named_by_where_it_is(monkeypatch):
    monkeypatch.chdir(Path(sys.executable).parent.parent)
    assert command_name("no-such-program") == str(Path(Path(sys.executable).parent.name) / "no-such-program")
    monkeypatch.chdir("/")
    assert command_name("no-such-program") == str(Path(sys.executable).parent / "no-such-program")[1:]


# --- whole runs ------------------------------------------------------------------------------------------------------


def run(config, *programs, stop=None, **options):
    """Runs these programs instead of the usual ones."""
    return execute(
        Start(config=config, argv=["x"], edit_programs=lambda usual: list(programs), **options), stop or Stop()
    )


FINISHES = stand_in("learner", "exit 0", ends_run=True)


def test_a_run_goes_from_its_folder_to_its_summary(tmp_path, capsys):
    config = cartpole(tmp_path)
    config = dataclasses.replace(config, learner=LearnerConfig(batch_size=0, bfloat16="auto", device="cpu"))
    outcome = run(config, stand_in("actor", "exec sleep 600"), FINISHES)
    assert outcome.ending == Ending(FINISHED, "learner")
    folder = RunFolder.open(tmp_path / "mine")
    assert load_toml(folder.config_file) == folder.config == outcome.config
    assert outcome.config.learner.batch_size >= 64  # chosen for this machine
    assert outcome.config.learner.bfloat16 in ("on", "off")
    assert show(outcome) == FINISHED
    output = capsys.readouterr().out
    assert "CartPole-v1, seed 1" in output
    assert output.count(f"run folder: {tmp_path / 'mine'}") == 2  # at the start and at the end
    event = describe_event(ProgramEvent("actor", "stopping"))
    assert event in output
    assert event in (folder.logs / "launcher.log").read_text()


def test_a_running_run_is_not_resumed_and_a_finished_one_is(tmp_path):
    refused = []

    def resume(usual):
        with pytest.raises(UsageError, match=r"mine.*running") as error:
            execute(Start(config=config, argv=[], folder=tmp_path / "mine"), Stop())
        refused.append(error)
        return [FINISHES]

    config = cartpole(tmp_path)
    outcome = execute(Start(config=config, argv=[], edit_programs=resume), Stop())
    assert len(refused) == 1
    assert "resumed" not in RunFolder.open(tmp_path / "mine").manifest
    again = run(outcome.config, FINISHES, folder=tmp_path / "mine")
    assert again.ending.status == FINISHED
    assert [start["argv"] for start in RunFolder.open(tmp_path / "mine").manifest["resumed"]] == [["x"]]


def test_a_run_ends_with_the_status_of_the_program_that_refused(tmp_path, capsys):
    outcome = run(cartpole(tmp_path), stand_in("learner", "echo starting; echo 'no GPU here'; exit 2", ends_run=True))
    assert show(outcome) == REFUSED
    assert (outcome.ending.failure.kind, outcome.ending.failure.detail) == ("refused", "no GPU here")
    assert describe_failure(outcome.ending.failure) in capsys.readouterr().err


def test_a_run_that_is_stopped_before_it_begins_leaves_no_folder(tmp_path):
    stop = Stop()
    stop.request()
    assert run(cartpole(tmp_path / "runs"), stop=stop) is None
    assert show(None) == FINISHED
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_moves_the_run(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = TransportConfig(experience_port=listener.getsockname()[1])
        outcome = run(dataclasses.replace(cartpole(tmp_path), transport=taken), FINISHES)
    assert outcome.config.transport.port_offset > 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--preset", "nosuch"], "nosuch"),
        (["--actors", "-1"], "actor.num_actors"),
        (["--replay.capactiy", "7"], "capactiy"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv-v0"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(arguments, name, capsys):
    assert main(arguments) == REFUSED
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex train: ")
    assert name in errors[0]
