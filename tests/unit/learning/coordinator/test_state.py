"""The status combines the reports of all programs, and tells whether the run is over and what limits it."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from msgspec.structs import replace
from support.clocks import Clock
from support.messages import RESULT, make_heartbeat

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig, flatten
from apex.facts import INTERRUPTED, EndReason, Part
from apex.learning.coordinator.members import MAX_MEMBERS, MAX_ROWS
from apex.learning.coordinator.state import MAX_STARTUP_SECONDS, RunState
from apex.learning.coordinator.status import summarize
from apex.runtime.resources import HostUse
from apex.transport.hello import host_name
from apex.transport.messages.run_status import EvaluatorSummary, RoleRow
from apex.transport.messages.status import LearnerStatus, Resources
from apex.transport.timing import ABSENT_HEARTBEATS
from apex.types import NO_TIME, Exploration, Progress, RunTime
from apexreplay.facts import MAX_TEXT, Waiting
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_json

RESOURCES = ("cores", "memory_bytes", "gpu_share", "gpu_memory_bytes")
THERE = {"experience": "tcp://..."}


def make_state(clock=None, *, num_shards=1, run_time=NO_TIME, **run):
    replay = ReplayConfig(samples_per_insert=6, num_shards=num_shards)
    actor = ActorConfig(num_actors=max(4, num_shards), num_processes=2, envs_per_process=max(4, num_shards) // 2)
    learner = LearnerConfig(num_threads=2, num_loaders=1)
    config = Config(run=RunConfig(**run), actor=actor, learner=learner, replay=replay)
    exploration = Exploration("epsilon", np.full(config.actor.num_actors, 0.4**8))
    clock = clock or Clock()
    return RunState(
        config,
        name="pong-1",
        folder="runs/pong-1",
        exploration=exploration,
        run_time=run_time,
        num_cores=8,
        clock=clock,
    )


def report(state, latest=lambda tag: None):
    return summarize(state, latest)


def beat(state, role, session=1, **more):
    state.update(make_heartbeat(role, session, **more))


def report_all(state, replay=None, actor=None, **learner):
    beat(state, "replay", endpoints=THERE, **{"num_inserted": 500, "size": 400, **(replay or {})})
    beat(state, "actor", 2, **(actor or {}))
    state.learner = LearnerStatus(**{"updates": 7, "wait_share": 0.9, **learner})


def test_a_status_without_reports_has_no_figures():
    status = report(make_state())
    assert status.phase == "waiting_for_replay"
    assert status.steps == 0
    assert status.roles == []
    assert status.limited_by is None
    assert status.evaluator.score is None
    assert status.replay.size is None
    assert status.actors.steps_per_second is None
    assert status.learner.loss is None


def test_a_silent_trainer_is_the_bottleneck():
    clock = Clock()
    state = make_state(clock)

    def limit_after(seconds):
        clock.now += seconds
        report_all(state)  # The other programs continue to report.
        return report(state).limited_by

    state.update_learner(LearnerStatus(updates=8))
    assert limit_after(10.0).part == "wire"
    limit = limit_after(1.0)
    assert (limit.part, limit.cause, limit.have) == ("learner", "silent_trainer", 11.0)
    assert limit.increase == ("run.stuck_seconds",)
    state.update_learner(LearnerStatus(updates=9))
    assert limit_after(0.0).part == "wire"


def test_a_status_combines_the_reports_of_all_programs():
    clock = Clock()
    state = make_state(clock)
    report_all(state, loss=0.5)
    state.evaluation, state.best_score = RESULT, 4.0
    clock.now += 2
    status = report(state, {"actor_highest_id/score": 9.0}.get)
    assert status.phase == "training"
    assert status.steps == 500
    assert status.replay.size == 400
    assert status.learner.loss == 0.5
    assert status.actors.score == 9.0
    assert status.actors.highest_id == 3
    assert (status.actors.exploration, status.actors.highest_exploration) == ("epsilon", 0.4**8)
    assert status.evaluator == EvaluatorSummary(score=3.5, best=4.0, episodes=2, updates=12)
    assert [row.role for row in status.roles] == ["actor", "replay"]
    assert status.roles[0] == RoleRow(
        role="actor", shard=None, host="h", pid=7, last_seen_seconds=2.0, waiting=None, steps_per_second=10.0
    )


def test_phases_follow_the_run():
    state = make_state()
    beat(state, "replay", endpoints=THERE)
    assert report(state).phase == "filling_replay"
    state.learner = LearnerStatus(updates=1)
    assert report(state).phase == "training"
    state.end = EndReason("steps", 5.0)
    assert report(state).phase == "finishing"
    beat(state, "evaluator")
    state.end_training(INTERRUPTED, 1)
    assert report(state).phase == "evaluating_final_policy"
    state.end_training(INTERRUPTED, None)
    assert report(state).phase == "finished"


def test_an_evaluation_of_lost_updates_is_not_that_of_the_final_policy():
    state = make_state()
    beat(state, "evaluator")
    state.keep_evaluation(replace(RESULT, updates=5_000))  # The learner then lost 200 updates.
    state.end_training(INTERRUPTED, 4_850)
    assert not state.finished
    state.keep_evaluation(replace(RESULT, updates=4_850))
    assert state.finished


def test_the_wait_of_a_trainer_without_batches_is_named():
    state = make_state()
    assert state.waiting() == Waiting("replay", "replay")
    beat(state, "replay", endpoints=THERE, size=400)
    assert state.waiting() == Waiting("transitions", "replay", 400, 50_000)
    beat(state, "replay", size=50_000, samplers_wait_for="inserts")
    assert state.waiting() == Waiting("inserts", "replay", need=6)
    beat(state, "replay", size=50_000)
    assert state.waiting() == Waiting("batches")
    state.learner = LearnerStatus(refused_batches=1_200)
    assert state.waiting() == Waiting("usable_batches", have=1_200)


def test_a_wait_names_the_shard_with_too_few_transitions():
    state = make_state(num_shards=2)
    for shard, size in ((0, 25_000), (1, 24_999)):
        beat(state, "replay", session=shard, shard=shard, size=size)
    assert state.waiting() == Waiting("transitions", "replay-1", 24_999, 25_000)


def test_resources_of_each_role_are_in_status_and_curves():
    state = make_state()
    beat(state, "replay", resources=Resources(cores=0.5, memory_bytes=7))
    beat(state, "actor", 2, resources=Resources(cores=1.0, memory_bytes=10))
    beat(state, "actor", 3, host="other", resources=Resources(cores=0.25, memory_bytes=20))
    beat(state, "evaluator", 4)
    state.learner = LearnerStatus(updates_per_second=50.0)
    state.learner_resources = Resources(cores=1.5, memory_bytes=30, gpu_share=0.75, gpu_memory_bytes=40)
    shown = {name: value for name, value in state.scalars().items() if name.split("/")[0] in RESOURCES}
    assert shown == {
        "cores/replay": 0.5,
        "memory_bytes/replay": 7,
        "cores/actor": 1.25,
        "memory_bytes/actor": 30,
        "cores/learner": 1.5,
        "memory_bytes/learner": 30,
        "gpu_share/learner": 0.75,
        "gpu_memory_bytes/learner": 40,
    }
    rows = {(row.role, row.host): row.resources for row in report(state).roles}
    assert rows["actor", "other"] == Resources(cores=0.25, memory_bytes=20)
    assert rows["evaluator", "h"] is None
    assert report(state).learner.resources == state.learner_resources


def test_steps_stay_when_replay_is_gone():
    state = make_state()
    report_all(state)
    state.members.forget(1)
    assert state.num_steps == 500


def test_silent_programs_are_forgotten():
    clock = Clock()
    state = make_state(clock)
    report_all(state)
    clock.now += 20
    beat(state, "actor", 2)
    clock.now += 15
    state.members.forget_silent(30.0)
    assert list(state.members) == [2]


def test_steps_minutes_or_a_confirmed_score_end_a_run():
    clock = Clock()
    state = make_state(clock, max_steps=501, max_minutes=1.0, stop_score=10.0)
    report_all(state)
    assert state.reached_limit() is None
    for mean, confirmed, reason in ((11.0, False, None), (9.0, True, None), (10.0, True, EndReason("score", 10.0))):
        state.evaluation = replace(RESULT, mean=mean, confirmed=confirmed)
        assert state.reached_limit() == reason
    state.evaluation = None
    report_all(state, replay={"num_inserted": 501})
    assert state.reached_limit() == EndReason("steps", 501)


def test_minutes_count_from_the_first_step_of_each_start():
    clock = Clock()
    state = make_state(clock, max_minutes=1.0)
    state.restore(Progress(100, 0, 40))
    clock.now += 50
    report_all(state, replay={"num_inserted": 100})  # what the memory had before
    assert (state.untrained_seconds, state.reached_limit()) == (50.0, None)
    clock.now += 10
    report_all(state, replay={"num_inserted": 101})
    clock.now += 19
    assert (state.untrained_seconds, state.elapsed_seconds, state.reached_limit()) == (60.0, 119.0, None)
    clock.now += 1
    assert state.reached_limit() == EndReason("minutes", 1.0)


def test_minutes_exclude_starts_and_final_evaluations_of_earlier_starts():
    clock = Clock()
    state = make_state(clock, max_minutes=1.0)
    clock.now += 50
    report_all(state, replay={"num_inserted": 1})
    clock.now += 30
    state.end_training(EndReason("interrupted"), 7)
    clock.now += 100  # the final evaluation
    assert state.run_time == RunTime(180.0, 150.0)

    again = make_state(clock, max_minutes=1.0, run_time=state.run_time)
    clock.now += 5  # The trainer loads its checkpoint.
    again.restore(Progress(1, 0, 180))
    report_all(again, replay={"num_inserted": 2})
    clock.now += 29
    assert (again.run_time, again.reached_limit()) == (RunTime(214.0, 155.0), None)
    clock.now += 1
    assert again.reached_limit() == EndReason("minutes", 1.0)


def test_a_checkpoint_knows_the_earlier_starts_if_their_file_is_lost():
    clock = Clock()
    state = make_state(clock, max_minutes=1.0)  # RunTime(): the file could not be read
    state.restore(Progress(1, 0, 180, untrained_seconds=150.0))
    report_all(state, replay={"num_inserted": 2})
    clock.now += 29
    assert (state.run_time, state.reached_limit()) == (RunTime(209.0, 150.0), None)


def test_a_run_whose_actors_never_come_ends():
    clock = Clock()
    state = make_state(clock, max_minutes=1.0)
    clock.now += 60 + MAX_STARTUP_SECONDS - 1
    assert state.reached_limit() is None
    clock.now += 1
    assert state.reached_limit() == EndReason("minutes", 1.0)


def test_the_first_reason_to_end_stays():
    state = make_state(max_steps=501, stop_score=3.0)
    assert state.decide_end() is None
    report_all(state, replay={"num_inserted": 501})
    assert state.decide_end() == EndReason("steps", 501)
    state.evaluation = replace(RESULT, confirmed=True)
    assert state.decide_end() == state.end == EndReason("steps", 501)


@pytest.mark.parametrize(
    ("replay", "actor", "learner", "part"),
    [
        ({}, {}, {"wait_share": 0.05}, "learner"),
        ({}, {}, {"wait_share": None}, "learner"),
        ({"samplers_wait_for": "inserts"}, {}, {"wait_share": 0.9}, "actors"),
        ({"inserts_wait": True}, {"wait_share": 0.9}, {"wait_share": 0.05}, "learner"),
        ({"inserts_wait": True}, {"wait_share": 0.9}, {"wait_share": 0.5, "loader_busy_share": 0.9}, "loaders"),
        ({"inserts_wait": True, "busy_share": 0.9}, {"wait_share": 0.9}, {"wait_share": 0.5}, "replay"),
        ({"inserts_wait": True}, {"wait_share": 0.9}, {"wait_share": 0.5}, "wire"),
        ({}, {}, {"wait_share": 0.9, "load_per_core": 3.2}, "processor"),
        ({}, {"wait_share": 0.5}, {"wait_share": 0.9, "load_per_core": 0.9}, "wire"),
        ({}, {}, {"wait_share": 0.9, "loader_busy_share": 0.9}, "loaders"),
        ({"busy_share": 0.9}, {"wait_share": 0.5}, {"wait_share": 0.9}, "replay"),
        ({}, {"wait_share": 0.5}, {"wait_share": 0.9}, "wire"),
        ({}, {}, {"wait_share": 0.9}, "wire"),
    ],
)
def test_the_limiting_part_is_named(replay, actor, learner, part):
    state = make_state()
    report_all(state, replay=replay, actor=actor, **learner)
    limited_by = report(state).limited_by
    assert limited_by.part == part
    settings = {*limited_by.increase, *limited_by.decrease}
    assert settings
    assert settings <= set(flatten(state.config))
    shown = {tag: value for tag, value in state.scalars().items() if tag.startswith("limited_by/")}
    assert len(shown) == len(get_args(Part))
    assert [tag for tag, value in shown.items() if value] == [f"limited_by/{part}"]


def test_a_run_has_no_bottleneck_before_its_first_update_of_this_start():
    state = make_state()
    state.updates_before = 7
    beat(state, "replay", endpoints=THERE)
    state.learner = LearnerStatus(updates=7)
    assert report(state).limited_by is None
    assert report(state).phase == "filling_replay"
    state.learner = LearnerStatus(updates=8)
    assert report(state).limited_by.cause == "no_actors"
    assert report(state).phase == "training"


def test_other_programs_come_after_absent_parts_and_before_busy_ones():
    state = make_state()
    report_all(state, wait_share=0.0)
    state.host_use = HostUse(cores=8, busy=8.0, own=3.0)
    assert (report(state).limited_by.cause, report(state).limited_by.have) == ("other_programs", 5.0)
    # Programs of the run that its launcher did not start are no other programs.
    beat(state, "evaluator", 3, host=host_name(), resources=Resources(cores=3.0, memory_bytes=1))
    state.learner_resources = Resources(cores=2.0, memory_bytes=1)
    assert report(state).limited_by.have == 3.0
    beat(state, "evaluator", 3, host="another", resources=Resources(cores=8.0, memory_bytes=1))
    assert report(state).limited_by.have == 5.0
    state.host_use = HostUse(cores=8, busy=8.0, own=7.5)
    assert report(state).limited_by.cause == "busy_learner"
    state.host_use = HostUse(cores=8, busy=8.0, own=3.0)
    state.members.forget(2)
    assert report(state).limited_by.cause == "no_actors"


def test_a_serial_run_has_no_bottleneck():
    config, exploration = Config(actor=ActorConfig(num_actors=4)), Exploration("epsilon", np.full(4, 0.1))
    state = RunState(config, name="run", folder="runs/run", exploration=exploration, finds_bottleneck=False)
    report_all(state)
    assert report(state).limited_by is None
    assert not [tag for tag in state.scalars() if tag.startswith("limited_by/")]


def test_figures_of_actor_hosts_are_combined_for_the_curves():
    state = make_state()
    assert state.scalars() == {"refused/connections": 0}
    for session, wait_share in enumerate([0.25, 0.75]):
        figures = {"wait_share": wait_share, "parameter_bytes_per_second": 1_000.0, "steps_per_second": 30.0}
        beat(state, "actor", session, **figures)
    assert state.scalars() == {
        "actors/wait_share": 0.75,
        "actors/parameter_bytes_per_second": 2_000,
        "actors/steps_per_second": 60,
        "refused/connections": 0,
    }


def test_the_status_has_the_shares_of_work_and_waits():
    state = make_state()
    beat(state, "actor", wait_share=0.25, parameter_bytes_per_second=8.0)
    state.learner = LearnerStatus(wait_share=0.5, loader_busy_share=0.75)
    status = report(state)
    assert status.actors.wait_share == 0.25
    assert status.actors.parameter_bytes_per_second == 8
    assert (status.learner.wait_share, status.learner.loader_busy_share) == (0.5, 0.75)


def test_missing_actors_are_the_bottleneck():
    state = make_state()
    report_all(state)
    state.members.forget(2)
    assert report(state).limited_by.cause == "no_actors"


def test_the_newer_start_of_a_server_counts():
    clock = Clock()
    state = make_state(clock)
    beat(state, "replay", num_inserted=500, size=400)
    clock.now += 1
    beat(state, "replay", 3, num_inserted=600, size=450)
    assert report(state).replay.size == 450
    assert state.num_steps == 600


def report_shard(state, shard, session=None, **fields):
    beat(state, "replay", 10 + shard if session is None else session, shard=shard, **fields)


def test_the_replay_summary_is_the_sum_over_shards():
    clock = Clock()
    state = make_state(clock, num_shards=2)
    report_shard(state, 0, session=1, num_inserted=90, size=90, num_drawn=900)
    clock.now += 1
    report_shard(state, 0, num_inserted=100, size=80, num_drawn=1_000)
    report_shard(state, 1, num_inserted=300, size=240, num_drawn=1_000, inserts_per_second=1.5, busy_share=0.5)
    report_shard(state, 0, session=10, num_inserted=100, size=80, num_drawn=1_000, busy_share=0.3)
    status = report(state)
    assert state.num_steps == status.steps == 400
    assert status.replay.size == 320
    assert status.replay.inserts_per_second == 1.5
    assert status.replay.samples_per_insert == 5
    assert status.replay.busy_share == 0.5  # of the busiest shard, which limits the others
    assert [row.shard for row in status.roles] == [0, 1]


def test_refusals_of_shards_are_added_by_reason():
    state = make_state(num_shards=2)
    report_shard(state, 0, refusals={"crc": 1, "magic": 2}, refused_connections={"experience no key": 1})
    report_shard(state, 1, refusals={"crc": 3}, refused_connections={"experience no key": 2})
    state.refusals, state.refused_connections = {"control": {"json": 4}}, {"control no key": 1}
    status = report(state)
    assert status.refusals == {"replay": {"crc": 4, "magic": 2}, "batches": {"refused": 0}, "control": {"json": 4}}
    assert status.refused_connections == {"experience no key": 3, "control no key": 1}


def test_refusals_of_the_learner_and_all_shards_are_in_the_curves():
    state = make_state(num_shards=2)
    state.refusals = {"control": {"json": 16, "crc": 32}}
    report_shard(state, 0, refused_connections={"experience: unknown key": 1, "priorities: unknown key": 2})
    report_shard(state, 1, refused_connections={"experience: unknown key": 4})
    state.refused_connections = {"control: unknown key": 8}
    shown = {tag: value for tag, value in state.scalars().items() if tag.startswith("refused/")}
    assert shown == {"refused/control": 48, "refused/connections": 15}
    text = (Path(__file__).parents[4] / "docs/reference/curves.md").read_text()
    assert {tag for tag in shown if f"`{tag}`" in text} == set(shown)


def test_steps_continue_after_a_new_shard_or_a_learner_restart():
    state = make_state(num_shards=2)
    state.restore(Progress(num_steps=500))  # from the checkpoint

    def steps(shard, num_inserted, store_incarnation):
        report_shard(state, shard, num_inserted=num_inserted, store_incarnation=store_incarnation)
        return state.num_steps

    assert [steps(0, 260, "a"), steps(1, 250, "b")] == [500, 510]
    assert [steps(0, 300, "a"), steps(1, 300, "b")] == [550, 600]
    assert [steps(1, 0, "c"), steps(1, 30, "c"), steps(0, 310, "a")] == [600, 630, 640]  # made anew
    assert [steps(0, 290, "d"), steps(0, 295, "d")] == [640, 645]  # restored from a slightly older snapshot


def test_transitions_that_a_new_store_lacks_are_logged(caplog):
    state = make_state(num_shards=2)
    for count, incarnation in ((260, "a"), (250, "b"), (250, "b"), (250, "c")):
        report_shard(state, 1, num_inserted=count, store_incarnation=incarnation)
    (message,) = caplog.messages
    assert "replay-1" in message
    assert " 10 " in message


def test_elapsed_time_continues_from_the_checkpoint():
    clock = Clock()
    state = make_state(clock)
    state.restore(Progress(elapsed_seconds=3_600.0))
    clock.now += 60.0
    assert state.elapsed_seconds == 3_660.0


def test_a_shard_without_a_live_server_is_absent():
    clock = Clock()
    state = make_state(clock, num_shards=2)
    members = state.members
    assert members.absent_replay == "replay-0, replay-1"
    report_shard(state, 0)
    assert members.absent_replay == "replay-1"
    report_shard(state, 1)
    assert members.absent_replay == ""
    clock.now += ABSENT_HEARTBEATS + 0.1
    report_shard(state, 0)
    assert members.absent_replay == "replay-1"
    members.forget(10)
    report_shard(state, 1)
    assert members.absent_replay == "replay-0"
    assert make_state().members.absent_replay == "replay"


def test_endpoints_are_known_when_each_shard_has_joined():
    state = make_state(num_shards=2)
    report_shard(state, 1, endpoints={"experience": "b"})
    assert state.members.all_replay_endpoints == []
    assert report(state).phase == "waiting_for_replay"
    report_shard(state, 0, endpoints={"experience": "a"})
    assert state.members.all_replay_endpoints == [{"experience": "a"}, {"experience": "b"}]
    assert report(state).phase == "filling_replay"


def test_an_absent_shard_is_the_bottleneck():
    state = make_state(num_shards=2)
    state.members.replay_endpoints = [{"experience": "a"}, {"experience": "b"}]
    state.learner = LearnerStatus(updates=7)
    beat(state, "actor")
    report_shard(state, 0)
    limit = report(state).limited_by
    assert (limit.cause, limit.subject) == ("replay_absent", "replay-1")


def test_inserts_are_wanted_while_another_shard_waits_for_them():
    """Otherwise both wait forever: a batch has a part from each shard, and one actor process inserts into both."""
    state = make_state(num_shards=2)
    report_shard(state, 0, samplers_wait_for="learner", inserts_wait=True)
    report_shard(state, 1, samplers_wait_for="inserts")
    assert state.members.inserts_wanted(0)
    assert not state.members.inserts_wanted(1)
    alone = make_state()
    report_shard(alone, 0, samplers_wait_for="inserts")
    assert not alone.members.inserts_wanted(0)


def test_a_run_without_a_replay_server_has_no_replay_figures():
    """Otherwise its curve would have empty rows."""
    assert make_state().members.replay is None


@pytest.mark.parametrize("shard", [2, -1])
def test_an_unknown_shard_is_refused(shard):
    state = make_state(num_shards=2, max_steps=1_000)
    with pytest.raises(ValueError, match=rf"shard {shard}\b"):
        report_shard(state, shard, num_inserted=2**62)
    assert (state.num_steps, state.reached_limit(), len(state.members)) == (0, None, 0)


def test_the_longest_status_fits_into_an_answer():
    longest = "\U0001f600" * MAX_TEXT
    waiting = Waiting("learner", longest, 1e300, 1e300, longest, 1e300)
    state = make_state(num_shards=64)
    for shard in range(64):
        counts = {f"{shard} {number} {longest}"[:MAX_TEXT]: 2**62 for number in range(64)}
        report_shard(state, shard, refusals=counts, refused_connections=counts, waiting=waiting)
    for session in range(1_000, 1_000 + MAX_MEMBERS - 64):
        beat(state, "actor", session, host=longest, waiting=waiting)
    with pytest.raises(ValueError, match=str(MAX_MEMBERS)):
        beat(state, "actor", 999)
    status = report(state)
    assert len(encode_json(status)) < MAX_JSON_BYTES
    assert sum(row.role == "replay" for row in status.roles) == 64
    assert (len(status.roles), status.more_roles) == (MAX_ROWS, MAX_MEMBERS - MAX_ROWS)
