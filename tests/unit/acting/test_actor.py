"""Actors act on the newest parameters only, wait when they must, and report raw full-game scores."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from support.builders import VECTORS

from apex.acting.actor import ActingPolicy, Actor
from apex.acting.episode_scores import EpisodeScores
from apex.acting.host import ActorHost, WorkerFigures
from apex.acting.segment_builder import SegmentBuilder
from apex.acting.worker import acts_in_bfloat16
from apex.algorithms.interface import Decision
from apex.config import ActorConfig, Config, EnvironmentConfig, NetworkConfig
from apex.dqn.algorithm import DqnAgent
from apex.facts import Waiting
from apex.metric_tags import actor_tags
from apex.runtime.lifecycle import Stop
from apex.types import Exploration, Parameters, Schema, Step, Stream

E = 2
EXPLORATION = Exploration("epsilon", np.array([0.00066, 0.1]))
STREAMS = [Stream(3, 1), Stream(1, 1)]


class Counting(torch.nn.Module):
    """Q-values that tell which parameters made them: `level` for action 1, 0 for action 0."""

    def __init__(self):
        super().__init__()
        self.level = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        return torch.stack([torch.zeros(len(observation)), self.level.expand(len(observation))], 1)


class Showing(Counting):
    """Q-values that are the observation's own."""

    def forward(self, observation):
        return observation[:, -1, :2] + 0 * self.level


class Tape:
    """An environment, a link and parameters in one; everything that happens to it is written down."""

    num_envs = E
    action_mask = None

    def __init__(self):
        self.words = []
        self.blocked = False
        self.newest = None
        self.actions = []
        self.truncates = False
        self.versions = []
        self.in_flight = 0

    def observation(self, value=0.0):
        return np.full((E, 1, 4), value, np.float32)

    def reset(self):
        self.words.append("reset")
        return self.observation()

    def step(self, actions):
        self.words.append("step")
        self.actions.append(actions.tolist())
        no = np.zeros(E, bool)
        truncated = np.array([self.truncates, False])
        return Step(self.observation(1), np.ones(E, np.float32), no, truncated, no, self.observation(9))

    def picture(self):
        raise NotImplementedError

    def close(self):
        self.words.append("close")

    def send(self, cuts, version):
        self.cuts = cuts
        self.words.append(f"send {len(cuts)}")
        self.versions.append(version)

    def pump(self, timeout=0.0):
        self.words.append("pump" if not timeout else "wait for receipts")
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


def test_waits_for_the_first_parameters():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    assert not actor.step(0.0)
    assert tape.words == ["reset"]
    assert actor.wait.waiting.what == "parameters"
    publish(tape, 1, 1.0)
    assert actor.step(0.0)
    assert actor.wait.waiting is None


def test_a_users_layers_that_only_train_are_at_rest():
    network = torch.nn.Sequential(Counting(), torch.nn.Dropout(0.5))
    make_actor(Tape(), network)
    assert not any(module.training for module in network.modules())


def test_looks_for_newer_parameters_every_period():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 1.0)
    actor.step(0.0)
    publish(tape, 2, -1.0)
    for _ in range(3):
        actor.step(0.0)
    assert tape.actions == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_sends_after_every_segment_with_the_version_that_acted():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 4, 1.0)
    for _ in range(5):
        actor.step(0.0)
    assert tape.words == [
        "reset",
        *["pump", "step"] * 2,
        *["pump", "send 0", "step", "pump", "step"],
        *["pump", "send 2", "step"],
    ]
    assert tape.versions == [400, 400]


def test_a_segment_names_the_parameters_that_chose_its_actions_although_newer_ones_came_before_it_is_sent():
    tape = Tape()
    actor = make_actor(tape, segment_length=3)  # as many steps as between two looks for parameters
    actor.begin()
    for number in (1, 2, 3, 4):
        publish(tape, number, 1.0)
        for _ in range(3):
            actor.step(0.0)
    actor.end()
    assert tape.versions == [100, 200, 300, 400]


def test_pauses_while_the_window_is_full():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 1.0)
    tape.blocked = True
    assert not actor.step(0.1)
    assert tape.words == ["reset", "wait for receipts"]
    assert actor.wait.waiting.what == "receipts"
    tape.blocked = False
    assert actor.step(0.1)


def test_looks_for_newer_parameters_after_each_wait():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 1.0)
    actor.step(0.0)
    publish(tape, 2, -1.0)
    tape.blocked = True
    assert not actor.step(0.1)
    tape.pump = lambda timeout: setattr(tape, "blocked", False)
    assert actor.step(0.1)
    assert tape.actions == [[1, 1], [0, 0]]


def test_at_its_end_it_sends_what_is_complete():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 1.0)
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    assert tape.words[-1] == "send 1"  # The stream that was truncated; the other's window is open.


def test_at_its_end_it_waits_for_its_last_receipts_but_not_for_ever():
    tape = Tape()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 1.0)
    actor.step(0.0)
    tape.in_flight = 3
    actor.end(10.0)
    assert tape.words[-3:] == ["wait for receipts"] * 3
    tape.in_flight = 3
    actor.end(0.0)
    assert tape.in_flight == 3


def test_a_truncated_episode_is_judged_by_its_final_observation():
    """The final observation shows 9, every other one 0 or 1, and the network's values are what it is shown."""
    tape = Tape()
    actor = make_actor(tape, network=Showing())
    actor.begin()
    publish(tape, 1, 1.0)
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
    """Only action 0 is allowed, and in final states only action 1."""

    action_mask = np.array([[True, False]] * E)

    def step(self, actions):
        return super().step(actions)._replace(action_mask=self.action_mask, final_mask=~self.action_mask)


def test_what_a_mask_forbids_is_neither_played_nor_expected():
    """The network prefers action 1 everywhere: its value is 5, that of action 0 is 0."""
    tape = Masked()
    actor = make_actor(tape)
    actor.begin()
    publish(tape, 1, 5.0)
    actor.step(0.0)
    tape.truncates = True
    actor.step(0.0)
    actor.end()
    assert tape.actions == [[0, 0]] * 2
    priorities = [cut.records["priority"].tolist() for cut in tape.cuts]
    assert priorities[0] == pytest.approx([1 + 0.9 * 1 + 0.9**2 * 5, 1 + 0.9 * 5])  # truncated after the second step


def test_an_algorithm_that_plays_what_a_mask_forbids_is_stopped():
    class Careless(DqnAgent):
        def decide(self, *_):
            return Decision(np.array([0, 1]), np.zeros(2), lambda action: np.zeros(2))

    tape = Masked()
    actor = make_actor(tape, agent=Careless(Counting()))
    actor.begin()
    publish(tape, 1, 5.0)
    with pytest.raises(ValueError, match=r"chose actions \[0, 1\], one of which its action mask forbids"):
        actor.step(0.0)


def test_an_actor_that_never_acted_has_nothing_to_send():
    tape = Tape()
    actor = make_actor(tape)
    actor.end()
    actor.begin()
    actor.end()
    assert tape.words == ["reset"]


def step_of(rewards, ended):
    none = np.zeros(len(rewards), bool)
    observation = np.zeros((len(rewards), 1, 4), np.float32)
    return Step(observation, np.array(rewards, np.float32), np.array(ended), none, none, observation)


def test_scores_are_raw_per_actor_and_per_full_game():
    shared = EpisodeScores(STREAMS, EXPLORATION, num_actors=4)
    shared.add(step_of([100, 1], [False, False]))
    assert shared.take() == {}
    shared.add(step_of([-3, 1], [True, False]))
    shared.add(step_of([7, 1], [True, True]))
    assert shared.take() == {
        "actors/score_0003_epsilon_0.00066": (97 + 7) / 2,
        "actors/score_0001_epsilon_0.10000": 3,
        "actor_highest_id/score": (97 + 7) / 2,
        "actor_highest_id/length": 1.5,
        "actors/mean_score": (97 + 7 + 3) / 3,
        "actors/episodes": 3,
    }
    assert shared.take() == {}


def test_all_tags_of_a_runs_actors_are_known_beforehand():
    shared = EpisodeScores(STREAMS, EXPLORATION, num_actors=4)
    shared.add(step_of([1, 1], [False, False])._replace(failed=np.array([True, True])))
    shared.add(step_of([1, 1], [True, True]))
    known = actor_tags([0.4, 0.1, 0.02, 0.00066])
    assert known - shared.take().keys() == {"actors/score_0000_epsilon_0.40000", "actors/score_0002_epsilon_0.02000"}
    assert len(known) == 4 + 5


def test_a_game_that_a_fault_cut_off_has_no_score_and_is_counted():
    shared = EpisodeScores(STREAMS, EXPLORATION, num_actors=4)
    shared.add(step_of([100, 1], [False, False]))
    shared.add(step_of([7, 1], [False, False])._replace(failed=np.array([True, False])))
    assert shared.take() == {}
    shared.add(step_of([5, 1], [True, False]))
    scalars = shared.take()
    assert (scalars["actor_highest_id/score"], scalars["actor_highest_id/length"]) == (5, 1)
    assert (scalars["actors/episodes"], scalars["actors/environment_faults"]) == (1, 1)


def test_only_the_highest_id_writes_the_highest_ids_curve():
    shared = EpisodeScores(STREAMS, EXPLORATION, num_actors=9)
    shared.add(step_of([1, 1], [True, True]))
    assert "actor_highest_id/score" not in shared.take()


@pytest.mark.parametrize("sizes", [[16], [16, 8]])
def test_a_host_counts_the_steps_of_all_its_streams(sizes):
    figures = WorkerFigures(len(sizes))
    host = ActorHost(None, figures, sizes)
    assert host.status().waiting == Waiting("parameters")
    figures.rows[:, 0] = 10
    status = host.status()
    assert status.num_steps == 10 * sum(sizes)
    assert status.steps_per_second > 0
    assert status.waiting is None


def test_a_host_counts_its_one_copy_of_the_parameters():
    """However many workers it has: they read the board."""
    stop, published = Stop(), []

    class Subscriber:
        left = 3

        def receive(self, timeout):
            self.left -= 1
            if self.left == 0:
                stop.request()
            return Parameters(7, np.zeros(1_000, np.float32))

    class Board:
        def publish(self, parameters):
            published.append(parameters.version)

    host = ActorHost(Board(), WorkerFigures(4), [16] * 4)
    before = time.monotonic()
    host.run(Subscriber(), stop, lambda: None)
    time.sleep(0.05)
    rate = host.status().parameter_bytes_per_second
    assert published == [7] * 3
    assert 12_000 / (time.monotonic() - before + 1.0) < rate <= 12_000 / 0.05


@pytest.mark.parametrize(
    ("asked", "width", "has", "expected"),
    [
        ("auto", 1.0, True, True),
        ("auto", 0.25, True, False),  # Where it is too narrow, bfloat16 takes longer.
        ("auto", 1.0, False, False),
        ("on", 0.25, False, True),
        ("off", 1.0, True, False),
    ],
)
def test_each_host_chooses_its_number_format(asked, width, has, expected):
    config = Config(actor=ActorConfig(bfloat16=asked), network=NetworkConfig(width=width))
    pixels = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
    assert acts_in_bfloat16(config, pixels, has_bfloat16=has) == expected


def test_the_first_words_that_a_worker_left_are_the_hosts_last_ones():
    figures = WorkerFigures(3)
    assert figures.last_words == ""
    figures.leave_words(1, "environment 3 raised KeyError: 'Tür'")
    assert figures.last_words == "environment 3 raised KeyError: 'Tür'"
    figures.leave_words(0, "x" * 5_000)
    assert len(figures.last_words) == WorkerFigures.WORDS_BYTES
