"""Writes the games of `apex evaluate --save-episodes` as a dataset of Minari."""

import importlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from apex.algorithms.interface import Mask
from apex.evaluation.episodes import ActFunction
from apex.runtime.optional_imports import remedy
from apex.types import Step
from apexreplay.errors import UsageError, require
from apexreplay.item_kinds import Array

OPTION = "--save-episodes"


class Game(NamedTuple):
    """One game of T steps: what the environment returned, and the actions that it took."""

    seed: int | None
    states: list[tuple[Any, dict[str, Array]]]  # T + 1 observations, each with the numbers of its info
    steps: list[tuple[Any, ...]]  # T times (action, reward, terminated, truncated)


class Dataset:
    """Records the games of each environment, and writes those that count."""

    is_complete = False  # whether the dataset has all its games

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        self._folder = folder
        self._facts = facts
        self._storage: Any = None  # Minari's; None before the first environment
        self._games: dict[int, list[Game]] = {}  # environment -> its running game, and the one before

    def record(self, env: gymnasium.Env[Any, Any], i: int) -> gymnasium.Env[Any, Any]:
        """Returns environment i, whose games are recorded."""
        self._create(env.observation_space, env.action_space, env.spec)
        return _Recorded(env, self, i)

    def act_in_atari(self, policy: ActFunction, num_actions: int, observation: Array, mask: Mask) -> Array:
        """Returns the policy's actions; records the first frames of Atari games, whose environment has no `record`."""
        if self._storage is None:
            self._create(spaces.Box(0, 255, observation.shape[2:], np.uint8), spaces.Discrete(num_actions))
            for i, frames in enumerate(observation):
                self.begin(i, frames[-1], {})
        return policy(observation, mask)

    def see_atari(self, step: Step) -> None:
        """Records a step of Atari games with the newest frame of each stack."""
        assert step.played is not None
        for i, ended in enumerate(step.over):
            frame = (step.final_observation if ended else step.observation)[i, -1]
            self.add(i, step.played[i], frame, step.reward[i], step.terminated[i], step.truncated[i], {})
            if ended:
                self.begin(i, step.observation[i, -1], {})

    def begin(self, i: int, observation: Any, info: Any, seed: int | None = None) -> None:
        """Begins a game of environment i."""
        game = Game(seed, [(deepcopy(observation), _numbers(info))], [])
        # A game without steps is one whose first observation was refused.
        self._games[i] = [game, *[other for other in self._games.get(i, []) if other.steps][:1]]

    def add(self, i: int, action: Any, observation: Any, *answer: Any) -> None:
        """Adds a step to the running game of environment i."""
        *values, info = answer
        self._games[i][0].states.append((deepcopy(observation), _numbers(info)))
        self._games[i][0].steps.append((deepcopy(action), *values))

    def write(self, i: int) -> None:
        """Writes the game of environment i before the running one."""
        game = self._games[i].pop()
        observations, infos = zip(*game.states, strict=True)
        actions, *answers = zip(*game.steps, strict=True)
        rewards, terminations, truncations = ([np.asarray(each).item() for each in values] for values in answers)
        common = {key: [info[key] for info in infos] for key in infos[0] if all(key in info for info in infos)}
        episode = importlib.import_module("minari.data_collector").EpisodeBuffer(
            seed=game.seed,
            observations=_by_part(self._storage.observation_space, observations),
            actions=_by_part(self._storage.action_space, actions),
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            infos={key: each for key, each in common.items() if len({(one.shape, one.dtype) for one in each}) == 1},
        )
        self._storage.update_episodes([episode])

    def _create(self, observations: spaces.Space[Any], actions: spaces.Space[Any], spec: Any = None) -> None:
        """Creates the files, unless an earlier environment has."""
        if self._storage is not None:
            return
        storage = importlib.import_module("minari.dataset.minari_storage").MinariStorage
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari leaves out a spec whose arguments are objects.
            try:
                self._storage = storage.new(self._folder / "data", observations, actions, spec, jpeg_encoding=False)
            except NotImplementedError as error:
                problem = f"{OPTION}: Minari cannot store {observations} and {actions}"
                raise UsageError(problem, "convert the space with a wrapper") from error
        self._storage.update_metadata(self._facts)


class _Recorded(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any], dataset: Dataset, i: int) -> None:
        super().__init__(env)
        self._dataset = dataset
        self._i = i

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        answer = self.env.reset(seed=seed, options=options)
        self._dataset.begin(self._i, *answer, seed=seed)
        return answer

    def step(self, action: Any) -> Any:
        answer = self.env.step(action)
        self._dataset.add(self._i, action, *answer)
        return answer


@contextmanager
def new_dataset(target: Path, algorithm: str, description: str) -> Iterator[Dataset]:
    """Yields a dataset, which is at `target` after the context if it is complete; otherwise, nothing is left."""
    is_id = re.fullmatch(r"[-\w]+-v\d+", target.name) is not None
    require(is_id, f"{OPTION} must name a folder as Minari does, such as games-v0, got {target}")
    require(not os.path.lexists(target), f"{OPTION} {target} exists", remedy="choose a new folder, or remove it")
    try:
        importlib.import_module("minari.dataset._storages.hdf5_storage")  # Needs h5py.
    except ImportError as error:
        raise UsageError(f"{OPTION}: {error}", f"install Minari: {remedy('minari')}") from error
    facts = {"dataset_id": target.name, "algorithm_name": algorithm, "description": description}
    folder = target.absolute().with_name(f".{target.name}.{os.getpid()}")  # hidden until it is complete
    try:
        folder.mkdir()
        dataset = Dataset(folder, {**facts, "minari_version": importlib.import_module("minari").__version__})
        yield dataset
        if dataset.is_complete:
            folder.rename(target)
    except OSError as error:
        raise UsageError(f"{OPTION} {target} cannot be written: {error}", "choose another folder") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _numbers(info: Any) -> dict[str, Array]:
    """Returns copies of the numbers of an info, if Minari can store their names."""
    items = info.items() if isinstance(info, Mapping) else ()
    numbers = {key: np.array(value) for key, value in items if isinstance(value, (int, float, np.generic, np.ndarray))}
    return {k: v for k, v in numbers.items() if v.dtype.kind in "biuf" and isinstance(k, str) and k.isidentifier()}


def _by_part(space: spaces.Space[Any], values: Any) -> Any:
    """Returns the values of a game as Minari stores them: the parts of a dictionary or tuple each have a list."""
    if isinstance(space, spaces.Dict):
        return {key: _by_part(part, [value[key] for value in values]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_by_part(part, [value[j] for value in values]) for j, part in enumerate(space.spaces))
    return [value if isinstance(value, str) else np.asarray(value) for value in values]
