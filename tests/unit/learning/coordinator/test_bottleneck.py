"""Who limits a run: in each state the part that is named is the one that would help, and so is its setting."""

from __future__ import annotations

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


def test_inserts_that_wait_for_a_learner_that_works_name_the_learner_and_the_ratio():
    found = limit(replay={"inserts_wait": True}, wait_share=0.1)
    assert found.part == "learner"
    assert "inserts wait for the learner to keep the ratio of 6 samples per insert" in found.why
    assert "--replay.samples-per-insert" in found.setting


def test_actors_that_wait_for_the_learners_sake_do_not_make_the_window_too_small():
    assert limit(replay={"inserts_wait": True}, actor={"wait_share": 0.9}).setting != "a larger --actor.window"
    assert limit(actor={"wait_share": 0.9}).setting == "a larger --actor.window"


def test_more_loaders_are_advised_where_they_work_at_the_limit_or_draw_for_themselves():
    for draws in (True, False):
        assert limit(loader_busy_share=0.9, loaders_draw=draws).setting == "more --learner.num-loaders"
    assert "--learner.num-loaders" in limit(loader_busy_share=0.1, loaders_draw=True).setting
    assert "--replay.num-samplers" in limit(loader_busy_share=0.1, loaders_draw=False).setting


def test_where_nobody_works_at_the_limit_but_all_want_a_core_the_processor_is_named():
    found = limit(load_per_core=2.5, loaders_draw=True)
    assert found.part == "processor"
    assert "2.5 threads compete for each core" in found.why
    assert limit(load_per_core=2.5, loader_busy_share=0.9).part == "loaders"


@pytest.mark.parametrize(("drawn", "part"), [(800, "learner"), (8_000, "learner"), (205_000, "actors")])
def test_without_a_ratio_a_learner_that_draws_the_same_again_and_again_lacks_actors(drawn, part):
    """5 steps a second against two batches of 512."""
    found = limit(FREE, {"num_drawn": drawn}, wait_share=0.0)
    assert found.part == part
    if part == "actors":
        assert found.why == "each transition is drawn 205 times on average"
    assert limit(RATIO, {"num_drawn": drawn}, wait_share=0.0).part == "learner"


def test_while_the_memory_fills_actors_limit_and_then_nobody_is_named():
    def limit_of_filling(size, absent="", actors=(ACTOR,)):
        return find_limit_of_filling(RATIO, actors, replace(REPLAY, size=size), absent)

    found = limit_of_filling(12_345)
    assert found.part == "actors"
    assert found.why == "the memory has 12,345 of the 50,000 transitions that sampling needs"
    assert limit_of_filling(50_000) is None
    assert limit_of_filling(3, "shard 1").part == "replay"
    assert limit_of_filling(3, actors=()).why == "no actor has joined yet"
