"""Before a run, a child process plays the environment, and builds the user's network and algorithm."""

import json

import pytest
from support.builders import VECTORS

from apex.config import Config, EnvironmentConfig, NetworkConfig
from apex.environments.inspection import MAX_STEPS, Inspector
from apexreplay.errors import UsageError

pytestmark = pytest.mark.programs

GAME = """
import os, sys, time
import gymnasium, numpy as np
from gymnasium import spaces

class Game(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)
    info = {}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.see(), self.info

    def step(self, action):
        with open("actions", "a") as file:
            print(np.asarray(action).tolist(), file=file)
        self.time += 1
        return self.see(), 0.0, False, self.time == 4, self.info

    def see(self):
        return np.zeros(2, np.float32)

class Env(Game):
"""
SPACE = """observation_space = spaces.Dict({"goal": spaces.Box(0, 10, (2,), np.float32), "place": spaces.Discrete(3)})
    def see(self): return {"goal": np.zeros(2, np.float32), "place": 1} | self.odd
    odd = """
STEP = """
    def step(self, a):
        self.check(a)
        return super().step(a)
    def check(self, a): """
ODD = {  # body of an environment's class -> what the refusal names
    "def step(self, action): 1 / 0": ["raised ZeroDivisionError", "(odd.py, line 28)", "step 1"],
    "def step(self, action): return np.zeros(action - 9)": ["ValueError", "(odd.py, line 28)"],  # numpy raises it
    "def step(self, action): return super().step({0: 0}[action])": ["KeyError", "(odd.py, line 28)"],
    "def step(self, action): sys.exit(4)": ["SystemExit: 4", "step 1"],
    "def step(self, action): os._exit(7)": ["status 7"],
    "def step(self, action): return super().step(action)[:4]": ["tuple of 4", "terminated, truncated"],
    "def step(self, action): return None": ["NoneType"],
    "def step(self, action): return self.see(), np.nan, False, False, {}": ["reward nan"],
    "def step(self, action): return self.see(), None, False, False, {}": ["reward None"],
    "def step(self, action): return self.see(), 0.0, None, False, {}": ["terminated None"],
    "def step(self, action): return np.array([0, np.inf]), 0.0, False, False, {}": ["inf]", "not finite"],
    "def step(self, action): return np.zeros(3), 0.0, False, False, {}": ["float64[3]", "Box"],
    "def see(self): return np.zeros((2, 1))": ["float64[2, 1]", "in its reset", "step 0"],
    "def reset(self, seed=None, options=None): return self.see()": ["float32[2]", "(observation, info)"],
    "def reset(self): return self.see(), {}": ["TypeError", "seed", "in its reset"],
    "def reset(self, seed=None, options=None, n=[]): n.append(1); return super().reset() if n == [1] else 1 / 0": [
        "ZeroDivisionError", "in its reset", "step 4",
    ],
    "action_space = spaces.MultiDiscrete([3, 4])" + STEP + "assert a.tolist() != [2, 3], 'pair'": ["Error: pair"],
    "action_space = spaces.Box(-2, 2, (3,))" + STEP + "assert (a < 2).any(), 'high'": ["AssertionError: high"],
    "action_space = spaces.Box(-2, 2, (3,))" + STEP + "assert (a > -2).any(), 'low'": ["AssertionError: low"],
    "info = {'action_mask': np.zeros(3, np.int8)}": ["action_mask", "no action"],
    "info = {'action_mask': np.ones(2, np.int8)}": ["action_mask", "expected 3"],
    SPACE + "{'goal': np.array([0, 11], np.float32)}": ["['goal'][1] 11", "0 ... 10"],
    SPACE + "{'goal': np.array([np.nan, 0], np.float32)}": ["['goal'][0] nan", "0 ... 10"],
    SPACE + "{'goal': np.zeros(2)}": ["['goal'] float64[2]", "float32"],
    SPACE + "{'place': 3}": ["['place'] 3", "Discrete(3)"],
    SPACE + "{'more': 3}": ["'more': 3", "['goal', 'place']"],
    "observation_space = spaces.Tuple([spaces.Discrete(2)])\n    def see(self): return (2,)": ["[0] 2", "Discrete(2)"],
    "observation_space = spaces.Tuple([spaces.Discrete(2)])\n    def see(self): return (1, 1)": ["(1, 1)", "[0]"],
    "observation_space = spaces.Discrete(3)\n    def see(self): return self.time": ["the observation 3", "Discrete(3)"],
    "observation_space = spaces.Dict({'goal': spaces.Box(0, 10, (1,), np.float32)})\n    def see(self, n=[]):"
    " n.append(1); return {'goal': np.full(1, len(n) // 50, np.float32)}": ["['goal'][0] 11", "0 ... 10", "step 4"],
}  # fmt: skip


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Returns a function that makes a configuration whose environment's class has this body."""
    monkeypatch.chdir(tmp_path)

    def write(body):
        (tmp_path / "odd.py").write_text(f"{GAME}    {body}\n")
        return Config(environment=EnvironmentConfig(id="odd:Env"))

    return write


def played(folder):
    """The actions that were played."""
    return [json.loads(line) for line in (folder / "actions").read_text().splitlines()]


@pytest.mark.parametrize("body", ODD)
def test_an_odd_environment_is_refused_with_its_fault(body, game):
    with pytest.raises(UsageError) as refused:
        Inspector().schema(game(body))
    assert "environment.id 'odd:Env' " in refused.value.problem
    assert [part for part in ODD[body] if part not in refused.value.problem] == []
    assert refused.value.remedy


@pytest.mark.parametrize("fault", ["1 / 0", "return np.full(2, np.nan), 0.0, False, False, {}"])
def test_a_later_fault_that_a_run_tolerates_ends_the_trial(fault, game, tmp_path):
    body = f"""total = 0
    def step(self, action):
        Env.total += 1
        if Env.total == 200: {fault}
        return super().step(action)"""
    assert Inspector().schema(game(body)).num_actions == 3
    assert len(played(tmp_path)) == 199


def test_each_discrete_action_is_played_up_to_a_limit(game, tmp_path):
    Inspector().schema(game("pass"))
    assert set(played(tmp_path)) == {0, 1, 2}
    assert len(played(tmp_path)) == MAX_STEPS
    (tmp_path / "actions").unlink()
    Inspector().schema(game("action_space = spaces.Discrete(3_000, start=7)"))
    assert len(set(played(tmp_path))) == MAX_STEPS


def test_every_combination_and_only_allowed_actions_are_played(game, tmp_path):
    Inspector().schema(game("action_space = spaces.MultiDiscrete([3, 4])"))
    assert {tuple(action) for action in played(tmp_path)} == {(i, j) for i in range(3) for j in range(4)}
    (tmp_path / "actions").unlink()
    assert Inspector().schema(game("info = {'action_mask': np.array([1, 0, 1], np.int8)}")).masked
    assert set(played(tmp_path)) == {0, 2}


def test_the_bounds_of_a_box_and_values_within_are_played(game, tmp_path):
    Inspector().schema(game("action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float64)"))
    low, high, *others = played(tmp_path)
    assert (low, high) == ([-1.0, 0.0], [1.0, 4.0])
    values, corners = {tuple(map(abs, (2 * x, y - 2))) for x, y in others}, {(2.0, 2.0)}
    assert corners < values
    assert len(values) > MAX_STEPS / 3


def test_what_an_environment_prints_in_its_trial_is_not_shown(game, tmp_path, capfd):
    Inspector().schema(game("def see(self): print('printed', flush=True); return np.zeros(2, np.float32)"))
    assert "printed" not in capfd.readouterr().out


def test_a_breakpoint_is_passed_over_in_a_trial(game, tmp_path):
    Inspector().schema(game("def see(self): breakpoint(); return np.zeros(2, np.float32)"))
    assert len(played(tmp_path)) == MAX_STEPS


def test_a_slow_environment_is_stepped_once_after_the_time_limit(game, tmp_path, monkeypatch):
    monkeypatch.setattr("apex.environments.inspection.PLAY_SECONDS", 0.0)
    Inspector().schema(game("pass"))
    assert len(played(tmp_path)) == 1


OWN = """
import numpy as np, torch
from torch import nn
from apex.dqn.algorithm import DqnAgent, DqnAlgorithm
from support.linear_q import LinearQ

class Net(nn.Sequential):
    def __init__(self, schema):
        super().__init__(nn.Flatten(), nn.Linear(4, schema.num_actions))
"""
UNUSABLE = [  # setting, lines after those of OWN, name, and what the refusal names
    ("network", "", "nope:Net", ["ModuleNotFoundError", "'nope'"]),
    ("network", "", "own:Missing", ["Missing"]),
    ("network", "class Bad(Net):\n def __init__(self, schema): 1 / 0", "own:Bad", ["ZeroDivisionError", "line 11"]),
    ("network", "class Bad(Net):\n def forward(self, x): return x @ x", "own:Bad", ["RuntimeError", "line 11"]),
    ("network", "class Bad(Net):\n def forward(self, x): return super().forward(x)[:, 0]", "own:Bad", ["float32[2]"]),
    ("network", "def bad(schema): return 7", "own:bad", ["int"]),
    ("algorithm", "def bad(config, schema): return 7", "own:bad", ["lacks"]),
    ("algorithm", "def bad(config, schema): return schema.nothing", "own:bad", ["AttributeError", "line 10"]),
    ("algorithm", "class Bad(LinearQ):\n def make_network(self): 1 / 0", "own:Bad", ["ZeroDivisionError", "line 11"]),
    ("algorithm", "class Bad(LinearQ):\n def make_optimizer(self, n): return n.lr", "own:Bad", ["'lr'", "line 11"]),
    ("algorithm", "class Bad(LinearQ):\n def make_update(self): pass", "own:Bad", ["TypeError"]),
    ("algorithm", "class A(DqnAgent):\n def act(self, *x): return 0\nclass Bad(DqnAlgorithm):\n"
     " def make_agent(self, n, bfloat16=False): return A(n)", "own:Bad", ["act", "(2,), (), (2,)"]),
]  # fmt: skip


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Returns a function that makes a configuration with a network or an algorithm of the user."""
    monkeypatch.chdir(tmp_path)

    def write(setting, lines, name):
        (tmp_path / "own.py").write_text(OWN + lines)
        return Config(network=NetworkConfig(factory=name)) if setting == "network" else Config(algorithm=name)

    return write


@pytest.mark.parametrize(("setting", "lines", "name", "parts"), UNUSABLE)
def test_an_unusable_network_or_algorithm_is_refused(own, setting, lines, name, parts):
    with pytest.raises(UsageError) as refused:
        Inspector().try_algorithm(own(setting, lines, name), VECTORS)
    assert setting in refused.value.problem
    assert [part for part in (repr(name), *parts) if part not in refused.value.problem] == []


@pytest.mark.parametrize(("setting", "name"), [("network", "own:Net"), ("algorithm", "own:Mine")])
def test_a_usable_network_or_algorithm_is_accepted(own, setting, name):
    Inspector().try_algorithm(own(setting, "class Mine(LinearQ): pass", name), VECTORS)
