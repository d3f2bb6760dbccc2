"""The bottleneck of a run: the part that limits it, the cause, and the settings that would help."""

import pytest
from msgspec.structs import replace
from support.messages import ACTOR, REPLAY

from apex.config import Config, ReplayConfig
from apex.learning.coordinator.bottleneck import find_limit, find_limit_of_filling
from apex.transport.messages.status import LearnerStatus

RATIO = Config(replay=ReplayConfig(samples_per_insert=6))
FREE = Config(replay=ReplayConfig(samples_per_insert=0))
FULL = replace(REPLAY, size=400_000, num_inserted=1_000, num_drawn=800)


def limit(config=RATIO, replay=None, actor=None, **learner):
    learner = LearnerStatus(**{"wait_share": 0.9, **learner})
    return find_limit(config, [replace(ACTOR, **(actor or {}))], replace(FULL, **(replay or {})), learner, "")


def test_a_busy_learner_that_delays_inserts_is_named_with_the_ratio():
    found = limit(replay={"inserts_wait": True}, wait_share=0.1)
    assert (found.part, found.cause, found.need) == ("learner", "busy_learner_delays_inserts", 6)
    assert found.share == pytest.approx(0.9)
    assert "replay.samples_per_insert" in found.decrease


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


def test_actors_limit_a_run_until_the_memory_has_enough_transitions():
    def limit_of_filling(size, absent="", actors=(ACTOR,)):
        return find_limit_of_filling(RATIO, actors, replace(REPLAY, size=size), absent)

    found = limit_of_filling(12_345)
    assert (found.part, found.cause, found.have, found.need) == ("actors", "memory_fills", 12_345, 50_000)
    assert limit_of_filling(50_000) is None
    assert limit_of_filling(3, "replay-1").subject == "replay-1"
    assert limit_of_filling(3, actors=()).cause == "no_actors"
