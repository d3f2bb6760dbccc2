"""The launcher: what it starts, what it shows, and what it says at the end. Roles are played by `sh -c`."""

import dataclasses
import socket
import sys
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import VECTORS
from support.launches import cartpole, stand_in
from support.messages import make_run_status

from apex.config import (
    CheckpointConfig,
    Config,
    EvaluatorConfig,
    LearnerConfig,
    ReplayConfig,
    RunConfig,
    TransportConfig,
    load_toml,
)
from apex.errors import FAILED, FINISHED, REFUSED, UsageError
from apex.facts import EndReason
from apex.launch.local import main, make_programs, resume, train
from apex.launch.monitor import RunMonitor, StatusClient
from apex.launch.summary import command_name, summary
from apex.launch.terminal.dashboard import ENDING, EVALUATING, History
from apex.launch.terminal.view import LogTail
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import Stop
from apex.runtime.supervisor import Ending
from apex.transport.hello import local_host
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
    return RunMonitor(tape.source, tape, LogTail(folder), History(), tape.clock)


def make_folder(path, **run):
    config = dataclasses.replace(Config(), run=RunConfig(folder=str(path), name="mine", **run))
    return RunFolder.create(config, VECTORS, started=datetime(2025, 1, 31))


# --- the programs -----------------------------------------------------------------------------------------------------


def compose(folder, status=None, **branches):
    watch = make_watch(Tape([status] if status else []))
    watch.tick()
    return {p.role: p for p in make_programs(dataclasses.replace(folder.config, **branches), folder, watch)}


def test_actors_stop_first_then_evaluator_learner_replay_and_tensorboard(tmp_path):
    programs = compose(make_folder(tmp_path))
    assert list(programs)[::-1] == ["actor", "evaluator", "learner", "replay", "tensorboard"]


def test_a_head_has_every_program_but_the_actors(tmp_path):
    programs = compose(make_folder(tmp_path, head=True))
    assert list(programs) == ["tensorboard", "replay", "learner", "evaluator"]


def test_a_run_is_over_within_ten_seconds(tmp_path):
    assert sum(program.grace_seconds for program in compose(make_folder(tmp_path)).values()) <= 9.0


def test_there_is_a_replay_server_for_each_shard_and_they_stop_together(tmp_path):
    folder = make_folder(tmp_path)
    programs = compose(folder, replay=ReplayConfig(num_shards=4))
    servers = [programs[f"replay-{shard}"] for shard in range(4)]
    assert [server.command[7:9] for server in servers] == [("--shard", str(shard)) for shard in range(4)]
    assert {server.stops_with for server in servers} == {"replay"}
    grace = {program.stops_with or role: program.grace_seconds for role, program in programs.items()}
    assert sum(grace.values()) <= 9.0
    assert compose(folder)["replay"].command[7:9] == ("--shard", "0")


def test_everybody_is_told_the_learners_control_address(tmp_path):
    programs = compose(make_folder(tmp_path), transport=TransportConfig(port_offset=100))
    for role in ("replay", "actor", "evaluator"):
        assert programs[role].command[1:7] == ("-u", "-P", "-m", f"apex.{role}", "--learner", "127.0.0.1:22103")


def test_replay_is_told_where_its_snapshots_go_unless_there_are_to_be_none(tmp_path):
    folder = make_folder(tmp_path)
    where = ("--snapshots", f"{folder.path}/checkpoints/replay")
    assert compose(folder)["replay"].command[-2:] == where
    without = compose(folder, checkpoint=CheckpointConfig(replay=False))["replay"]
    assert "--snapshots" not in without.command


def test_the_learner_is_told_its_folder_and_only_its_end_ends_the_run(tmp_path):
    folder = make_folder(tmp_path)
    programs = compose(folder)
    where = ("--config", f"{folder.path}/config.toml", "--run-folder", str(folder.path))
    assert programs["learner"].command[4:] == ("apex.learner", *where)
    assert [role for role, program in programs.items() if program.ends_run] == ["learner"]


def test_what_only_watches_is_nice_and_tensorboard_is_not_essential(tmp_path):
    programs = compose(make_folder(tmp_path))
    assert [role for role, program in programs.items() if program.niceness] == ["tensorboard", "evaluator"]
    assert [role for role, program in programs.items() if not program.essential] == ["tensorboard"]


def test_the_crash_budget_is_that_of_the_configuration(tmp_path):
    programs = compose(make_folder(tmp_path), run=RunConfig(crash_budget=7.5))
    budgets = {role: program.crash_budget for role, program in programs.items()}
    assert budgets == dict.fromkeys(("replay", "learner", "evaluator", "actor"), 7.5) | {"tensorboard": 1.0}


def test_an_evaluator_whose_score_ends_the_run_is_not_nice(tmp_path):
    programs = compose(make_folder(tmp_path, stop_score=18.0))
    assert [role for role, program in programs.items() if program.niceness] == ["tensorboard"]


def test_actors_are_nice_where_they_wait_for_the_learner(tmp_path):
    waiting = ReplayConfig(samples_per_insert=8.0, inserts_wait=True)
    for replay, niceness in ((ReplayConfig(samples_per_insert=8.0), 0), (waiting, 10)):
        folder = make_folder(tmp_path / str(niceness))
        assert compose(folder, replay=replay)["actor"].niceness == niceness


def test_evaluator_and_tensorboard_can_be_left_out(tmp_path):
    folder = make_folder(tmp_path)
    programs = compose(folder, evaluator=EvaluatorConfig(enabled=False), run=RunConfig(tensorboard=False))
    assert list(programs) == ["replay", "learner", "actor"]


def test_tensorboard_waits_for_the_first_updates(tmp_path):
    folder = make_folder(tmp_path)
    for status, ready in [(None, False), (make_run_status(updates=0), False), (make_run_status(updates=1), True)]:
        assert compose(folder, status)["tensorboard"].ready() is ready


@pytest.mark.parametrize(("phase", "ready"), [("training", True), *((phase, False) for phase in ENDING)])
def test_nobody_but_the_learner_is_started_again_while_the_run_ends(tmp_path, phase, ready):
    programs = compose(make_folder(tmp_path), make_run_status(phase=phase))
    assert programs.pop("learner").ready()
    assert programs.pop("evaluator").ready() is (ready or phase == EVALUATING)
    assert {program.ready() for program in programs.values()} == {ready}


@pytest.mark.parametrize(
    ("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "10.0.0.7")]
)
def test_programs_of_this_host_connect_to_where_it_is_bound(bind, host):
    assert local_host(TransportConfig(bind=bind, insecure_no_auth=True)) == host


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


def test_what_the_supervisor_says_is_shown_at_once():
    tape = Tape()
    make_watch(tape).tell("stopping actor")
    assert tape.events == [("note", "stopping actor"), ("show", None, 0.0)]


def test_warnings_of_the_logs_are_shown(tmp_path):
    tape = Tape()
    watch = make_watch(tape, tmp_path)
    (tmp_path / "replay.log").write_text("12:00:00 replay WARNING slow\n")
    watch.tick()
    assert tape.events[0] == ("note", "12:00:00 replay WARNING slow")


def test_a_sentence_that_is_said_again_stands_once_in_the_picture():
    history = History()
    watch = RunMonitor(Tape().source, Tape(), LogTail(Path("nowhere")), history)
    for sentence in ("first", "second", "first"):
        watch.tell(sentence)
    assert list(history.notes) == ["second", "first"]


def test_a_wait_stands_once_in_the_picture_and_goes_when_it_is_said_no_more(tmp_path):
    log, history, tape = tmp_path / "replay.log", History(), Tape()
    watch = RunMonitor(tape.source, tape, LogTail(tmp_path), history, tape.clock)
    for second, line in ((10, "waits for the learner (10 s)"), (20, "waits for the learner (20 s)"), (21, "is full")):
        tape.now = float(second)
        with log.open("a") as file:
            file.write(f"12:00:{second} replay WARNING replay {line}\n")
        watch.tick()
    waits = "12:00:20 replay WARNING replay waits for the learner (20 s)"
    full = "12:00:21 replay WARNING replay is full"
    assert list(history.notes) == [waits, full]
    tape.now = 44.0
    watch.tick()
    assert list(history.notes) == [waits, full]
    tape.now = 46.0
    watch.tick()
    assert list(history.notes) == [full]


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
    lines = summary(Ending(FINISHED, ""), STATUS, folder)
    said = [line for line in lines if line.startswith("the last checkpoint")]
    expected = f"the last checkpoint was not written: {there}; see {folder.logs / 'learner.log'}"
    assert said == ([expected] if there else [])


def test_a_finished_run_says_why_how_well_and_what_to_type_next(tmp_path):
    folder = make_folder(tmp_path)
    finish_checkpoint(folder, 345)
    (folder.tensorboard / "events").touch()
    assert summary(Ending(FINISHED, ""), STATUS, folder) == [
        "finished: reached the score 475",
        "score: 497.2 in the evaluator's games of update 300, best evaluation 500",
        "123,456 steps, 345 updates in 0:01:01",
        f"run folder: {folder.path}",
        f"next: {command_name('apex')} evaluate {folder.path} --episodes 30 --video game.mp4",
        f"curves: {command_name('tensorboard')} --logdir {folder.tensorboard}",
    ]


def test_without_an_evaluator_the_score_is_that_of_the_actor_that_explores_least(tmp_path):
    lines = summary(
        Ending(FINISHED, ""),
        replace(STATUS, evaluator=EvaluatorSummary(score=None, best=None, episodes=None, updates=None)),
        make_folder(tmp_path),
    )
    assert "score: 12 of actor 31, which explores least" in lines


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path):
    folder = make_folder(tmp_path)
    (folder.checkpoints / "000000345").mkdir()
    lines = summary(Ending(FINISHED, ""), replace(STATUS, end=None), folder)
    assert f"resume: {command_name('apex')} train --resume {folder.path}" in lines


def test_what_there_is_not_yet_is_not_offered(tmp_path):
    folder = make_folder(tmp_path)
    lines = summary(Ending(FINISHED, ""), NO_GAMES, folder)
    assert lines[0] == "finished: interrupted"
    assert lines[1] == "score: none: no game was finished"
    assert lines[-1] == f"run folder: {folder.path}"


def test_a_failed_run_says_the_cause_and_what_the_log_said_before(tmp_path):
    folder = make_folder(tmp_path)
    (folder.logs / "replay.log").write_text("first\nValueError: bad\n")
    lines = summary(Ending(FAILED, "replay ended with status 1 4 times", "replay"), None, folder)
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


# --- the whole --------------------------------------------------------------------------------------------------------


def test_a_run_goes_from_its_folder_to_its_last_words(tmp_path, capsys):
    asked = cartpole(tmp_path)
    asked = dataclasses.replace(asked, learner=LearnerConfig(batch_size=0, bfloat16="auto", device="cpu"))

    def programs(config, folder, watch):
        assert load_toml(folder.config_file) == config
        assert config.learner.batch_size >= 64  # What the machine decided is on record.
        assert config.learner.bfloat16 in ("on", "off")
        return [stand_in("actor", "exec sleep 600"), stand_in("learner", "exit 0", ends_run=True)]

    assert train(asked, Stop(), ["--name", "mine"], programs) == FINISHED
    said = capsys.readouterr().out
    assert "CartPole-v1, seed 1" in said
    assert "machine: " in said
    assert "stopping actor\nfinished\n" in said
    assert f"run folder: {tmp_path / 'mine'}" in said
    assert "stopping actor" in (tmp_path / "mine" / "logs" / "launcher.log").read_text()


def test_a_run_that_is_going_is_not_resumed_whatever_its_replay_server_does(tmp_path):
    refused = []

    def programs(config, folder, watch):
        with pytest.raises(UsageError, match="mine: this run is still running") as error:
            resume(str(folder.path), [], Stop(), lambda *_: [])
        refused.append(error)
        assert "resumed" not in RunFolder.open(folder.path).manifest
        return [stand_in("learner", "exit 0", ends_run=True)]

    assert train(cartpole(tmp_path), Stop(), [], programs) == FINISHED
    assert len(refused) == 1
    again = [stand_in("learner", "exit 0", ends_run=True)]
    assert resume(str(tmp_path / "mine"), [], Stop(), lambda *_: again) == FINISHED


def test_a_run_ends_with_the_status_of_the_program_that_refused(tmp_path, capsys):
    programs = [stand_in("learner", "echo starting; echo 'no GPU here'; exit 2", ends_run=True)]
    assert train(cartpole(tmp_path), Stop(), [], lambda *_: programs) == REFUSED
    assert "the run ended with status 2: learner refused to run: no GPU here" in capsys.readouterr().err


def test_a_run_that_was_stopped_before_it_began_leaves_no_folder(tmp_path):
    stop = Stop()
    stop.request()
    assert train(cartpole(tmp_path / "runs"), stop, []) == FINISHED
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_moves_the_run(tmp_path, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = TransportConfig(experience_port=listener.getsockname()[1])
        config = dataclasses.replace(cartpole(tmp_path), transport=taken)
        train(config, Stop(), [], lambda *_: [stand_in("learner", "exit 0", ends_run=True)])
    assert "this run uses --transport.port-offset" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "nosuch"], "nosuch"),
        (["--actors", "-1"], "actor.num_actors must be an integer from 0 to 65536, got -1"),
        (["--replay.capactiy", "7"], "capactiy"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv-v0"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(arguments, message, capsys):
    assert main(arguments) == REFUSED
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex train: ")
    assert message in errors[0]
