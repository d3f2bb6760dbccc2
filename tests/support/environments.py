"""Environments of Gymnasium with predictable results, and helpers that create and play them."""

from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium import spaces

from apex.config import EnvironmentConfig
from apex.environments.factory import make_environment


def make_config(name="ALE/Pong-v5", **settings):
    return EnvironmentConfig(id=name, **settings)


def make(name="ALE/Pong-v5", num_envs=2, seed=1, pictures=False, **settings):
    return make_environment(make_config(name, **settings), num_envs, seed=seed, num_threads=1, pictures=pictures)


def make_actions(num_steps, num_envs, num_actions, seed=0):
    return np.random.default_rng(seed).integers(0, num_actions, (num_steps, num_envs))


def play(environment, actions):
    """Returns the first observation, and the step of each row of `actions`."""
    first = environment.reset()
    steps = [environment.step(row) for row in actions]
    environment.close()
    return first, steps


class Counter(gymnasium.Env):
    """Observes (episode, step within it). Ends after `length` steps, in the way of `end`."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3, start=5)

    def __init__(self, length=3, end="terminated", faults=None):
        self.length, self.end, self.faults = length, end, faults or {}
        self.episode, self.num_steps, self.seeds, self.closed = 0, 0, [], False

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.num_steps, self.t = self.num_steps + 1, self.t + 1
        fault = self.faults.get(self.num_steps, {})
        if "error" in fault:
            raise fault["error"]
        ended = self.t == self.length
        answer = {
            "observation": self.observe(),
            "reward": float(action),
            "terminated": ended and "terminated" in self.end,
            "truncated": ended and "truncated" in self.end,
            "info": {},
        }
        return fault.get("answer", tuple((answer | fault).values()))

    def observe(self):
        return np.array([self.episode, self.t], np.float64)

    def close(self):
        self.closed = True


class Pictures(Counter):
    """Images of any shape whose pixels encode episode and step, in colour."""

    shape = (100, 120, 3)

    def __init__(self, render_mode=None):
        super().__init__(length=6)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, self.shape, np.uint8)

    def observe(self):
        rng = np.random.default_rng([self.episode, self.t])
        return rng.integers(0, 256, self.shape, np.uint8)

    def render(self):
        return np.full((4, 5, 3), [self.episode, self.t, 255], np.uint8)


class Tokens(Counter):
    """Observes its step as one of the numbers 10 ... 13; later steps violate the observation space."""

    observation_space = spaces.Discrete(4, start=10)

    def __init__(self):
        super().__init__(length=9)

    def observe(self):
        return 10 + self.t


def here(factory):
    """Returns the id of a factory."""
    return f"{factory.__module__}:{factory.__name__}"


FACTORY = SimpleNamespace(make=Counter)


def made_by_the_test():
    return FACTORY.make()


def install_planes(folder):
    """Returns a folder for sys.path with a package that declares how the environment Planes/Race-v1 is registered."""
    package = folder / "installed"
    (package / "planes-1.dist-info").mkdir(parents=True)
    (package / "planes-1.dist-info" / "METADATA").write_text("Name: planes\nVersion: 1\n")
    (package / "planes-1.dist-info" / "entry_points.txt").write_text("[gymnasium.envs]\nPlanes = planes:register_all\n")
    (package / "planes.py").write_text(
        "import gymnasium, pathlib\npathlib.Path('imported').touch()\n"
        "def register_all():\n    gymnasium.register('Race-v1', entry_point='planes_race:Race')\n"
    )
    (package / "planes_race.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as Race")
    return package
