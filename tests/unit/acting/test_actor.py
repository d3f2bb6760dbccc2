"""Actors act with the newest parameters, pause while they must, and report the raw scores of full games."""

import math

import numpy as np
import pytest
import torch
from support.builders import VECTORS

from apex.acting.actor import ActingPolicy, Actor, EpisodeScores
from apex.acting.segment_builder import SegmentBuilder
from apex.algorithms.interface import Decision
from apex.config import ActorConfig, EnvironmentConfig
from apex.dqn.algorithm import DqnAgent
from apex.types import Exploration, Parameters, Step
from apexreplay.types import Stream

E = 2
STREAMS = [Stream(3, 1), Stream(1, 1)]


class Counting(torch.nn.Module):
    """Q-values: `level`, the only parameter, for action 1, and 0 for action 0."""

    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return torch.stack([torch.zeros(len(observation)), self.level.expand(len(observation))], 1)


class Copying(Counting):
    """Q-values that are equal to the observation."""

    def forward(self, observation):
        return observation[:, -1, :2] + 0 * self.level


class Tape:
    """An environment, a link and parameters. Records all calls."""

    num_envs = E
    action_mask = None

    def __init__(self):
        self.calls = []
        self.blocked = False
        self.newest = None
        self.actions = []
        self.truncates = False
        self.versions = []
        self.in_flight = 0

    def observation(self, value=0.0):
        return np.full((E, 1, 4), value, np.float32)

    def reset(self):
        self.calls.append("reset")
        return self.observation()

    def step(self, actions):
        self.calls.append("step")
        self.actions.append(actions.tolist())
        no = np.zeros(E, bool)
        truncated = np.array([self.truncates, False])
        return Step(self.observation(1), np.ones(E, np.float32), no, truncated, no, self.observation(9))

    def send(self, cuts, version):
        self.cuts = cuts
        self.calls.append(f"send {len(cuts)}")
        self.versions.append(version)

    def pump(self, timeout=0.0):
        self.calls.append("pump" if not timeout else "wait")
        self.in_flight = max(0, self.in_flight - 1)

    def newer(self, known):
        if self.newest is None or self.newest[0] <= known:
            return None
        return self.newest


def make_actor(tape, network=None, agent=None, **settings):
    config = ActorConfig(num_actors=4, gamma=0.9, parameters_period=3, **{"segment_length": 2, **settings})
    environment = EnvironmentConfig(clip_rewards=False, life_loss_terminates=False)
    return Actor(
        config,
        tape,
        ActingPolicy(agent or DqnAgent(network or Counting()), tape),
        STREAMS,
        Exploration("epsilon", np.full(4, 1e-9)),
        builder=SegmentBuilder(config, environment, VECTORS, E),
        link=tape,
        rng=np.random.default_rng(0),
    )


def publish(tape, number, level):
    tape.newest = (number, Parameters(100 * number, np.array([level], np.float32)))


def begin(tape, **options):
    """Returns an actor that has reset its environment and can load its first parameters."""
    actor = make_actor(tape, **options)
    actor.begin()
    publish(tape, 1, 1.0)
    return actor


def test_an_actor_waits_for_the_first_parameters():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    assert not actor.step(0.0)
    assert tape.calls == ["reset"]
    assert actor.wait.waiting.what == "parameters"
    publish(tape, 1, 1.0)
    assert actor.step(0.0)
    assert actor.wait.waiting is None


def test_networks_act_in_evaluation_mode():
    network = torch.nn.Sequential(Counting(), torch.nn.Dropout(0.5))
    make_actor(Tape(), network)
    assert not any(module.training for module in network.modules())


def test_newer_parameters_are_loaded_once_a_period():
    tape = Tape()
    actor = begin(tape)
    actor.step(0.0)
    publish(tape, 2, -1.0)
    for _ in range(3):
        actor.step(0.0)
    assert tape.actions == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_segments_are_sent_with_the_version_that_acted():
    tape = Tape()
    actor = begin(tape)
    publish(tape, 4, 1.0)
    for _ in range(5):
        actor.step(0.0)
    steps = [*["pump", "step"] * 2, *["pump", "send 0", "step", "pump", "step"], *["pump", "send 2", "step"]]
    assert tape.calls == ["reset", *steps]
    assert tape.versions == [400, 400]


def test_the_version_of_a_segment_is_not_that_of_parameters_loaded_later():
    tape = Tape()
    actor = begin(tape, segment_length=3)  # equal to the period of the parameters
    for number in (1, 2, 3, 4):
        publish(tape, number, 1.0)
        for _ in range(3):
            actor.step(0.0)
    actor.end()
    assert tape.versions == [100, 200, 300, 400]


def test_an_actor_pauses_while_the_window_is_full():
    tape = Tape()
    actor = begin(tape)
    tape.blocked = True
    assert not actor.step(0.1)
    assert tape.calls == ["reset", "wait"]
    assert actor.wait.waiting.what == "receipts"
    tape.blocked = False
    assert actor.step(0.1)


def test_newer_parameters_are_loaded_after_each_pause():
    tape = Tape()
    actor = begin(tape)
    actor.step(0.0)
    publish(tape, 2, -1.0)
    tape.blocked = True
    assert not actor.step(0.1)
    tape.pump = lambda timeout: setattr(tape, "blocked", False)
    assert actor.step(0.1)
    assert tape.actions == [[1, 1], [0, 0]]


def test_the_end_sends_complete_transitions():
    tape = Tape()
    actor = begin(tape)
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    assert tape.calls[-1] == "send 1"  # The window of the other stream is still open.


def test_the_end_waits_for_receipts_until_a_timeout():
    tape = Tape()
    actor = begin(tape)
    actor.step(0.0)
    tape.in_flight = 3
    actor.end(10.0)
    assert tape.calls[-3:] == ["wait"] * 3
    tape.in_flight = 3
    actor.end(0.0)
    assert tape.in_flight == 3


def test_a_truncated_episode_bootstraps_from_its_final_observation():
    """The final observation is 9, other observations are 0 or 1."""
    tape = Tape()
    actor = begin(tape, network=Copying())
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    (cut,) = tape.cuts
    assert cut.records["priority"][0] == pytest.approx(abs(1 + 0.9 * 9 - 0), rel=1e-5)


class Overriding(Tape):
    """An environment that executes action 0 in each step."""

    def step(self, actions):
        return super().step(actions)._replace(played=np.zeros(E, np.int64))


def test_segments_contain_the_executed_actions_and_their_values():
    tape = Overriding()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 5.0)
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    assert tape.actions == [[1, 1]]
    (cut,) = tape.cuts
    assert cut.records["action"].tolist() == [0]
    assert cut.records["priority"] == pytest.approx([1 + 0.9 * 5 - 0])


class Masked(Tape):
    """Allows only action 0, and in final states only action 1."""

    action_mask = np.array([[True, False]] * E)

    def step(self, actions):
        return super().step(actions)._replace(action_mask=self.action_mask, final_mask=~self.action_mask)


def test_forbidden_actions_are_neither_chosen_nor_used_as_target():
    """The value of action 1 is 5 everywhere, that of action 0 is 0."""
    tape = Masked()
    actor = begin(tape)
    publish(tape, 1, 5.0)
    actor.step(0.0)
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    assert tape.actions == [[0, 0]] * 2
    priorities = [cut.records["priority"].tolist() for cut in tape.cuts]
    assert priorities[0] == pytest.approx([1 + 0.9 * 1 + 0.9**2 * 5, 1 + 0.9 * 5])  # truncated after the second step


def test_an_algorithm_that_chooses_a_forbidden_action_is_an_error():
    class Careless(DqnAgent):
        def decide(self, *_):
            return Decision(np.array([0, 1]), np.zeros(2), lambda action: np.zeros(2))

    actor = begin(Masked(), agent=Careless(Counting()))
    with pytest.raises(ValueError, match=r"\[0, 1\].*mask"):
        actor.step(0.0)


def test_an_actor_that_never_acted_sends_nothing():
    tape = Tape()
    actor = make_actor(tape)
    actor.end()
    actor.begin()
    actor.end()
    assert tape.calls == ["reset"]


def step_of(rewards, ended, failed=None, metrics=None):
    none = np.zeros(len(rewards), bool)
    observation = np.zeros((len(rewards), 1, 4), np.float32)
    failed = None if failed is None else np.array(failed)
    step = Step(observation, np.array(rewards, np.float32), np.array(ended), none, none, observation, failed)
    return step._replace(metrics=metrics or {})


def test_scores_are_sums_of_raw_rewards_over_full_games():
    scores = EpisodeScores(STREAMS)
    scores.add_step(step_of([100, 1], [False, False]))
    assert scores.take() is None
    scores.add_step(step_of([-3, 1], [True, False]))
    scores.add_step(step_of([7, 1], [True, True]))
    assert scores.take().actors == [(3, 2, 97 + 7, 3), (1, 1, 3, 3)]
    assert scores.take() is None


def test_games_ended_by_a_fault_are_counted_without_a_score():
    scores = EpisodeScores(STREAMS)
    scores.add_step(step_of([100, 1], [False, False]))
    scores.add_step(step_of([7, math.nan], [False, False], [True, False]))
    assert (scores.take().faults, scores.take()) == (1, None)
    scores.add_step(step_of([5, 1], [True, False]))
    assert scores.take().actors == [(3, 1, 5, 1)]


def test_metrics_are_summed_over_the_games_of_all_streams():
    scores = EpisodeScores(STREAMS)
    scores.add_step(step_of([1, 1], [True, True], metrics={0: {"laps": 2.0, "success": 1.0}, 1: {"success": 0.0}}))
    scores.add_step(step_of([1, 1], [True, False], metrics={0: {"success": 1.0}}))
    assert scores.take().metrics == {"laps": (1, 2.0), "success": (3, 2.0)}
    assert scores.take() is None
