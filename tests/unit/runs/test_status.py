"""The status object sums up what every program says, knows when the run is over, and names what limits it."""

from __future__ import annotations

import pytest

from apex.config import Config, EvaluatorConfig, ReplayConfig, RunConfig
from apex.runs.status import ABSENT_HEARTBEATS, MAX_MEMBERS, MAX_ROWS, PARTS, RunStatus
from apex.transport.json_codec import MAX_JSON_BYTES, dump_json
from apex.transport.json_fields import MAX_STATUS, MAX_TEXT


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_status(clock=None, *, num_shards=1, **run):
    replay = ReplayConfig(samples_per_insert=6, num_shards=num_shards)
    return RunStatus(
        Config(run=RunConfig(**run), evaluator=EvaluatorConfig(), replay=replay),
        name="pong-1",
        folder="runs/pong-1",
        num_actors=4,
        clock=clock or Clock(),
    )


def nothing(tag):
    return None


def hear_all(status, replay=None, actor=None, **learner):
    status.hear(1, "replay", "h", 10, {"num_inserted": 500, "size": 400, **(replay or {})})
    status.hear(2, "actor", "h", 11, {"steps_per_second": 10.0, "rate": "10 steps/s", **(actor or {})})
    status.replay_endpoints = [{"experience": "tcp://..."}]
    status.learner = {"updates": 7, "wait_share": 0.9, **learner}


def test_says_nothing_false_before_anybody_spoke():
    report = make_status().report(nothing)
    assert report["phase"] == "waiting for replay"
    assert report["steps"] == 0
    assert report["roles"] == []
    assert report["limited_by"] is None
    assert report["evaluator"]["score"] is None


def test_a_trainer_that_reports_no_more_is_what_limits_the_run_whatever_its_last_figures_were():
    clock = Clock()
    status = make_status(clock)

    def limit_after(seconds):
        clock.now += seconds
        hear_all(status)  # The others go on.
        return status.report(nothing)["limited_by"]

    status.hear_trainer({"updates": 8})
    assert limit_after(10.0)["part"] == "wire"
    limit = limit_after(1.0)
    assert (limit["part"], limit["setting"]) == ("learner", "--run.stuck-seconds")
    assert limit["why"] == "no word from its trainer for 11 s: one long update, or it is stuck"
    status.hear_trainer({"updates": 9})
    assert limit_after(0.0)["part"] == "wire"


def test_collects_what_the_programs_say():
    clock = Clock()
    status = make_status(clock)
    hear_all(status, loss=0.5)
    status.evaluation = {"mean": 3.0, "best": 4.0, "episodes": 5, "updates": 6}
    clock.now += 2
    report = status.report({"actor_highest_id/score": 9.0}.get)
    assert report["phase"] == "training"
    assert report["steps"] == 500
    assert report["replay"]["size"] == 400
    assert report["learner"]["loss"] == 0.5
    assert report["actors"]["score"] == 9.0
    assert report["actors"]["highest_id"] == 3
    assert report["actors"]["highest_epsilon"] == pytest.approx(0.4**8)
    assert report["evaluator"] == {"score": 3.0, "best": 4.0, "episodes": 5, "updates": 6}
    assert [role["role"] for role in report["roles"]] == ["actor", "replay"]
    assert report["roles"][0] == {
        "role": "actor",
        "host": "h",
        "pid": 11,
        "last_seen_seconds": 2.0,
        "rate": "10 steps/s",
        "waiting": None,
    }


def test_phases_follow_the_run():
    status = make_status()
    status.replay_endpoints = [{"experience": "x"}]
    assert status.report(nothing)["phase"] == "filling replay"
    status.learner = {"updates": 1}
    assert status.report(nothing)["phase"] == "training"
    status.reason = "reached 5 steps"
    assert status.report(nothing)["phase"] == "finishing"
    status.finished = True
    assert status.report(nothing)["phase"] == "finished"


def test_steps_stay_when_replay_is_gone():
    status = make_status()
    hear_all(status)
    status.forget(1)
    assert status.num_steps == 500


def test_the_silent_are_forgotten():
    clock = Clock()
    status = make_status(clock)
    hear_all(status)
    clock.now += 20
    status.hear(2, "actor", "h", 11, {})
    clock.now += 15
    status.forget_silent(30.0)
    assert list(status.members) == [2]


def test_ends_by_steps_minutes_or_a_confirmed_score():
    clock = Clock()
    status = make_status(clock, max_steps=501, max_minutes=1.0, stop_score=10.0)
    hear_all(status)
    status.evaluation = {"mean": 11.0, "confirmed": False}
    assert status.end_reason() == ""
    status.evaluation = {"mean": 9.0, "confirmed": True}
    assert status.end_reason() == ""
    status.evaluation = {"mean": 10.0, "confirmed": True}
    assert status.end_reason() == "reached the score 10"
    status.evaluation = {}
    hear_all(status, replay={"num_inserted": 501})
    assert status.end_reason() == "reached 501 steps"
    clock.now += 61
    status = make_status(clock, max_minutes=1.0)
    clock.now += 60
    assert status.end_reason() == "reached 1 minutes"


@pytest.mark.parametrize(
    ("replay", "actor", "learner", "part"),
    [
        ({}, {}, {"wait_share": 0.05}, "learner"),
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
        ({}, {"wait_share": "much"}, {"wait_share": 0.9}, "wire"),
    ],
)
def test_names_the_part_that_limits(replay, actor, learner, part):
    status = make_status()
    hear_all(status, replay=replay, actor=actor, **learner)
    limited_by = status.report(nothing)["limited_by"]
    assert limited_by["part"] == part
    assert limited_by["why"]
    assert limited_by["setting"]
    shown = {tag: value for tag, value in status.scalars().items() if tag.startswith("limited_by/")}
    assert len(shown) == len(PARTS)
    assert [tag for tag, value in shown.items() if value] == [f"limited_by/{part}"]


def test_curves_show_what_actor_hosts_say_of_themselves():
    status = make_status()
    assert status.scalars() == {}
    for session, wait_share in enumerate([0.25, 0.75]):
        figures = {"wait_share": wait_share, "parameter_bytes_per_second": 1_000, "steps_per_second": 30.0}
        status.hear(session, "actor", "h", 11, figures)
    status.hear(9, "actor", "h", 12, {"wait_share": True, "steps_per_second": "many"})
    assert status.scalars() == {
        "actors/wait_share": 0.75,
        "actors/parameter_bytes_per_second": 2_000,
        "actors/steps_per_second": 60,
    }


def test_the_status_says_who_works_and_who_waits():
    status = make_status()
    status.hear(1, "actor", "h", 11, {"wait_share": 0.25, "parameter_bytes_per_second": 8})
    status.learner = {"wait_share": 0.5, "loader_busy_share": 0.75}
    report = status.report(nothing)
    assert report["actors"]["wait_share"] == 0.25
    assert report["actors"]["parameter_bytes_per_second"] == 8
    assert (report["learner"]["wait_share"], report["learner"]["loader_busy_share"]) == (0.5, 0.75)


def test_without_actors_they_are_what_limits():
    status = make_status()
    hear_all(status)
    status.forget(2)
    assert status.report(nothing)["limited_by"]["why"] == "no actor is there"


def test_of_a_program_that_was_started_again_the_newer_life_counts():
    clock = Clock()
    status = make_status(clock)
    status.hear(1, "replay", "h", 10, {"num_inserted": 500, "size": 400})
    clock.now += 1
    status.hear(3, "replay", "h", 12, {"num_inserted": 600, "size": 450})
    assert status.report(nothing)["replay"]["size"] == 450
    assert status.num_steps == 600


def test_steps_go_on_when_a_store_is_made_anew_or_restored():
    status = make_status()

    def hear(num_inserted, store_incarnation):
        status.hear(1, "replay", "h", 10, {"num_inserted": num_inserted, "store_incarnation": store_incarnation})
        return status.num_steps

    assert [hear(0, 7), hear(500, 7)] == [0, 500]
    assert [hear(0, 8), hear(30, 8)] == [500, 530]  # made anew
    assert [hear(20, 9), hear(25, 9)] == [530, 535]  # restored from a snapshot that was a little older


def hear_shard(status, shard, session=None, **fields):
    status.hear(10 + shard if session is None else session, "replay", "h", 100 + shard, fields, shard)


def test_the_replay_memory_is_the_sum_of_its_shards_and_of_each_the_newer_life_counts():
    clock = Clock()
    status = make_status(clock, num_shards=2)
    hear_shard(status, 0, session=1, num_inserted=90, size=90, num_drawn=900, rate="x")
    clock.now += 1
    hear_shard(status, 0, num_inserted=100, size=80, num_drawn=1_000, store_incarnation="7")
    hear_shard(status, 1, num_inserted=300, size=240, num_drawn=1_000, inserts_per_second=1.5, busy_share=0.5)
    hear_shard(status, 0, session=10, num_inserted=100, size=80, num_drawn=1_000, store_incarnation="7", busy_share=0.3)
    report = status.report(nothing)
    assert status.num_steps == report["steps"] == 400
    assert report["replay"]["size"] == 320
    assert report["replay"]["inserts_per_second"] == 1.5
    assert report["replay"]["samples_per_insert"] == 5
    assert report["replay"]["busy_share"] == 0.5  # of the busiest: it is what limits
    assert [(row["shard"], row["pid"]) for row in report["roles"]] == [(0, 100), (0, 100), (1, 101)]


def test_steps_go_on_whichever_shard_is_made_anew_and_after_the_learner_was_started_again():
    status = make_status(num_shards=2)
    status.num_steps = 500  # from the checkpoint

    def hear(shard, num_inserted, store_incarnation):
        hear_shard(status, shard, num_inserted=num_inserted, store_incarnation=store_incarnation)
        return status.num_steps

    assert [hear(0, 260, "a"), hear(1, 250, "b")] == [500, 510]
    assert [hear(0, 300, "a"), hear(1, 300, "b")] == [550, 600]
    assert [hear(1, 0, "c"), hear(1, 30, "c"), hear(0, 310, "a")] == [600, 630, 640]  # made anew
    assert [hear(0, 290, "d"), hear(0, 295, "d")] == [640, 645]  # restored from a snapshot that was a little older


def test_a_shard_that_never_came_or_fell_silent_or_said_goodbye_is_absent():
    clock = Clock()
    status = make_status(clock, num_shards=2)
    assert status.absent_replay == "shard 0 of 2, shard 1 of 2"
    hear_shard(status, 0)
    assert status.absent_replay == "shard 1 of 2"
    hear_shard(status, 1)
    assert status.absent_replay == ""
    clock.now += ABSENT_HEARTBEATS + 0.1
    hear_shard(status, 0)
    assert status.absent_replay == "shard 1 of 2"
    status.forget(10)
    hear_shard(status, 1)
    assert status.absent_replay == "shard 0 of 2"
    assert make_status().absent_replay == "a replay server"


def test_endpoints_are_handed_out_when_every_shard_has_said_hello():
    status = make_status(num_shards=2)
    status.replay_endpoints[1] = {"experience": "b"}
    assert status.all_replay_endpoints == []
    assert status.report(nothing)["phase"] == "waiting for replay"
    status.replay_endpoints[0] = {"experience": "a"}
    assert status.all_replay_endpoints == [{"experience": "a"}, {"experience": "b"}]
    assert status.report(nothing)["phase"] == "filling replay"


def test_a_shard_that_is_away_is_what_limits():
    clock = Clock()
    status = make_status(clock, num_shards=2)
    status.replay_endpoints = [{"experience": "a"}, {"experience": "b"}]
    status.learner = {"updates": 7}
    status.hear(1, "actor", "h", 11, {})
    hear_shard(status, 0)
    assert status.report(nothing)["limited_by"]["why"] == "shard 1 of 2 is away"


def test_inserts_into_one_shard_are_wanted_while_samples_of_another_wait_for_inserts():
    """Else both would wait for ever: a batch has a part from each, and one actor process feeds both."""
    status = make_status(num_shards=2)
    hear_shard(status, 0, samplers_wait_for="learner", inserts_wait=True)
    hear_shard(status, 1, samplers_wait_for="inserts")
    assert status.inserts_wanted(0)
    assert not status.inserts_wanted(1)
    alone = make_status()
    hear_shard(alone, 0, samplers_wait_for="inserts")
    assert not alone.inserts_wanted(0)


def test_without_a_replay_server_there_are_no_figures_of_one():
    """Else its curve would have rows of nothing."""
    status = make_status()
    assert not [
        value for value in status.replay_status().values() if isinstance(value, int | float) and value is not False
    ]
    status.hear(1, "replay", "h", 10, {"num_inserted": 5})
    assert "busy_share" not in status.replay_status()


@pytest.mark.parametrize(("role", "shard"), [("actor", 0), ("evaluator", 0), ("replay", 2), ("replay", -1)])
def test_nobody_but_a_replay_server_of_the_run_counts_its_steps(role, shard):
    status = make_status(num_shards=2, max_steps=1_000)
    hear_shard(status, 0, num_inserted=500)
    status.hear(9, role, "h", 11, {"num_inserted": 2**62, "store_incarnation": "9"}, shard)
    assert (status.num_steps, status.end_reason()) == (500, "")


def test_the_longest_status_fits_into_an_answer_and_whoever_came_first_is_in_it():
    longest = "\U0001f600" * MAX_TEXT
    status = make_status(num_shards=64)
    for shard in range(64):
        counts = {f"{shard} {number} {longest}"[:MAX_TEXT]: 2**62 for number in range(MAX_STATUS)}
        hear_shard(status, shard, refusals=counts, refused_connections=counts, rate=longest, waiting=longest)
    for session in range(1_000, 1_000 + MAX_MEMBERS - 64):
        status.hear(session, "actor", longest, 2**31 - 1, {"rate": longest, "waiting": longest})
    with pytest.raises(ValueError, match="are here already"):
        status.hear(999, "actor", "h", 1, {})
    report = status.report(nothing)
    assert len(dump_json({"type": "status", **report})) < MAX_JSON_BYTES
    assert sum(row["role"] == "replay" for row in report["roles"]) == 64
    assert (len(report["roles"]), report["more_roles"]) == (MAX_ROWS, MAX_MEMBERS - MAX_ROWS)
