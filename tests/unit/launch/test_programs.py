"""The programs of a run: commands, order, groups, niceness, and when they start."""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import pytest
from support.builders import VECTORS
from support.messages import make_run_status

from apex.config import CheckpointConfig, Config, EvaluatorConfig, ReplayConfig, RunConfig, TransportConfig
from apex.launch.monitor import RunMonitor
from apex.launch.programs import make_programs
from apex.launch.terminal.dashboard import ENDING, EVALUATING, History
from apex.runs.folder import RunFolder
from apex.runtime.logs import LogTail
from apex.transport.hello import local_host


def make_folder(path, **run):
    config = replace(Config(), run=RunConfig(folder=str(path), name="mine", **run))
    return RunFolder.create(config, VECTORS, started=datetime(2025, 1, 31))


def programs_of(folder, status=None, **branches):
    """The programs by their role; `status`: the last status of the run."""
    watch = RunMonitor(lambda: status, SimpleNamespace(show=lambda *_: None), LogTail(folder.path).entries, History())
    watch.tick()
    return {p.role: p for p in make_programs(replace(folder.config, **branches), folder, watch)}


def test_actors_stop_first_then_evaluator_learner_replay_tensorboard(tmp_path):
    programs = programs_of(make_folder(tmp_path))
    assert list(programs)[::-1] == ["actor", "evaluator", "learner", "replay", "tensorboard"]


def test_a_head_has_every_program_except_the_actors(tmp_path):
    programs = programs_of(make_folder(tmp_path, head=True))
    assert list(programs) == ["tensorboard", "replay", "learner", "evaluator"]


def test_the_grace_periods_sum_to_less_than_ten_seconds(tmp_path):
    assert sum(program.grace_seconds for program in programs_of(make_folder(tmp_path)).values()) <= 9.0


def test_only_the_learner_gets_further_time_while_it_saves(tmp_path):
    programs = programs_of(make_folder(tmp_path))
    assert {role for role, program in programs.items() if program.saving_seconds} == {"learner"}


def test_each_shard_has_a_server_and_all_servers_stop_together(tmp_path):
    folder = make_folder(tmp_path)
    programs = programs_of(folder, replay=ReplayConfig(num_shards=4))
    servers = [programs[f"replay-{shard}"] for shard in range(4)]
    assert [server.command[7:9] for server in servers] == [("--shard", str(shard)) for shard in range(4)]
    assert {server.stops_with for server in servers} == {"replay"}
    grace = {program.stops_with or role: program.grace_seconds for role, program in programs.items()}
    assert sum(grace.values()) <= 9.0
    assert programs_of(folder)["replay"].command[7:9] == ("--shard", "0")


def test_programs_that_import_trust_what_the_launcher_trusts(tmp_path, trusted):
    trusted.add("mine.levels")
    programs = programs_of(make_folder(tmp_path))
    given = {role for role, program in programs.items() if program.command[-2:] == ("--allow", "mine.levels")}
    assert given == {"learner", "actor", "evaluator"}


def test_every_role_gets_the_learners_control_address(tmp_path):
    programs = programs_of(make_folder(tmp_path), transport=TransportConfig(port_offset=100))
    for role in ("replay", "actor", "evaluator"):
        assert programs[role].command[1:7] == ("-u", "-P", "-m", f"apex.{role}", "--learner", "127.0.0.1:22103")


def test_replay_gets_the_folder_of_its_snapshots_if_they_are_enabled(tmp_path):
    folder = make_folder(tmp_path)
    where = ("--snapshots", f"{folder.path}/checkpoints/replay")
    assert programs_of(folder)["replay"].command[-2:] == where
    without = programs_of(folder, checkpoint=CheckpointConfig(replay=False))["replay"]
    assert "--snapshots" not in without.command


def test_the_learner_gets_its_folder_and_only_its_end_ends_the_run(tmp_path):
    folder = make_folder(tmp_path)
    programs = programs_of(folder)
    assert programs["learner"].command[4:] == ("apex.learner", "--run-folder", str(folder.path))
    assert [role for role, program in programs.items() if program.ends_run] == ["learner"]


def test_observers_are_nice_and_tensorboard_is_not_essential(tmp_path):
    programs = programs_of(make_folder(tmp_path))
    assert [role for role, program in programs.items() if program.niceness] == ["tensorboard", "evaluator"]
    assert [role for role, program in programs.items() if not program.essential] == ["tensorboard"]


def test_the_crash_budget_is_that_of_the_configuration(tmp_path):
    programs = programs_of(make_folder(tmp_path), run=RunConfig(crash_budget=7.5))
    budgets = {role: program.crash_budget for role, program in programs.items()}
    assert budgets == dict.fromkeys(("replay", "learner", "evaluator", "actor"), 7.5) | {"tensorboard": 1.0}


def test_an_evaluator_whose_score_ends_the_run_is_not_nice(tmp_path):
    programs = programs_of(make_folder(tmp_path, stop_score=18.0))
    assert [role for role, program in programs.items() if program.niceness] == ["tensorboard"]


def test_evaluator_and_tensorboard_can_be_left_out(tmp_path):
    folder = make_folder(tmp_path)
    programs = programs_of(folder, evaluator=EvaluatorConfig(enabled=False), run=RunConfig(tensorboard=False))
    assert list(programs) == ["replay", "learner", "actor"]


def test_tensorboard_waits_for_the_first_updates(tmp_path):
    folder = make_folder(tmp_path)
    for status, ready in [(None, False), (make_run_status(updates=0), False), (make_run_status(updates=1), True)]:
        assert programs_of(folder, status)["tensorboard"].ready() is ready


@pytest.mark.parametrize(("phase", "ready"), [("training", True), *((phase, False) for phase in ENDING)])
def test_only_the_learner_restarts_while_the_run_ends(tmp_path, phase, ready):
    programs = programs_of(make_folder(tmp_path), make_run_status(phase=phase))
    assert programs.pop("learner").ready()
    assert programs.pop("evaluator").ready() is (ready or phase == EVALUATING)
    assert {program.ready() for program in programs.values()} == {ready}


@pytest.mark.parametrize(
    ("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.7", "10.0.0.7")]
)
def test_programs_of_this_host_connect_to_the_bound_address(bind, host):
    assert local_host(TransportConfig(bind=bind, insecure_no_auth=True)) == host
