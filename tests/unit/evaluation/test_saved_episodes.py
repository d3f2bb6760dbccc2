"""`apex evaluate --save-episodes`: Minari reads the games back as they were played."""

import json
import os
import signal
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.environments import FACTORY, Counter, here, made_by_the_test, make_config
from support.policy_runs import make_run

import apex
from apex.environments.factory import make_environment
from apex.evaluation.command import main
from apex.evaluation.episodes import evaluation_seed

minari = pytest.importorskip("minari", reason="needs the extra minari, which dev has")
pytest.importorskip("h5py", reason="needs the extra minari, which dev has")

GAMES = []  # of all environments of a test, in the order of their begin


class Taped(gymnasium.Env):
    """Games of 2, 3, 4, ... steps with random observations; GAMES has all that it returned and took."""

    observation_space = spaces.Box(0, 255, (40, 36, 3), np.uint8)
    action_space = spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(len(GAMES))
        observation = self.observation_space.sample()
        self.game = {"seed": seed, "observations": [observation], "actions": [], "rewards": [], "ends": []}
        GAMES.append(self.game)
        return observation, {"speed": np.zeros(2, np.float32), "first": True}

    def step(self, action):
        self.game["actions"].append(action)
        observation, reward = self.observation_space.sample(), float(10 ** len(GAMES) + len(self.game["actions"]))
        over = len(self.game["actions"]) == len(GAMES) + 1
        self.game["observations"].append(observation)
        self.game["rewards"].append(reward)
        self.game["ends"].append((over and len(GAMES) % 2 == 0, over and len(GAMES) % 2 == 1))
        info = {"speed": np.full(2, len(self.game["actions"]), np.float32), "text": "no number", "last": over}
        return observation, reward, *self.game["ends"][-1], info


class Parts(Taped):
    """Nested parts, and actions in -2 ... 6."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (40, 40, 3), np.uint8),
            "at": spaces.Tuple((spaces.Discrete(4, start=10), spaces.MultiBinary(3))),
            "wind": spaces.Box(-1, 1, (2,), np.float64),
            "hint": spaces.Text(8, min_length=1),
        }
    )
    action_space = spaces.Box(-2, 6, (2,), np.float32)


class Combined(Taped):
    """Two discrete values each."""

    observation_space = spaces.MultiDiscrete([3, 4])
    action_space = spaces.MultiDiscrete([2, 3])


def evaluate(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def parts(space, value):
    """The values of the parts of an observation without parts."""
    if isinstance(space, spaces.Dict):
        return [each for key in space.spaces for each in parts(space[key], value[key])]
    if isinstance(space, spaces.Tuple):
        return [each for i, part in enumerate(space.spaces) for each in parts(part, value[i])]
    return [value]


@pytest.mark.parametrize("environment", [Taped, Parts, Combined])
def test_games_are_read_back_as_they_were_played(tmp_path, capsys, environment):
    GAMES.clear()
    target, name = tmp_path / "games-v0", here(environment)
    result = evaluate(
        capsys, "--random", "--env", name, "--episodes", 5, "--envs", 1, "--seed", 3, "--save-episodes", target
    )
    dataset, space = minari.MinariDataset(target / "data"), environment.observation_space
    assert (dataset.observation_space, dataset.action_space) == (space, environment.action_space)
    assert (dataset.spec.dataset_id, dataset.env_spec) == ("games-v0", None)
    metadata = dataset.storage.metadata
    assert metadata["algorithm_name"] == "random"
    assert metadata["description"].endswith("seed 3, epsilon 1")
    assert name in metadata["description"]
    assert not {"author", "author_email"} & set(metadata)
    episodes = list(dataset)
    assert [float(np.sum(each.rewards)) for each in episodes] == result["scores"]
    games = [game for game in GAMES if any(map(any, game["ends"]))]
    assert [len(each.rewards) for each in episodes] == result["lengths"] == [len(game["rewards"]) for game in games]
    seeds = [metadata.get("seed") for metadata in dataset.storage.get_episode_metadata(range(5))]
    assert seeds == [games[0]["seed"], None, None, None, None]
    assert games[0]["seed"] is not None
    for episode, game in zip(episodes, games, strict=True):
        for found, *expected in zip(
            parts(space, episode.observations), *(parts(space, x) for x in game["observations"]), strict=True
        ):
            assert list(found) == expected if isinstance(expected[0], str) else np.array_equal(found, expected)
        np.testing.assert_array_equal(episode.actions, game["actions"])
        assert episode.rewards.tolist() == game["rewards"]
        assert list(zip(episode.terminations, episode.truncations, strict=True)) == game["ends"]
        assert set(episode.infos) == {"speed"}  # Only `speed` is a number in every info of a game.
        assert episode.infos["speed"].tolist() == [[t, t] for t in range(len(game["rewards"]) + 1)]


def test_a_registered_environment_is_recovered_and_its_policy_named(tmp_path):
    run = make_run(tmp_path, best=70)
    result = apex.evaluate(run.path, 4, num_envs=3, save_episodes=tmp_path / "cartpole-v3")
    dataset = minari.MinariDataset(tmp_path / "cartpole-v3/data")
    assert sorted(len(each.rewards) for each in dataset) == sorted(result.lengths)
    assert [len(each.rewards) for each in dataset] == result.lengths
    assert dataset.storage.metadata["algorithm_name"] == "dqn"
    recovered = dataset.recover_environment()
    assert recovered.spec.id == "CartPole-v1"
    recovered.close()


def replay(actions):
    """The frames of the first game of environment 0, played again."""
    environment = make_environment(make_config(), 1, seed=evaluation_seed(1))
    frames = [environment.reset()[0, -1]]
    for action in actions:
        step = environment.step(np.array([action]))
        frames.append((step.final_observation if step.over[0] else step.observation)[0, -1])
    environment.close()
    return frames


def test_atari_games_are_saved_as_frames(tmp_path, capsys):
    target = tmp_path / "pong-v0"
    arguments = ["--random", "--env", "ALE/Pong-v5", "--episodes", 3, "--envs", 2, "--seed", 1]
    result = evaluate(capsys, *arguments, "--save-episodes", target)
    episodes = list(minari.MinariDataset(target / "data"))
    assert [len(each.rewards) for each in episodes] == result["lengths"]
    assert [float(np.sum(each.rewards)) for each in episodes] == result["scores"]
    assert result["scores"] == evaluate(capsys, *arguments)["scores"]
    assert sum(np.array_equal(each.observations, replay(each.actions)) for each in episodes) == 1


def test_games_that_failed_are_not_saved(tmp_path, capsys, monkeypatch):
    # The second answer of the first environment is no answer, and the last one of the second has a bad reward.
    faults = iter([{}, {2: {"error": RuntimeError("lost")}}, {3: {"reward": "much"}}])
    monkeypatch.setattr(FACTORY, "make", lambda: Counter(faults=next(faults, {})))
    target, name = tmp_path / "games-v0", here(made_by_the_test)
    result = evaluate(capsys, "--random", "--env", name, "--episodes", 2, "--envs", 1, "--save-episodes", target)
    episodes = list(minari.MinariDataset(target / "data"))
    assert [float(sum(episode.rewards)) for episode in episodes] == result["scores"]
    assert [episode.observations.tolist() for episode in episodes] == [[[n, t] for t in range(4)] for n in (1.0, 2.0)]


class Refused(Taped):
    """The reset after the first finished game returns no number."""

    observation_space = spaces.Box(0, 1, (3,), np.float32)
    num_refused = 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        if len(GAMES) < 2 or not any(map(any, GAMES[-2]["ends"])) or Refused.num_refused:
            return observation, info
        Refused.num_refused += 1
        return observation * np.nan, info


def test_a_refused_first_observation_loses_no_finished_game(tmp_path, capsys):
    GAMES.clear()
    target = tmp_path / "games-v0"
    result = evaluate(
        capsys, "--random", "--env", here(Refused), "--episodes", 2, "--envs", 1, "--save-episodes", target
    )
    episodes = list(minari.MinariDataset(target / "data"))
    assert [len(each.rewards) for each in episodes] == result["lengths"]
    assert (len(result["lengths"]), Refused.num_refused) == (2, 1)


class Interrupted(Counter):
    def step(self, action):
        if self.episode == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def test_an_interrupted_evaluation_leaves_nothing(tmp_path, capsys):
    target = tmp_path / "games-v0"
    arguments = ["--random", "--env", here(Interrupted), "--envs", "1", "--save-episodes", str(target)]
    assert main(arguments) == 130
    assert f"{target} was not written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("old-v0", "old-v0 exists"), ("games", "games-v0, got games"), ("gone/new-v0", "No such file")],
)
def test_an_unusable_folder_is_refused(tmp_path, monkeypatch, capsys, name, message):
    monkeypatch.chdir(tmp_path)
    Path("old-v0").mkdir()
    assert main(["--random", "--env", "CartPole-v1", "--save-episodes", name]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old-v0"]


def pool(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs)


def test_a_vector_environment_is_refused(tmp_path, capsys):
    arguments = ["--random", "--env", here(pool), "--save-episodes", str(tmp_path / "new-v0")]
    assert main(arguments) == 2
    assert "VectorEnv" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Words(spaces.Space):
    """A space of the user, like MiniGrid's missions."""

    def __init__(self):
        super().__init__((), str)

    def sample(self, mask=None, probability=None):
        return "go"

    def contains(self, x):
        return isinstance(x, str)


class Missions(Taped):
    observation_space = spaces.Dict({"at": spaces.Discrete(2), "mission": Words()})


def test_a_space_that_minari_cannot_store_is_refused(tmp_path, capsys):
    arguments = ["--random", "--env", here(Missions), "--save-episodes", str(tmp_path / "new-v0")]
    assert main(arguments) == 2
    assert "Minari cannot store Dict('at'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    storage = minari.dataset._storages.hdf5_storage.HDF5Storage

    def fail(self, episodes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "update_episodes", fail)
    assert main(["--random", "--env", "CartPole-v1", "--save-episodes", str(tmp_path / "new-v0")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs/guide/episodes.md").read_text()
    command, script = (page.partition(f"```{language}\n")[2].partition("```")[0] for language in ("bash", "python"))
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", name="RUN", best=70)
    assert main([*command.split()[2:], "--episodes", "2"]) == 0
    capsys.readouterr()
    exec(script, {})
    lengths = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert len(lengths) == 2
    assert all(8 <= int(length) <= 11 for length in lengths)  # The pole falls after 8 to 11 pushes in one direction.
