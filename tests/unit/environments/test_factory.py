"""Compares environments with ALE and Gymnasium, pixel by pixel and flag by flag; unusable ones are refused."""

import os
import re
import sys
import textwrap
from pathlib import Path

import ale_py
import cv2
import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from support.environments import (
    FACTORY,
    Counter,
    Pictures,
    Tokens,
    here,
    made_by_the_test,
    make,
    make_actions,
    make_config,
    play,
)

from apex.environments.factory import describe, kind, make_environment
from apexreplay.errors import UsageError

gymnasium.register_envs(ale_py)


def check_equal(step, other):
    """Compares two steps; only ended episodes have a final observation."""
    for field in ("observation", "reward", "terminated", "truncated", "life_lost"):
        assert np.array_equal(getattr(step, field), getattr(other, field)), field
    ended = step.terminated | step.truncated
    assert np.array_equal(step.final_observation[ended], other.final_observation[ended])


def ale_seeds(seed, num_envs):
    return np.random.SeedSequence(seed).generate_state(num_envs).astype(np.int64) >> 1


def num_threads():
    return len(os.listdir("/proc/self/task"))


def make_counter():
    return Counter()


COUNTER = here(make_counter)


def make_one_step_counter():
    return Counter(length=1)


def make_truncated_counter():
    return Counter(end="truncated")


def make_counter_with_both_ends():
    return Counter(end="terminated truncated")


class GrayPictures(Pictures):
    shape = (84, 84)


class OneChannelPictures(Pictures):
    shape = (50, 60, 1)


class TransparentPictures(Pictures):
    shape = (50, 60, 4)


class ChannelsFirst(Pictures):
    shape = (3, 50, 60)


class FiveChannels(Pictures):
    shape = (50, 60, 5)


class Undrawable(Counter):
    def __init__(self, render_mode=None):
        super().__init__()


class Board(Counter):
    observation_space = spaces.Box(-1, 1, (2, 3), np.float32)

    def observe(self):
        return np.arange(6, dtype=np.float32).reshape(2, 3) / 10


class Mixed(Counter):
    observation_space = spaces.Dict({"place": spaces.Discrete(3), "speed": spaces.Box(-1, 1, (2,), np.float32)})

    def observe(self):
        return {"place": 1, "speed": np.array([0.25, -0.5], np.float32)}


class Sentences(Counter):
    observation_space = spaces.Sequence(spaces.Discrete(3))


class Mission(Counter):
    observation_space = spaces.Dict({"goal": spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2))])})


class Needy(Counter):
    def __init__(self, size):
        super().__init__(length=size)


class NoSpaces(gymnasium.Env):
    """Declares no spaces."""


def not_an_environment():
    return 42


def broken_factory():
    raise OSError("cannot open a.txt; 3 other maps: b, c")


# Names


@pytest.mark.parametrize(
    ("names", "game"),
    [
        (["PongNoFrameskip-v4", "PongDeterministic-v4", "Pong-v4", "Pong-v0", "pong", "Pong"], "ALE/Pong-v5"),
        (["ms_pacman", "MsPacman", "MsPacmanNoFrameskip-v4"], "ALE/MsPacman-v5"),
    ],
)
def test_atari_game_has_several_spellings(names, game):
    for name in (*names, game):
        assert kind(make_config(name)) == "atari"
        assert describe(make_config(name), 3) == describe(make_config(game), 3)


def test_gymnasium_id_takes_precedence_over_an_atari_game():
    assert kind(make_config("Blackjack-v1")) == "vector"
    assert kind(make_config("ALE/Blackjack-v5")) == kind(make_config("blackjack")) == "atari"


@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")  # by Gymnasium, before it refuses
@pytest.mark.parametrize(
    ("name", "named", "remedy"),
    [
        ("ALE/Pnog-v5", "'ALE/Pnog-v5'", "ALE/Pong-v5"),
        ("breakuot", "'breakuot'", "ALE/Breakout-v5"),
        ("cartpole-v1", "'cartpole-v1'", "CartPole-v1"),
        ("LunarLander-v2", "'LunarLander-v2'", "LunarLander-v3"),
        ("Pong-ram-v4", "'Pong-ram-v4'", "ALE/Pong-v5"),
        ("Qqqqqqqq-v0", "'Qqqqqqqq-v0'", "ALE/Pong-v5.*package:Qqqqqqqq-v0"),
        ("no_such_module:make", "'no_such_module:make'.*ModuleNotFoundError", ""),
        ("no_such_module:Name-v0", "'no_such_module:Name-v0'.*ModuleNotFoundError", ""),
        (f"{__name__}:nothing", "'nothing'", "its own are .*Counter"),
        (f"{__name__}:Mision", "'Mision'", f"did you mean {__name__}:Mission"),
        ("games/maze.py:Maze", "names a file", "games.maze:Maze"),
        (here(Needy), "size", "--env-arg"),
        (here(not_an_environment), r"\bint\b", "gymnasium.Env"),
        (here(broken_factory), r"OSError: cannot open a\.txt; 3 other maps: b, c \(test_factory.py, line \d+\)$", ""),
        (here(FiveChannels), r"\[50, 60, 5\]", "transpose"),
        (here(Sentences), "Sequence", "FilterObservation"),
        (here(Mission), r"goal\.1 is a Sequence", "FlatObsWrapper"),
        (here(NoSpaces), "observation_space is None", "__init__"),
    ],
)
def test_unusable_environments_are_refused(name, named, remedy):
    """An exception of the environment is part of the problem, and never of the remedy."""
    with pytest.raises(UsageError) as refused:
        describe(make_config(name), 3)
    assert name in refused.value.problem
    assert re.search(named, refused.value.problem)
    assert bool(refused.value.remedy) == bool(remedy)
    assert re.search(remedy, refused.value.remedy)


def test_a_missing_package_of_a_known_namespace_is_named(monkeypatch):
    monkeypatch.setattr("apex.environments.foreign.entry_points", lambda **_: [])
    monkeypatch.setattr(gymnasium, "registry", {})
    with pytest.raises(UsageError) as refused:
        describe(make_config("MinAtar/Breakout-v1"), 3)
    assert re.search("extra minatar: .* install minatar$", refused.value.remedy)


def test_module_without_a_class_is_refused_with_its_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("envs.py").write_text("import nothing\nclass Maze: ...\nclass _Base: ...\nclass Arm: ...\n")
    with pytest.raises(UsageError) as refused:
        describe(make_config("envs"), 3)
    assert re.findall(r"envs:\w+", refused.value.remedy) == ["envs:Maze", "envs:Arm"]


class Sized(Counter):
    def __init__(self, length, end="terminated", render_mode=None):
        super().__init__(length, end)
        self.render_mode = render_mode


def test_arguments_reach_the_factory_and_gymnasium():
    environment = make(here(Sized), 1, args={"length": 2, "end": "truncated"})
    _, steps = play(environment, np.zeros((2, 1), np.int64))
    assert [step.truncated.tolist() for step in steps] == [[False], [True]]
    assert describe(make_config("FrozenLake-v1", args={"map_name": "8x8"}), 3).frame_shape == (64,)
    _, steps = play(make("CartPole-v1", 1, args={"max_episode_steps": 1}), np.zeros((1, 1), np.int64))
    assert steps[0].truncated.tolist() == [True]
    make(here(Sized), 1, pictures=True, args={"length": 2}).close()


@pytest.mark.parametrize(
    ("name", "args", "named"),
    [
        (here(Sized), {}, "TypeError: .*'length'"),
        (here(Sized), {"size": 3}, "TypeError: .*'size'"),
        ("CartPole-v1", {"size": 3}, "TypeError: .*'size'"),
        ("ALE/Pong-v5", {"mode": 3}, r"environment.args \{'mode': 3\}.*ALE/Pong-v5"),
    ],
)
def test_unknown_arguments_are_refused(name, args, named):
    config = make_config(name, args=args)
    for create in (lambda: describe(config, 3), lambda: kind(config), lambda: make_environment(config, 1, seed=0)):
        with pytest.raises(UsageError, match=named):
            create()


def test_factory_in_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_level_of_glass.py").write_text(
        textwrap.dedent("""
            import gymnasium

            def make():
                return gymnasium.make("CartPole-v1")
        """)
    )
    assert describe(make_config("my_level_of_glass:make"), 3).frame_shape == (4,)


# Schemas


def test_schema_of_an_atari_game_follows_the_settings():
    schema = describe(make_config("pong", image_size=64, frame_stack=3, full_action_space=True), 5)
    assert (schema.frame_shape, schema.frame_dtype, schema.stack) == ((64, 64), "uint8", 3)
    assert (schema.num_actions, schema.n_step, schema.codec) == (18, 5, "lz4")


@pytest.mark.parametrize(
    ("name", "shape", "num_actions"),
    [("CartPole-v1", (4,), 2), ("FrozenLake-v1", (16,), 4), (here(Board), (6,), 3), (here(Mixed), (5,), 3)],
)
def test_schema_of_vectors_is_a_raw_stack_of_one(name, shape, num_actions):
    schema = describe(make_config(name), 3)
    assert (schema.frame_shape, schema.frame_dtype, schema.stack) == (shape, "float32", 1)
    assert (schema.num_actions, schema.codec) == (num_actions, "raw")
    assert kind(make_config(name)) == "vector"


def test_schema_of_images_is_that_of_an_atari_game():
    schema = describe(make_config(here(Pictures), image_size=84, grayscale=True, frame_stack=4), 3)
    assert (schema.frame_shape, schema.frame_dtype, schema.stack, schema.codec) == ((84, 84), "uint8", 4, "lz4")
    assert kind(make_config(here(Pictures))) == "image"


class NarrowPictures(Pictures):
    shape = (84, 40, 1)


class Grid(Pictures):
    shape = (15, 84, 3)


@pytest.mark.parametrize(
    ("game", "parts"),
    [
        (Pictures, ["RGB", "100 x 120", "grayscale", "84 x 84"]),
        (NarrowPictures, ["84 x 40", "84 x 84"]),
        (GrayPictures, []),
    ],
)
def test_conversion_of_images_is_described(game, parts):
    changes = []
    describe(make_config(here(game), image_size=84, grayscale=True), 3, changes.append)
    assert len(changes) == bool(parts)
    assert all(part in change for change in changes for part in (here(game), *parts))
    assert all(("grayscale" in change) == ("grayscale" in parts) for change in changes)


def test_grid_of_cells_stays_as_it_is():
    schema = describe(make_config(here(Grid), image_size=84, grayscale=True), 3)
    assert (schema.frame_shape, schema.stack, schema.has_images) == ((15, 84, 3), 1, False)
    assert kind(make_config(here(Grid)), schema) == "grid"


@pytest.mark.parametrize("name", ["pong", "CartPole-v1", "FrozenLake-v1", here(Pictures), here(Mixed)])
def test_schema_equals_the_played_observations(name):
    schema = describe(make_config(name), 3)
    first, (step,) = play(make(name, 3), np.zeros((1, 3), np.int64))
    for observation in (first, step.observation, step.final_observation):
        assert (observation.shape, observation.dtype) == ((3, *schema.observation_shape), schema.frame_dtype)
    assert (step.reward.dtype, step.terminated.dtype) == (np.float32, np.bool_)
    assert (step.truncated.dtype, step.life_lost.dtype) == (np.bool_, np.bool_)


def test_describing_leaves_no_emulator_thread():
    before = num_threads()
    describe(make_config(), 3)
    assert num_threads() == before
    environment = make()
    assert num_threads() > before
    environment.close()
    environment.close()
    assert num_threads() == before


# Atari


def test_atari_frames_equal_ales():
    actions = make_actions(300, 2, 4)
    first, steps = play(make("breakout", 2, sticky_actions=0.25), actions)
    oracle = AtariVectorEnv(
        "breakout", 2, num_threads=1, repeat_action_probability=0.25, reward_clipping=False, autoreset_mode="SameStep"
    )
    expected, _ = oracle.reset(seed=ale_seeds(1, 2))
    assert np.array_equal(first, expected)
    num_ended = 0
    for row, step in zip(actions, steps, strict=True):
        observation, reward, terminated, truncated, info = oracle.step(row)
        assert np.array_equal(step.observation, observation)
        assert step.reward.tolist() == reward.tolist()
        assert step.terminated.tolist() == terminated.tolist()
        assert step.truncated.tolist() == truncated.tolist()
        for i in np.flatnonzero(terminated):
            assert np.array_equal(step.final_observation[i], info["final_obs"][i])
            num_ended += 1
    assert num_ended >= 2


def test_atari_frames_equal_those_of_gymnasiums_wrappers():
    # Freeway, because these wrappers play no FIRE; without no-ops, because they draw others.
    single = gymnasium.make("ALE/Freeway-v5", frameskip=1, repeat_action_probability=0.0)
    oracle = gymnasium.wrappers.AtariPreprocessing(single, noop_max=0, frame_skip=4, screen_size=84)
    frames = [oracle.reset(seed=0)[0]]
    actions = make_actions(60, 1, 3)
    first, steps = play(make("freeway", 1, noop_max=0), actions)
    assert np.array_equal(first[0, -1], frames[0])
    for row, step in zip(actions, steps, strict=True):
        frame, reward, *_ = oracle.step(row[0])
        frames.append(frame)
        assert np.array_equal(step.observation[0, -1], frame)
        assert step.reward[0] == reward
    assert len({frame.tobytes() for frame in frames}) > 30
    oracle.close()


@pytest.mark.parametrize(
    ("frame_skip", "max_episode_frames", "num_steps"), [(4, 40, 10), (4, 41, 11), (1, 7, 7), (3, 9, 3), (4, 1, 1)]
)
def test_frame_limit_counts_emulator_frames_and_truncates(frame_skip, max_episode_frames, num_steps):
    environment = make(frame_skip=frame_skip, max_episode_frames=max_episode_frames)
    _, steps = play(environment, np.zeros((2 * num_steps, 2), np.int64))
    expected = [[t in (num_steps, 2 * num_steps)] * 2 for t in range(1, 2 * num_steps + 1)]
    assert [step.truncated.tolist() for step in steps] == expected
    assert not any(step.terminated.any() for step in steps)


def test_game_that_ends_at_its_frame_limit_is_terminated():
    actions = make_actions(600, 1, 4)
    _, steps = play(make("breakout", 1), actions)
    length = 1 + next(t for t, step in enumerate(steps) if step.terminated[0])
    for max_episode_frames, terminated in ((4 * length, True), (4 * (length - 1), False)):
        _, steps = play(make("breakout", 1, max_episode_frames=max_episode_frames), actions[:length])
        last = next(step for step in steps if step.terminated[0] or step.truncated[0])
        assert (last.terminated[0], last.truncated[0]) == (terminated, not terminated)


def test_lost_life_differs_from_the_end_of_the_game():
    _, steps = play(make("breakout", 2, max_episode_frames=4000), make_actions(900, 2, 4))
    games = [[], []]
    lives = [0, 0]
    for step in steps:
        assert not (step.life_lost & (step.terminated | step.truncated)).any()
        for i in range(2):
            lives[i] += step.life_lost[i]
            if step.terminated[i]:
                games[i].append(lives[i])
                lives[i] = 0
    assert all(games)
    assert {count for game in games for count in game} == {4}  # Five lives: the last one ends the game.


def test_breakout_continues_after_a_lost_life_only_with_fire():
    nothing = np.zeros((300, 2), np.int64)
    _, steps = play(make("breakout", 2), nothing)
    assert sum(step.life_lost.sum() for step in steps) == 2
    _, steps = play(make("breakout", 2, fire_after_life_loss=True), nothing)
    assert all(sum(step.life_lost[i] for step in steps) >= 4 for i in range(2))
    assert all(any(step.terminated[i] for step in steps) for i in range(2))


@pytest.mark.parametrize(("game", "fire"), [("breakout", 1), ("ms_pacman", None)])
def test_fire_replaces_one_action_after_a_lost_life(game, fire):
    """Equal to a loop that plays FIRE itself. In a game without FIRE, the chosen action is played."""
    by_itself, by_hand = (make(game, 3, fire_after_life_loss=setting) for setting in (True, False))
    assert np.array_equal(by_itself.reset(), by_hand.reset())
    lost = np.zeros(3, np.bool_)
    num_lost = 0
    for t, chosen in enumerate(make_actions(700, 3, 4)):
        pressed = chosen if fire is None else np.where(lost, fire, chosen)
        step, other = by_itself.step(chosen), by_hand.step(pressed)
        check_equal(step, other)
        assert np.array_equal(step.played, pressed)
        lost = other.life_lost
        num_lost += lost.sum()
        if lost.any() and t > 500:  # A reset also forgets the lost life.
            assert np.array_equal(by_itself.reset(), by_hand.reset())
            lost = np.zeros(3, np.bool_)
    assert num_lost > 3
    by_itself.close()
    by_hand.close()


def test_atari_rewards_are_not_clipped():
    _, steps = play(make("ms_pacman", 1), make_actions(100, 1, 9))
    assert max(step.reward[0] for step in steps) == 10


@pytest.mark.parametrize("settings", [{"sticky_actions": 0.25}, {"fire_after_life_loss": True}])
def test_picture_shows_the_same_atari_game_in_colour(settings):
    # The gray frame must follow from the picture, also with sticky actions, lost lives and new games.
    plain, drawn = (make("breakout", 2, **settings, pictures=pictures) for pictures in (False, True))
    assert np.array_equal(plain.reset(), drawn.reset())
    num_ended = 0
    for row in make_actions(400, 2, 4):
        expected, step = plain.step(row), drawn.step(row)
        check_equal(expected, step)
        num_ended += step.terminated[0]
        picture = drawn.picture()
        assert (picture.shape, picture.dtype) == ((210, 160, 3), np.uint8)
        gray = cv2.resize(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)
        assert np.abs(gray.astype(int) - step.observation[0, -1]).max() <= 2  # ALE's gray palette is rounded.
    assert num_ended >= 1
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 4
    drawn.close()
    plain.close()


# Seeds


@pytest.mark.parametrize("name", ["breakout", "CartPole-v1", "FrozenLake-v1"])
def test_equal_seeds_give_equal_games(name):
    actions = make_actions(300, 2, 2)
    (first, steps), (again, steps_again) = (play(make(name, 2, seed=7, sticky_actions=0.25), actions) for _ in "ab")
    assert np.array_equal(first, again)
    for step, other in zip(steps, steps_again, strict=True):
        check_equal(step, other)
    assert any(step.terminated.any() for step in steps)


@pytest.mark.parametrize("name", ["pong", "CartPole-v1"])
def test_game_does_not_depend_on_the_number_of_environments(name):
    actions = make_actions(20, 3, 2)
    few, many = play(make(name, 2), actions[:, :2])[1], play(make(name, 3), actions)[1]
    assert all(np.array_equal(a.observation, b.observation[:2]) for a, b in zip(few, many, strict=True))


def test_neighbouring_seeds_share_no_game():
    # With ALE's seeds, seed, seed + 1 ..., environment 1 of seed 1 would be environment 0 of seed 2.
    firsts = [make("CartPole-v1", 8, seed=seed).reset() for seed in range(8)]
    assert len({row.tobytes() for first in firsts for row in first}) == 64


@pytest.mark.parametrize("name", ["freeway", "CartPole-v1"])
def test_second_reset_begins_other_but_reproducible_episodes(name):
    environment, again = make(name, 2), make(name, 2)
    firsts, seconds = zip(*((one.reset(), one.reset()) for one in (environment, again)), strict=True)
    assert np.array_equal(*firsts)
    assert np.array_equal(*seconds)
    assert not np.array_equal(firsts[0], seconds[0])


# Gymnasium


def test_a_game_that_needs_box2d_names_the_extra(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "Box2D", None)  # as if it were not installed
    with pytest.raises(UsageError) as refused:
        describe(make_config("LunarLander-v3"), 3)
    assert refused.value.remedy.startswith("install")
    assert refused.value.remedy.endswith("-m pip install 'gymnasium[box2d]'")


@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # As an error, it ends Box2D.
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1", "LunarLander-v3"])
def test_steps_equal_a_loop_over_one_gymnasium_environment(name):
    schema = describe(make_config(name), 3)
    actions = make_actions(300, 2, schema.num_actions)
    first, steps = play(make(name), actions)
    for i, seed in enumerate(ale_seeds(1, 2)):
        oracle = gymnasium.make(name)

        def to_vector(raw, space=oracle.observation_space):
            return np.asarray(spaces.flatten(space, raw), np.float32)

        raw, _ = oracle.reset(seed=int(seed))
        assert np.array_equal(first[i, 0], to_vector(raw))
        num_ended = 0
        for row, step in zip(actions, steps, strict=True):
            raw, reward, terminated, truncated, _ = oracle.step(row[i])
            assert (step.reward[i], step.terminated[i]) == (np.float32(reward), terminated)
            if terminated or truncated:
                assert np.array_equal(step.final_observation[i, 0], to_vector(raw))
                raw, _ = oracle.reset()
                num_ended += 1
            assert np.array_equal(step.observation[i, 0], to_vector(raw))
        assert num_ended >= 1
        oracle.close()


def test_end_of_an_episode_gives_last_and_first_observation():
    first, steps = play(make(here(make_counter), 1), np.zeros((4, 1), np.int64))
    assert first.tolist() == [[[1, 0]]]
    assert [step.observation.tolist() for step in steps] == [[[[1, 1]]], [[[1, 2]]], [[[2, 0]]], [[[2, 1]]]]
    assert steps[2].final_observation.tolist() == [[[1, 3]]]
    assert [step.terminated.tolist() for step in steps] == [[False], [False], [True], [False]]
    assert not any(step.truncated.any() or step.life_lost.any() for step in steps)


class Reporter(Counter):
    """Reports the number of its episode in each step. The third step of the second environment is faulty."""

    made = 0

    def __init__(self):
        Reporter.made += 1
        super().__init__(faults={3: {"info": {}, "reward": "x"}} if Reporter.made == 2 else {})

    def step(self, action):
        *answer, info = super().step(action)
        return *answer, {**info, "metrics": {"episode": self.episode}}


def test_metrics_are_those_of_the_last_step_of_each_environment(monkeypatch):
    monkeypatch.setattr(Reporter, "made", 0)
    _, steps = play(make(here(Reporter), 3), np.zeros((6, 3), np.int64))
    found = [step.metrics for step in steps]
    assert found[2] == {0: {"episode": 1.0}, 2: {"episode": 1.0}}  # The last step of environment 1 was faulty.
    assert found[5] == {i: {"episode": 2.0 - (i == 1)} for i in range(3)}
    assert [found[t] for t in (0, 1, 3, 4)] == [{}] * 4


def test_episodes_of_one_step_end_at_each_step():
    first, steps = play(make(here(make_one_step_counter), 2), np.zeros((3, 2), np.int64))
    assert first.tolist() == [[[1, 0]]] * 2
    for t, step in enumerate(steps, start=1):
        assert step.terminated.tolist() == [True, True]
        assert step.final_observation.tolist() == [[[t, 1]]] * 2
        assert step.observation.tolist() == [[[t + 1, 0]]] * 2


def test_resting_environment_pauses_until_the_next_reset():
    environment, twin = (make(here(make_counter), 2) for _ in "ab")
    first, expected = play(twin, np.zeros((4, 2), np.int64))
    assert np.array_equal(environment.reset(), first)
    action = np.zeros(2, np.int64)
    environment.step(action)
    environment.rest(1)
    for step in expected[1:]:
        got = environment.step(action)
        assert got.observation[1].tolist() == [[1, 1]]
        assert (got.reward[1], bool(got.terminated[1]), bool(got.truncated[1])) == (0.0, False, False)
        assert np.array_equal(got.observation[0], step.observation[0])
        assert (got.reward[0], got.terminated[0]) == (step.reward[0], step.terminated[0])
    environment.reset()
    assert environment.step(action).observation[1].tolist() == [[2, 1]]


@pytest.mark.parametrize(
    ("factory", "terminated"), [(make_truncated_counter, False), (make_counter_with_both_ends, True)]
)
def test_step_limit_truncates_unless_the_state_is_terminal(factory, terminated):
    _, steps = play(make(here(factory), 1), np.zeros((3, 1), np.int64))
    assert (steps[2].terminated.tolist(), steps[2].truncated.tolist()) == ([terminated], [not terminated])
    assert steps[2].final_observation.tolist() == [[[1, 3]]]


def test_gymnasiums_time_limit_truncates():
    # These actions keep MountainCar in its valley until its TimeLimit of 200 steps.
    _, steps = play(make("MountainCar-v0", 1), np.tile([[0], [2]], (100, 1)))
    assert [t for t, step in enumerate(steps, start=1) if step.truncated[0]] == [200]
    assert not any(step.terminated.any() for step in steps)


def test_actions_begin_at_the_start_of_the_space():
    _, (step,) = play(make(here(make_counter), 3), np.array([[0, 1, 2]]))
    assert step.reward.tolist() == [5, 6, 7]  # The reward of a Counter is the number of its action.


@pytest.mark.parametrize(
    ("name", "highest", "action"), [("pong", 5, -1), ("pong", 5, 6), (COUNTER, 2, -1), (COUNTER, 2, 3)]
)
def test_invalid_action_is_refused(name, highest, action):
    environment = make(name, 2)
    environment.reset()
    with pytest.raises(ValueError, match=rf"\b{highest}\b.*{action}"):
        environment.step(np.array([0, action]))


def test_discrete_observation_is_one_hot():
    first, steps = play(make(here(Tokens), 1), np.zeros((3, 1), np.int64))
    assert first.tolist() == [[[1, 0, 0, 0]]]
    assert [step.observation[0, 0].argmax() for step in steps] == [1, 2, 3]
    assert all(step.observation.sum() == 1 for step in steps)


def test_composite_observations_are_flattened_in_order():
    assert make(here(Board), 1).reset()[0, 0].tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert make(here(Mixed), 1).reset().tolist() == [[[0, 1, 0, 0.25, -0.5]]]


def test_returned_arrays_never_change():
    for name in ("pong", here(Pictures), here(make_counter)):
        environment = make(name, 2)
        kept = [environment.reset()]
        copies = [kept[0].copy()]
        for row in make_actions(8, 2, 3):
            step = environment.step(row)
            kept += [step.observation, step.final_observation]
            copies += [array.copy() for array in kept[-2:]]
        assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))
        environment.close()


def test_close_and_a_refused_description_close_every_environment():
    envs = []
    FACTORY.make = lambda: envs.append(Counter()) or envs[-1]
    environment = make(here(made_by_the_test), 3)
    environment.reset()
    environment.close()
    FACTORY.make = lambda: envs.append(Sentences()) or envs[-1]
    with pytest.raises(UsageError):
        describe(make_config(here(made_by_the_test)), 3)
    assert [env.closed for env in envs] == [True] * 4


def test_environments_before_one_that_cannot_be_made_are_closed():
    envs = []

    def make_two():
        if len(envs) == 2:
            raise OSError("no licence")
        return envs.append(Counter()) or envs[-1]

    FACTORY.make = make_two
    with pytest.raises(UsageError, match="no licence"):
        make(here(made_by_the_test), 3)
    assert [env.closed for env in envs] == [True] * 2


# Images


@pytest.mark.parametrize("env", [Pictures, GrayPictures, OneChannelPictures, TransparentPictures])
def test_images_are_grayscale_resized_and_stacked(env):
    def gray(episode, t):
        image = np.random.default_rng([episode, t]).integers(0, 256, env.shape, np.uint8)
        if len(env.shape) == 3 and env.shape[2] > 1:
            weights = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)
            image = np.rint(image[..., :3] @ weights).astype(np.uint8)
        return cv2.resize(image, (84, 84), interpolation=cv2.INTER_AREA).astype(int)

    first, steps = play(make(here(env), 1, image_size=84, grayscale=True, frame_stack=4), np.zeros((7, 1), np.int64))
    assert (first[0, :3] == 0).all()
    stacks = [step.observation[0] for step in steps]
    stacks[5] = steps[5].final_observation[0]  # The last step of the episode.
    history = [np.zeros((84, 84), int)] * 3 + [gray(1, t) for t in range(7)]
    for t, stack in enumerate([first[0], *stacks[:6]]):
        assert np.abs(stack - np.array(history[t : t + 4])).max() <= 1  # OpenCV's weights are fixed-point.
    assert (steps[5].observation[0, :3] == 0).all()
    assert np.abs(steps[5].observation[0, 3] - gray(2, 0)).max() <= 1
    assert np.array_equal(stacks[6][2], steps[5].observation[0, 3])


def test_image_size_and_stack_are_configured():
    first = make(here(Pictures), 1, image_size=40, frame_stack=2).reset()
    assert first.shape == (1, 2, 40, 40, 3)


# Pictures


def test_picture_is_the_rendering_of_environment_0():
    environment = make(here(Pictures), 2, pictures=True)
    environment.reset()
    environment.step(np.zeros(2, np.int64))
    assert environment.picture().tolist() == np.full((4, 5, 3), [1, 1, 255]).tolist()


@pytest.mark.parametrize("name", ["pong", here(Pictures)])
def test_picture_without_pictures_is_refused(name):
    environment = make(name)
    environment.reset()
    with pytest.raises(RuntimeError, match="pictures=True"):
        environment.picture()


@pytest.mark.parametrize(("factory", "named"), [(make_counter, "None.*'rgb_array'"), (Undrawable, "None.*'rgb_array'")])
def test_environment_that_cannot_be_drawn_is_refused(factory, named):
    with pytest.raises(UsageError, match=named):
        make(here(factory), pictures=True)
