"""Vector environments, with each autoreset mode, give the transitions of their environments played one by one."""

import re
from dataclasses import replace
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apex.acting.segment_builder import SegmentBuilder
from apex.config import ActorConfig, EnvironmentConfig
from apex.environments.batched import BatchedEnvironment
from apex.environments.factory import describe, make_environment
from apex.environments.sync_vector import SyncVectorEnvironment
from apex.errors import EnvironmentFailure
from apex.evaluation.episodes import play
from apex.schema import unpack_mask
from apexreplay.errors import UsageError
from apexreplay.frame_blob import read_table

NUM_ENVS, NUM_STEPS = 3, 40
NUMBERS = spaces.Box(0, 100, (3,), np.float32)
OBSERVATIONS = {
    "vector": NUMBERS,
    "dict": spaces.Dict({"numbers": NUMBERS, "image": spaces.Box(0, 255, (40, 40, 3), np.uint8)}),
}


class Walk(gymnasium.Env):
    """Episodes of 1 to 4 steps, which end in both ways. Everything shown says where it comes from."""

    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, number=0, kind="vector", masked=True, fails_at=None, render_mode=None, bare_ends=False):
        self.number, self.kind, self.masked, self.fails_at = number, kind, masked, fails_at
        self.bare_ends = bare_ends  # whether terminal states have no mask
        self.observation_space, self.render_mode = OBSERVATIONS[kind], render_mode
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self.show()

    def step(self, action):
        self.t += 1
        if self.episode == self.fails_at:
            raise OSError("lost")
        over = self.t == 1 + (self.number + self.episode) % 4
        is_time_limit = self.episode % 2 == 0
        observation, info = self.show()
        if over:
            info |= {"is_success": self.number == 1, "metrics": {"length": self.t}}
        if over and not is_time_limit and self.bare_ends:
            info.pop("action_mask", None)
        reward = 100.0 * self.number + 10 * self.t + int(action)
        return observation, reward, over and not is_time_limit, over and is_time_limit, info

    def show(self):
        numbers = np.array([self.number, self.episode, self.t], np.float32)
        info = {"action_mask": np.array([1, self.t % 2], np.int8)} if self.masked else {}
        image = np.full((40, 40, 3), 10 * self.number + self.t, np.uint8)
        return (numbers if self.kind == "vector" else {"numbers": numbers, "image": image}), info

    def render(self):
        return np.full((2, 2, 3), self.number, np.uint8)


def make_walks(num_envs, mode="NextStep", render_mode=None, **options):
    walks = [lambda i=i: Walk(i, render_mode=render_mode, **options) for i in range(num_envs)]
    return SyncVectorEnv(walks, autoreset_mode=AutoresetMode(mode))


def make_three():
    return make_walks(3)


def make_another_number(num_envs=3):
    return make_walks(2)


def here(name, **args):
    return EnvironmentConfig(id=f"{__name__}:{name}", args=args, clip_rewards=False)


def choose(observation, schema):
    """The second action in every second step, when it is allowed."""
    numbers = np.ascontiguousarray(observation[:, -1])
    numbers = numbers[:, :12].view(np.float32) if schema.parts else numbers
    return numbers[:, 2].astype(np.int64) % 2


def transitions_of(games, schema, environment):
    """Plays, and returns the transitions of each environment: numbers, mask, and the frames of both stacks."""
    builder = SegmentBuilder(ActorConfig(n_step=2), environment, schema, NUM_ENVS)
    found = [[] for _ in range(NUM_ENVS)]
    observation, zeros = games.reset(), np.zeros(NUM_ENVS, np.float32)
    builder.begin(observation)
    for _ in range(NUM_STEPS):
        step = games.step(choose(observation, schema))
        builder.append(choose(observation, schema), zeros, zeros, step, zeros)
        observation = step.observation
        for cut in builder.cut(zeros):
            table = read_table(cut.blob)
            frames = [cut.blob[start:stop] for start, stop in pairwise(table)]
            for row in cut.records:
                stacks = [
                    tuple(frames[int(row[name]) - int(depth) + 1 : int(row[name]) + 1])
                    for name, depth in (("frame", row["depth"]), ("next_frame", row["next_depth"]))
                ]
                mask = unpack_mask(row["next_mask"], 2).tolist() if schema.masked else []
                numbers = [float(row[name]) for name in ("n_step_return", "discount", "action")]
                # Terminal states have no mask that matters.
                found[cut.stream_index].append((numbers, mask if row["discount"] else [], *stacks))
    return found


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_transitions_are_those_of_environments_played_one_by_one(mode, kind, masked, stack):
    environment = replace(here("make_walks", mode=mode, kind=kind, masked=masked), frame_stack=stack)
    schema = replace(describe(environment, 2), n_step=2)
    batched = make_environment(environment, NUM_ENVS, seed=1)
    assert isinstance(batched, BatchedEnvironment)
    alone = SyncVectorEnvironment(
        replace(here("Walk", kind=kind, masked=masked), frame_stack=stack), lambda i: Walk(i, kind, masked), range(3)
    )
    assert schema.masked is masked
    expected = transitions_of(alone, schema, environment)
    for found, twin in zip(transitions_of(batched, schema, environment), expected, strict=True):
        # With NEXT_STEP, some steps only begin episodes.
        assert len(found) > NUM_STEPS // 2
        assert found == twin[: len(found)]


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_terminal_states_need_no_mask(mode):
    environment = here("make_walks", mode=mode, bare_ends=True)
    schema = replace(describe(environment, 2), n_step=2)
    alone = SyncVectorEnvironment(here("Walk"), lambda i: Walk(i, bare_ends=True), range(3))
    expected = transitions_of(alone, schema, environment)
    batched = make_environment(environment, NUM_ENVS, seed=1)
    for found, twin in zip(transitions_of(batched, schema, environment), expected, strict=True):
        assert len(found) > NUM_STEPS // 2
        assert found == twin[: len(found)]
    one = make_environment(environment, 1, seed=1)
    one.reset()
    assert any([one.step(np.zeros(1, np.int64)).terminated[0] for _ in range(20)])


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_games_have_the_scores_and_metrics_of_their_environments(mode):
    games = play(
        make_environment(here("make_walks", mode=mode), 3, seed=1), lambda x, mask: np.zeros(len(x), np.int64), 12
    )
    expected = play(SyncVectorEnvironment(here("Walk"), Walk, range(3)), lambda x, mask: np.zeros(len(x), np.int64), 12)
    by_score = [sorted(each, key=lambda game: (game.score, game.length)) for each in (games, expected)]
    assert by_score[0] == by_score[1]
    assert {game.metrics["success"] for game in games} == {0.0, 1.0}


@pytest.mark.parametrize("mode", [mode.value for mode in AutoresetMode])
def test_a_single_environment_begins_its_next_episode_in_the_same_step(mode):
    games = make_environment(here("make_walks", mode=mode), 1, seed=1)
    games.reset()
    for _ in range(10):
        step = games.step(np.zeros(1, np.int64))
        assert step.skipped is None
        assert (step.observation[0, -1, 2] == 0) == bool(step.terminated[0] | step.truncated[0])
        assert step.final_observation[0, -1, 2] > 0


def test_pictures_show_the_first_environment():
    games = make_environment(here("make_walks"), 2, seed=1, pictures=True)
    games.reset()
    assert (games.picture().shape, games.fps) == ((2, 2, 3), 7.0)
    games.close()


@pytest.mark.parametrize("name", ["make_three", "make_another_number"])
def test_a_factory_that_makes_another_number_is_refused(name):
    with pytest.raises(UsageError, match=r"makes [23] environments instead of") as refused:
        make_environment(here(name), 5, seed=1)
    assert "num_envs" in refused.value.remedy


class Pool(gymnasium.vector.VectorEnv):
    """As EnvPool: declares the space of one environment, knows its seed from the start, and ignores that of a reset."""

    def __init__(self, num_envs, seed, observation_space):
        self.num_envs, self.seed = num_envs, seed
        self.observation_space = self.single_observation_space = observation_space
        self.action_space = self.single_action_space = spaces.Discrete(2)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.rng = np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        return self.show(), {}

    def step(self, actions):
        flags = np.zeros(self.num_envs, bool)
        return self.show(), np.zeros(self.num_envs), flags, flags, {}

    def show(self):
        direction = self.rng.integers(4, size=self.num_envs)
        if isinstance(self.observation_space, spaces.Discrete):
            return direction
        return {"direction": direction, "image": self.rng.integers(256, size=(self.num_envs, 7, 7, 3), dtype=np.uint8)}


ROOM = spaces.Dict({"direction": spaces.Discrete(4), "image": spaces.Box(0, 255, (7, 7, 3), np.uint8)})


def make_pool(num_envs, seed=42, space="dict"):
    return Pool(num_envs, seed, ROOM if space == "dict" else spaces.Discrete(4))


@pytest.mark.parametrize("space", ["dict", "discrete"])
def test_a_pool_may_declare_the_space_of_one_environment(space):
    config = here("make_pool", space=space)
    describe(config, 3)
    games = make_environment(config, 3, seed=1)
    first, twin = games.reset(), make_pool(3, games._env.seed, space).show()
    if space == "dict":
        parts = [np.ascontiguousarray(frame[0, :4]).view(np.int32)[0] for frame in first]
        assert parts == twin["direction"].tolist()
        assert np.array_equal(first[:, 0, 4:], twin["image"].reshape(3, -1))
    else:
        assert first[:, 0].argmax(1).tolist() == twin.tolist()


def test_a_factory_takes_the_seed_of_its_process_unless_it_is_given():
    def seed(number, **args):
        return make_environment(here("make_pool", **args), 2, seed=number)._env.seed

    assert len({seed(1), seed(2), seed(3), 42}) == 4
    assert seed(1) == seed(1)
    assert seed(1, seed=7) == 7


def make_without_modes(num_envs):
    return make_walks(num_envs, render_mode="rgb_array")


def test_pictures_need_no_argument_of_a_factory_that_always_draws():
    games = make_environment(here("make_without_modes"), 2, seed=1, pictures=True)
    games.reset()
    assert games.picture().shape == (2, 2, 3)


def test_an_error_while_closing_is_ignored(caplog):
    games = make_environment(here("make_walks"), 2, seed=1)
    games._env.close = lambda: 1 / 0
    games.close()
    assert "in its close" in caplog.text


def test_a_fault_ends_the_process():
    games = make_environment(here("make_walks", fails_at=2), 2, seed=1)
    games.reset()
    games.step(np.zeros(2, np.int64))
    games.step(np.zeros(2, np.int64))
    games.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFailure, match=re.escape("OSError: lost")):
        games.step(np.zeros(2, np.int64))


class Broken(gymnasium.vector.VectorEnv):
    """Returns a wrong answer to the third step, or cannot be reset."""

    single_observation_space, single_action_space = NUMBERS, spaces.Discrete(2)

    def __init__(self, num_envs, answer, mode="NextStep"):
        self.num_envs, self.answer, self.num_steps = num_envs, answer, 0
        self.observation_space = gymnasium.vector.utils.batch_space(NUMBERS, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": mode}

    def reset(self, *, seed=None, options=None):
        if self.answer == "reset":
            raise ValueError("bad")
        return np.zeros((self.num_envs, 3), np.float32), {}

    def step(self, actions):
        self.num_steps += 1
        zeros = np.zeros((self.num_envs, 3), np.float32)
        rewards, flags = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        if self.num_steps < 3:
            return zeros, rewards, flags, flags, {}
        return {
            "four": (zeros, rewards, flags, {}),
            "shape": (zeros[:, :2], rewards, flags, flags, {}),
            "columns": (zeros.T.copy(), rewards, flags, flags, {}),
            "nan": (zeros + np.nan, rewards, flags, flags, {}),
            "reward": (zeros, rewards + np.inf, flags, flags, {}),
            "rewards": (zeros, 0.0, flags, flags, {}),
            "final": (zeros, rewards, ~flags, flags, {}),
        }[self.answer]

    def render(self):
        return (np.zeros((2, 2), np.uint8),)


def make_wrong(num_envs, answer="nan", mode="NextStep", render_mode=None):
    games = Broken(num_envs, answer, mode)
    games.render_mode = render_mode
    return games


@pytest.mark.parametrize(
    ("answer", "mode", "named"),
    [
        ("reset", "NextStep", r"ValueError: bad .*in its reset"),
        ("four", "NextStep", r"tuple of 4, expected five values .*in its step"),
        ("shape", "NextStep", r"float32\[2, 2\], expected 2 of Box|float32\[1, 2\], expected 1 of Box"),
        ("columns", "NextStep", r"float32\[3, 2\], expected 2 of Box|float32\[3, 1\], expected 1 of Box"),
        ("nan", "NextStep", r"not finite"),
        ("reward", "NextStep", r"reward inf, which is not finite"),
        ("rewards", "NextStep", r"float64\[\], expected one for each environment"),
        ("final", "SameStep", r"KeyError: 'final_obs'"),
    ],
)
def test_a_wrong_answer_is_named_in_a_trial_and_in_a_run(answer, mode, named):
    config = here("make_wrong", answer=answer, mode=mode)

    def play_three(games, schema=None):
        games.reset()
        for _ in range(3):
            games.step(np.zeros(games.num_envs, np.int64))

    with pytest.raises(UsageError, match=named):
        describe(config, 3, play=play_three)
    with pytest.raises(EnvironmentFailure, match=f"the batch of 2 environments .*{named}"):
        play_three(make_environment(config, 2, seed=1))


def test_a_wrong_picture_is_named():
    games = make_environment(here("make_wrong"), 2, seed=1, pictures=True)
    with pytest.raises(EnvironmentFailure, match=r"rendered uint8\[2, 2\], expected uint8\[H, W, 3\]"):
        games.picture()


@pytest.mark.parametrize("key", ["final_info", "action_mask"])
def test_later_masks_must_not_be_missing(key):
    games = make_environment(here("make_walks", mode="SameStep"), 2, seed=1)
    step = games._env.step

    def without(actions):
        *answer, info = step(actions)
        info.pop(key, None)
        return (*answer, info)

    games._env.step = without
    games.reset()
    with pytest.raises(EnvironmentFailure, match="no 'action_mask' in its info"):
        list(map(games.step, [np.zeros(2, np.int64)] * 5))


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_a_state_that_is_not_terminal_must_allow_an_action(mode):
    games = make_environment(here("make_walks", mode=mode), 2, seed=1)
    step = games._env.step

    def without(actions):
        *answer, info = step(actions)
        info["action_mask"] = np.zeros_like(info["action_mask"])
        return (*answer, info)

    games._env.step = without
    games.reset()
    with pytest.raises(EnvironmentFailure, match="allows no action"):
        games.step(np.zeros(2, np.int64))


def test_only_metrics_are_read_from_the_info():
    """Other values may be one for all environments. A metric that an environment has not reported is missing."""
    games = make_environment(here("make_walks", mode="SameStep"), 2, seed=1)
    step = games._env.step

    def with_time(actions):
        *answer, info = step(actions)
        if "final_info" in info:
            info["final_info"] |= {"time": 0.5, "log": {"mean": 0.3}}
            info["final_info"]["metrics"] = {"rare": np.array([7, 0]), "_rare": np.array([True, False]), "fps": 3.0}
        return (*answer, info)

    games._env.step = with_time
    games.reset()
    found = [each.metrics for each in map(games.step, [np.zeros(2, np.int64)] * 8)]
    assert {i for metrics in found for i in metrics} == {0, 1}
    assert all(metrics.get(0, {"rare": 7}).get("rare") == 7 for metrics in found)
    assert not any("rare" in metrics.get(1, {}) for metrics in found)


def test_a_missing_row_is_named():
    games = make_environment(here("make_walks", kind="dict"), 2, seed=1)
    step = games._env.step

    def without_the_last(actions):
        observation, *rest = step(actions)
        return ({name: rows[:1] for name, rows in observation.items()}, *rest)

    games._env.step = without_the_last
    games.reset()
    with pytest.raises(EnvironmentFailure, match="returned 1 observations, expected one for each"):
        games.step(np.zeros(2, np.int64))


def make_failing_with_a_number(**options):
    if "num_envs" in options:
        raise TypeError("unrelated")
    return make_walks(1, **options)


def test_an_error_of_the_factory_is_not_taken_for_a_missing_argument():
    with pytest.raises(UsageError, match="cannot be created: TypeError: unrelated"):
        make_environment(here("make_failing_with_a_number"), 2, seed=1)
