"""The bottleneck of a run: the part that limits it, the cause, and the settings that would help."""

import pytest
from msgspec.structs import replace
from support.messages import ACTOR, REPLAY

from apex.config import Config, ReplayConfig, RunConfig, from_dict
from apex.facts import Bottleneck
from apex.learning.coordinator.bottleneck import find_absent, find_limit, find_other_programs, keep_feasible
from apex.runtime.resources import HostUse
from apex.transport.messages.status import LearnerStatus

RATIO = Config(replay=ReplayConfig(samples_per_insert=6))
FREE = Config(replay=ReplayConfig(samples_per_insert=0))
FULL = replace(REPLAY, size=400_000, num_inserted=1_000, num_drawn=800)


def limit(config=RATIO, replay=None, actor=None, num_actors=8, **learner):
    learner = LearnerStatus(**{"wait_share": 0.9, **learner})
    return find_limit(config, [replace(ACTOR, **(actor or {}))], num_actors, replace(FULL, **(replay or {})), learner)


def test_a_busy_learner_that_delays_inserts_is_named_with_the_ratio():
    found = limit(replay={"inserts_wait": True}, wait_share=0.1)
    assert (found.part, found.cause, found.need) == ("learner", "busy_learner_delays_inserts", 6)
    assert found.share == pytest.approx(0.9)
    assert "replay.samples_per_insert" in found.decrease


def test_more_actors_than_are_useful_are_named_with_the_useful_number():
    found = limit(replay={"inserts_wait": True}, actor={"wait_share": 0.75}, num_actors=200, wait_share=0.1)
    assert (found.part, found.cause, found.have, found.need) == ("learner", "too_many_actors", 50, 200)
    assert found.decrease[0] == "actor.num_actors"
    for actor, config in (({"wait_share": 0.1}, RATIO), ({"wait_share": 0.75}, FREE)):
        found = limit(config, replay={"inserts_wait": config is RATIO}, actor=actor, num_actors=200, wait_share=0.1)
        assert found.cause != "too_many_actors"


def test_the_window_is_too_small_only_if_inserts_do_not_wait():
    assert "actor.window" not in limit(replay={"inserts_wait": True}, actor={"wait_share": 0.9}).increase
    assert limit(actor={"wait_share": 0.9}).increase == ("actor.window",)


def test_more_loaders_are_advised_if_they_are_busy_or_draw_themselves():
    for draws in (True, False):
        assert limit(loader_busy_share=0.9, loaders_draw=draws).increase == ("learner.num_loaders",)
    assert "learner.num_loaders" in limit(loader_busy_share=0.1, loaders_draw=True).increase
    assert "replay.num_samplers" in limit(loader_busy_share=0.1, loaders_draw=False).increase


def test_crowded_cores_are_named_if_no_part_is_busy():
    found = limit(load_per_core=2.5, loaders_draw=True)
    assert (found.part, found.have, found.learner_wait_share) == ("processor", 2.5, 0.9)
    assert limit(load_per_core=2.5, loader_busy_share=0.9).part == "loaders"


@pytest.mark.parametrize(("drawn", "part"), [(800, "learner"), (8_000, "learner"), (205_000, "actors")])
def test_repeated_draws_without_a_ratio_name_the_actors(drawn, part):
    """5 steps a second against two batches of 512."""
    found = limit(FREE, {"num_drawn": drawn}, wait_share=0.0)
    assert found.part == part
    assert found.have == (205 if part == "actors" else None)
    assert limit(RATIO, {"num_drawn": drawn}, wait_share=0.0).part == "learner"


def test_an_absent_part_is_named():
    assert find_absent([], "").cause == "no_actors"
    assert find_absent([ACTOR], "replay-1").subject == "replay-1"
    assert find_absent([ACTOR], "") is None


@pytest.mark.parametrize(
    ("busy", "own", "own_by_heartbeats", "others"),
    [
        (3.9, 1.0, 0.0, 2.9),
        (3.9, 1.0, 1.5, 2.4),  # An actor host was started by hand.
        (3.9, 3.8, 0.0, None),  # The run itself uses the cores.
        (2.0, 0.5, 0.0, None),  # Cores are idle.
    ],
)
def test_other_programs_are_named_if_they_leave_no_core_idle(busy, own, own_by_heartbeats, others):
    found = find_other_programs(HostUse(4, busy, own), own_by_heartbeats)
    assert (found and found.have) == (others and pytest.approx(others))
    assert found is None or (found.cause, found.need) == ("other_programs", 4)


def feasible(verb, setting, value, more):
    """Whether a setting with this value is advised to be changed on a machine with 4 cores; `more`: other settings."""
    tree = {}
    for name, entry in {"actor.num_actors": 64, **more, setting: value}.items():
        branch, _, leaf = name.partition(".")
        tree.setdefault(branch, {})[leaf] = entry
    found = Bottleneck(part="learner", cause="busy_learner", **{verb: (setting,)})
    found = keep_feasible(found, from_dict(tree), 4)
    return setting in getattr(found, verb)


@pytest.mark.parametrize(
    ("verb", "setting", "possible", "impossible", "more"),
    [
        ("increase", "actor.num_processes", 3, 4, {}),  # of 4 cores
        ("increase", "actor.num_processes", 1, 2, {"actor.num_actors": 2}),
        ("increase", "actor.num_processes", 1, 0, {}),  # 0: chosen on other hosts
        ("increase", "learner.num_threads", 3, 4, {}),
        ("increase", "learner.num_loaders", 3, 4, {}),
        ("increase", "replay.num_shards", 2, 4, {}),
        ("increase", "replay.samples_per_insert", 6.0, 0.0, {}),  # 0: no limit
        ("increase", "run.stuck_seconds", 300.0, 0.0, {}),
        ("increase", "actor.window", 63, 64, {}),
        ("decrease", "actor.num_processes", 2, 1, {}),
        ("decrease", "learner.num_threads", 2, 1, {}),
        ("decrease", "learner.batch_size", 4, 2, {"replay.num_shards": 2}),  # at least one transition of each shard
    ],
)
def test_settings_that_cannot_be_changed_are_not_advised(verb, setting, possible, impossible, more):
    assert feasible(verb, setting, possible, more)
    assert not feasible(verb, setting, impossible, more)


def test_a_head_gets_more_actors_by_their_number():
    waits = {"replay": {"samplers_wait_for": "inserts"}}
    head = Config(run=RunConfig(head=True), replay=RATIO.replay)
    assert "actor.num_actors" in limit(head, **waits).increase
    assert "actor.num_processes" in limit(RATIO, **waits).increase
