"""Faults are drawn from a seed, and the environment of the audit never repeats a transition."""

from collections import Counter

import numpy as np
import pytest

from apexreplay.errors import UsageError
from chaos import faults
from chaos.environment import LONGEST_EPISODE, AuditEnvironment
from chaos.faults import BESIDE, CHILDREN, KINDS, VICTIMS, draw, draw_kills, make_garbage
from chaos.proxy import PAIRS


def test_the_same_seed_draws_the_same_faults_and_another_one_others():
    assert draw(3, 600, 30) == draw(3, 600, 30) != draw(4, 600, 30)


def test_every_kind_occurs_once_before_any_occurs_again():
    faults = draw(0, 30 * (2 * len(KINDS) + 1), 30)
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 2)
    assert sorted(fault.at for fault in faults) == [fault.at for fault in faults]
    assert all(fault.at >= 24 for fault in faults)
    assert all(fault.target in fault.sentence() or fault.target == "every port" for fault in faults)
    assert {fault.kind for fault in draw(0, 600, 30, ["cut", "kill"])} == {"cut", "kill"}


@pytest.mark.parametrize("kinds", [[], ["flood"]])
def test_unknown_kinds_of_faults_are_refused(kinds):
    with pytest.raises(UsageError, match="--faults must"):
        draw(0, 600, 30, kinds)


def test_kinds_that_need_root_are_refused_to_others(monkeypatch):
    monkeypatch.setattr(faults, "KINDS", faults.EVERY_KIND[:-1])
    assert "plant" not in {fault.kind for fault in draw(0, 600, 30, faults.KINDS)}
    with pytest.raises(UsageError, match="plant needs root"):
        draw(0, 600, 30, ["plant"])


def test_each_victim_and_each_duration_occurs():
    drawn = draw(0, 30 * 200 * len(KINDS), 30)
    targets = {kind: {fault.target for fault in drawn if fault.kind == kind} for kind in KINDS}
    seconds = {kind: sorted(fault.seconds for fault in drawn if fault.kind == kind) for kind in KINDS}
    assert targets["kill"] == {*VICTIMS, *CHILDREN}
    assert {victim for pair in targets["pair"] for victim in pair.split(" + ")} == targets["kill"]
    assert targets["stop"] == {*VICTIMS, "learner's coordinator"}
    assert targets["cut"] == targets["delay"] == {*PAIRS}
    assert targets["neighbour"] == {*BESIDE}
    assert 1 <= seconds["stop"][0] < 2 < 80 < seconds["stop"][-1] <= 90
    assert 2 <= seconds["cut"][0] < 3 < 50 < seconds["cut"][-1] <= 60
    assert seconds["clock"][0] < -80_000
    assert seconds["clock"][-1] > 80_000


def test_victims_are_killed_in_each_round_and_rare_ones_in_every_fifth():
    killed = draw_kills(1, 50, ("actor", "learner", "learner's loader"), ("replay", "launcher"))
    assert killed == draw_kills(1, 50, ("actor", "learner", "learner's loader"), ("replay", "launcher"))
    counts = Counter(killed)
    assert counts["actor"] + counts["actor's child"] == counts["learner"] == counts["learner's loader"] == 50
    assert counts["replay"] + counts["replay's child"] == counts["launcher"] == 10
    assert counts["actor"] > 10 < counts["actor's child"]
    assert "launcher's child" not in killed


def test_garbage_has_several_kinds_and_is_repeatable():
    assert make_garbage(5) == make_garbage(5) != make_garbage(6)
    assert len({payload[:12] for payload in make_garbage(5)}) >= 3


def test_all_observations_differ_over_episodes_and_environments():
    observations = []
    for seed in (1, 1, 2):
        env = AuditEnvironment()
        observations.append(env.reset(seed=seed)[0])
        for _ in range(3 * LONGEST_EPISODE):
            observation, _, terminated, truncated, _ = env.step(0)
            assert env.observation_space.contains(observation)
            observations.append(observation)
            if terminated or truncated:
                observations.append(env.reset()[0])
    assert len({observation.tobytes() for observation in observations}) == len(observations)


def test_the_right_action_and_both_ways_to_end_are_there():
    env = AuditEnvironment()
    observation, _ = env.reset(seed=0)
    endings = Counter()
    for _ in range(20 * LONGEST_EPISODE):
        right = int(observation[3])
        action = int(np.random.default_rng(len(endings)).integers(2))
        observation, reward, terminated, truncated, _ = env.step(action)
        assert reward == float(action == right)
        assert not (terminated and truncated)
        if terminated or truncated:
            endings[terminated] += 1
            observation, _ = env.reset()
    assert endings[True] >= 5 <= endings[False]
