"""Tests faults of environments: a fault ends only its own episode, and its message names environment and step."""

import logging
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.environments import FACTORY, Counter, Pictures, Tokens, here, made_by_the_test, make, make_config, play

from apex.environments.factory import describe, make_environment
from apex.environments.fault_budget import FORGIVEN_STEPS, MAX_FAULTS, FaultBudget
from apex.errors import EnvironmentFailure
from apexreplay.errors import UsageError

NAME = here(made_by_the_test)


def make_faulty(fault, *, at=2, kind=Counter, num_envs=3, **options):
    """Returns environments; the first instance of number 1 has the fault at step `at`."""
    made = []

    def factory():
        made.append(kind(**options))
        made[-1].faults = {at: fault} if len(made) == 2 else {}
        return made[-1]

    FACTORY.make = factory
    return make(NAME, num_envs), made


def play_on(environment, actions):
    return [environment.step(row) for row in actions]


class Mute(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


BAD_ANSWERS = [  # fault, and what the message names
    ({"error": KeyError("door")}, "KeyError: 'door'"),
    ({"error": SystemExit(0)}, "SystemExit: 0"),
    ({"error": Mute()}, "Mute"),
    ({"error": ExceptionGroup("a", [ValueError(1)])}, "ExceptionGroup: a"),
    ({"error": StopIteration()}, "StopIteration"),
    ({"error": MemoryError()}, "MemoryError"),
    ({"reward": 10**400}, "OverflowError"),
    ({"reward": np.longdouble("1e4000")}, "reward inf"),
    ({"reward": 1j}, "reward 1j"),
    ({"reward": Fraction(1, 3)}, "reward Fraction(1, 3)"),
    ({"reward": Mute()}, "RuntimeError: no text"),
    ({"reward": float("nan")}, "reward nan"),
    ({"reward": float("-inf")}, "reward -inf"),
    ({"reward": 1e14}, "reward 1e+14"),
    ({"reward": None}, "reward None"),
    ({"reward": "much"}, "reward 'much'"),
    ({"reward": np.ones(2)}, "reward array([1., 1.])"),
    ({"observation": np.array([1, np.nan])}, "observation [1.0, nan]"),
    ({"observation": np.array([1, 1e300])}, "observation [1.0, 1e+300]"),
    ({"observation": np.zeros(3)}, "observation float64[3]"),
    ({"observation": np.zeros((1, 2))}, "observation float64[1, 2]"),
    ({"observation": None}, "observation object[]"),
    ({"observation": "ab"}, "observation <U2[]"),
    ({"observation": np.array(["a", "b"])}, "TypeError"),
    ({"observation": [1.0, [2.0]]}, "ValueError"),
    ({"observation": np.array([10**400, 0], object)}, "OverflowError"),
    ({"observation": np.full(2, 1j)}, "TypeError"),
    ({"terminated": None}, "terminated None"),
    ({"terminated": "yes"}, "terminated 'yes'"),
    ({"truncated": np.array([True, False])}, "truncated array([ True, False])"),
    ({"answer": (np.zeros(2), 1.0, False, {})}, "tuple of 4"),
    ({"answer": [np.zeros(2), 1.0, False, False, {}]}, "list of 5"),
    ({"answer": None}, "NoneType"),
]


@pytest.mark.parametrize(("fault", "named"), BAD_ANSWERS)
def test_fault_ends_the_episode_of_its_stream_only(fault, named, caplog):
    environment, made = make_faulty(fault, length=9)
    environment.reset()
    steps = [environment.step(np.zeros(3, np.int64)) for _ in range(3)]
    (message,) = caplog.messages
    assert all(part in message for part in (f"{NAME}: environment 1 of 3 ", named, "step 2", "fault 1 "))
    assert [step.failed is None for step in steps] == [True, False, True]
    assert steps[1].failed.tolist() == [False, True, False]
    # Observed: (episode, step). The others continue; the new environment is in its first episode.
    assert steps[1].observation[:, 0].tolist() == [[1, 2], [1, 0], [1, 2]]
    assert steps[2].observation[:, 0].tolist() == [[1, 3], [1, 1], [1, 3]]
    assert steps[1].reward[[0, 2]].tolist() == [5, 5]
    assert not any((step.terminated | step.truncated).any() for step in steps)
    assert [env.closed for env in made] == [False, True, False, False]


def test_fault_is_logged_as_a_warning_with_its_traceback(caplog):
    environment, _ = make_faulty({"error": KeyError("door")})
    play(environment, np.zeros((2, 3), np.int64))
    assert 'raise fault["error"]' in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("answer", "reward", "ended"),
    [
        ({"reward": np.array([2.5])}, 2.5, False),
        ({"reward": np.float64(2.5)}, 2.5, False),
        ({"reward": np.int32(2)}, 2, False),
        ({"reward": True}, 1, False),
        ({"reward": 1e13}, np.float32(1e13), False),
        ({"terminated": np.bool_(True)}, 5, True),
        ({"terminated": 1}, 5, True),
        ({"truncated": np.int64(1)}, 5, True),
        ({"info": None}, 5, False),
        ({"info": ["not a dict"]}, 5, False),
        ({"observation": np.array([1, 2], ">f4")}, 5, False),
        ({"observation": np.broadcast_to(np.float32(0), (2,))}, 5, False),
        ({"observation": np.array([2**62, 0])}, 5, False),
        ({"observation": torch.zeros(2)}, 5, False),
    ],
)
def test_unusual_but_valid_values_are_accepted(answer, reward, ended, caplog):
    environment, _ = make_faulty(answer, length=9)
    _, steps = play(environment, np.zeros((2, 3), np.int64))
    assert steps[1].reward[1] == reward
    assert bool(steps[1].terminated[1] | steps[1].truncated[1]) == ended
    assert caplog.records == []


def test_observation_outside_its_bounds_is_accepted_unchanged():
    class Sloppy(Counter):
        observation_space = spaces.Box(-1, 1, (2,), np.float32)

    FACTORY.make = Sloppy
    _, steps = play(make(NAME, 1), np.zeros((2, 1), np.int64))
    assert steps[1].observation.tolist() == [[[1, 2]]]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8, np.bool_])
def test_vectors_of_any_dtype_become_float32(dtype):
    class Typed(Counter):
        observation_space = spaces.Box(0, 1, (2,), dtype) if dtype != np.bool_ else spaces.MultiBinary(2)

        def observe(self):
            return np.array([1, 0], dtype)

    FACTORY.make = Typed
    first = make(NAME, 1).reset()
    assert (first.dtype, first.tolist()) == (np.float32, [[[1, 0]]])


@pytest.mark.parametrize("kind", [Counter, Pictures])
def test_reused_observation_array_is_copied(kind):
    class Reusing(kind):
        buffer = None

        def observe(self):
            new = super().observe()
            self.buffer = new if self.buffer is None else self.buffer
            self.buffer[...] = new
            return self.buffer

    expected = play(make(here(kind), 1), np.zeros((4, 1), np.int64))
    FACTORY.make = Reusing
    first, steps = play(make(NAME, 1), np.zeros((4, 1), np.int64))
    assert np.array_equal(first, expected[0])
    for step, other in zip(steps, expected[1], strict=True):
        assert np.array_equal(step.observation, other.observation)
        assert np.array_equal(step.final_observation, other.final_observation)


def test_observation_may_have_any_memory_layout():
    class Transposed(Pictures):
        def observe(self):
            return np.asfortranarray(super().observe())[::-1][::-1]

    FACTORY.make = Transposed
    assert np.array_equal(make(NAME, 1).reset(), make(here(Pictures), 1).reset())


def test_non_finite_last_observation_ends_the_episode_before_it():
    environment, _ = make_faulty({"observation": np.array([np.inf, 0])}, at=1, length=1)
    _, (step,) = play(environment, np.zeros((1, 3), np.int64))
    assert step.failed.tolist() == [False, True, False]
    assert step.terminated.tolist() == [True, False, True]


def test_image_of_another_shape_or_dtype_is_a_fault(caplog):
    for image in (np.zeros((100, 120), np.uint8), np.zeros((100, 120, 3), np.float32)):
        environment, _ = make_faulty({"observation": image}, at=1, kind=Pictures)
        _, (step,) = play(environment, np.zeros((1, 3), np.int64))
        assert step.failed.tolist() == [False, True, False]
        assert f"observation {image.dtype}[100, 120" in caplog.messages[-1]


def test_observation_outside_a_discrete_space_is_a_fault(caplog):
    play(make(here(Tokens), 1), np.zeros((4, 1), np.int64))
    assert "observation 14, " in caplog.text
    assert "observation_space" in caplog.text  # the remedy
    assert "Discrete(4, start=10)" in caplog.text


# Resets


class Stubborn(Counter):
    """Raises in the next `failures` resets of all environments of this class."""

    failures = 0

    def reset(self, *, seed=None, options=None):
        if type(self).failures:
            type(self).failures -= 1
            raise OSError("locked")
        return super().reset(seed=seed, options=options)


def test_failed_reset_is_repeated_with_a_new_environment(caplog, monkeypatch):
    made = []
    FACTORY.make = lambda: made.append(Stubborn()) or made[-1]
    environment = make(NAME)
    monkeypatch.setattr(Stubborn, "failures", 3)
    first, steps = play(environment, np.zeros((4, 2), np.int64))
    assert len(made) == 2 + 3
    assert first[:, 0].tolist() == [[1, 0], [1, 0]]
    assert all(step.failed is None for step in steps)
    message = caplog.messages[0]
    assert all(part in message for part in (NAME, "environment 0 of 2 ", "OSError: locked", "reset", "step 0"))


def test_failed_reset_after_an_episode_loses_no_transition(monkeypatch):
    FACTORY.make = Stubborn
    environment = make(NAME, 1)
    environment.reset()
    monkeypatch.setattr(Stubborn, "failures", 1)
    steps = [environment.step(np.zeros(1, np.int64)) for _ in range(3)]
    assert (steps[2].failed, steps[2].terminated.tolist()) == (None, [True])
    assert steps[2].final_observation.tolist() == [[[1, 3]]]
    assert steps[2].observation.tolist() == [[[1, 0]]]


def test_reset_without_info_is_a_fault():
    class Old(Counter):
        def reset(self, *, seed=None, options=None):
            return np.zeros(2)

    FACTORY.make = Old
    with pytest.raises(EnvironmentFailure, match=r"float64\[2\]"):
        make(NAME).reset()


def test_new_environment_plays_another_but_reproducible_game():
    seeds = []
    for _ in range(2):
        environment, made = make_faulty({"error": KeyError("door")})
        play(environment, np.zeros((2, 3), np.int64))
        seeds.append([env.seeds for env in made])
    assert seeds[0] == seeds[1]
    used = [seed for env in seeds[0] for seed in env if seed is not None]
    assert len(set(used)) == 4
    assert all(0 <= seed < 2**31 for seed in used)


# Frequent faults


def test_frequent_faults_are_raised_with_the_first_cause():
    class Broken(Counter):
        def step(self, action):
            raise ValueError("later") if hasattr(Broken, "failed") else KeyError("first")

    FACTORY.make = Broken
    environment = make(NAME, 2)
    environment.reset()
    environment.step(np.zeros(2, np.int64))
    Broken.failed = True
    with pytest.raises(EnvironmentFailure) as raised:
        play_on(environment, np.zeros((MAX_FAULTS, 2), np.int64))
    last, _, first = raised.value.problem.rpartition(NAME)
    assert all(part in last for part in (NAME, "environment 0 of 2 ", "ValueError: later", "step 6", f" {MAX_FAULTS} "))
    assert all(part in first for part in ("environment 0 of 2 ", "KeyError: 'first'", "step 1"))
    assert isinstance(raised.value.__cause__, ValueError)


def test_environment_that_cannot_be_created_again_is_a_failure():
    made = []

    def factory():
        if len(made) == 2:
            raise OSError("no licence")
        made.append(Counter(faults={1: {"error": KeyError("door")}}))
        return made[-1]

    FACTORY.make = factory
    environment = make_environment(make_config(NAME), 2, seed=1)
    environment.reset()
    with pytest.raises(EnvironmentFailure, match=r"no licence.*KeyError: 'door'.*step 1\b"):
        environment.step(np.zeros(2, np.int64))


def test_rare_faults_are_tolerated_and_the_log_stays_short(caplog):
    budget = FaultBudget("maze", 2)
    for _ in range(2 * MAX_FAULTS):
        for _ in range(FORGIVEN_STEPS // 2):
            budget.step()
        budget.record(1, KeyError("door"))
    assert budget.num_faults == 2 * MAX_FAULTS
    assert [int(re.search(r"\(fault (\d+) ", message)[1]) for message in caplog.messages] == [1, 2, 4, 8, 16]


# Closing, rendering and spaces


def test_failed_close_does_not_keep_others_open(caplog):
    class Jammed(Counter):
        def close(self):
            super().close()
            raise OSError("jammed")

    made = []
    FACTORY.make = lambda: made.append(Jammed()) or made[-1]
    describe(make_config(NAME), 3)
    environment = make(NAME, 2)
    environment.reset()
    environment.close()
    assert [env.closed for env in made] == [True] * 3
    messages = [message for message in caplog.messages if "OSError: jammed" in message and "(in its close)" in message]
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("render", "named"), [(lambda self: [[0, 0, 0]], "list of 1"), (lambda self: 1 / 0, "ZeroDivisionError.*render")]
)
def test_failed_or_invalid_rendering_is_a_failure(render, named, monkeypatch):
    monkeypatch.setattr(Pictures, "render", render)
    FACTORY.make = lambda: Pictures("rgb_array")
    environment = make(here(Pictures), pictures=True)
    environment.reset()
    with pytest.raises(EnvironmentFailure, match=f"environment 0 of 2 .*{named}"):
        environment.picture()


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Box(0, 1, (2_000, 1_000), np.float32), "2,000,000 .*1,048,576"),
        (spaces.Box(0, 255, (0, 5, 3), np.uint8), "empty"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.Dict({"a": spaces.Text(5), "b": spaces.Text(2)}), "without numbers"),
        (spaces.Box(0, 255, (1_500, 1_000, 3), np.uint8), "4,500,000 bytes.*4,194,304"),
        (spaces.Tuple([spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2)]), r"1?0 is a Sequence"),
    ],
)
def test_unsupported_observation_spaces_are_refused(space, named):
    class Odd(Counter):
        observation_space = space

    FACTORY.make = Odd
    with pytest.raises(UsageError, match=f"(?s)environment.id '{NAME}'.*{named}"):
        describe(make_config(NAME), 3)


def test_environment_may_have_one_action():
    class Watching(Counter):
        action_space = spaces.Discrete(1, start=-3)

    FACTORY.make = Watching
    assert describe(make_config(NAME), 3).num_actions == 1
    _, (step,) = play(make(NAME, 1), np.zeros((1, 1), np.int64))
    assert step.reward.tolist() == [-3]


def test_large_images_are_resized():
    class Huge(Pictures):
        shape = (1_500, 1_000, 3)

        def observe(self):
            return np.full(self.shape, 200, np.uint8)

    FACTORY.make = Huge
    first = make(NAME, 1, image_size=84, grayscale=True, frame_stack=4).reset()
    assert first.shape == (1, 4, 84, 84)
    assert (first[0, -1] == 200).all()
