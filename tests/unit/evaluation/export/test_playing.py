"""Tests that the model card's code plays the environment as the policy does, with torch and with ONNX."""

import re
import subprocess
import sys
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from support.environments import install_planes

from apex import export, load_policy
from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EnvironmentConfig, NetworkConfig, R2d2Config, RunConfig
from apex.config.algorithm_choice import with_sequences
from apex.environments import foreign
from apex.environments.factory import describe
from apex.evaluation.export.playing import _creation, write_fire
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy
from apex.runs.folder import RunFolder
from apex.runtime import trust

MIXED = spaces.Dict({"where": spaces.Box(-2.0, 2.0, (3,), np.float64), "goal": spaces.Discrete(3)})
COLOR = spaces.Box(0, 255, (50, 40, 3), np.uint8)


class Game(gymnasium.Env):
    """Shows samples; the reward depends on the action."""

    observation_space = MIXED
    action_space = spaces.Discrete(4, start=-2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.sample(), self.info()

    def step(self, action):
        assert self.action_space.contains(action), (action, type(action))
        self.steps += 1
        values = np.asarray(action, np.float64).reshape(-1)
        return self.sample(), float(values @ np.arange(1, 1 + values.size)), False, self.steps == 9, self.info()

    def sample(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def info(self):
        return {}


class Grid(Game):
    observation_space = COLOR
    action_space = spaces.MultiDiscrete(np.array([[2, 2], [2, 2]]), start=np.array([[1, 0], [0, 5]]))


class Camera(Game):
    observation_space = spaces.Dict(
        {
            "camera": COLOR,
            "large": spaces.Box(0, 255, (150, 40), np.uint8),
            "cells": spaces.Box(0, 10, (7, 7, 3), np.uint8),
            "planes": spaces.Box(0, 1, (6, 6, 4), bool),
            "arm": spaces.Box(-1.0, 1.0, (3,)),
            "task": spaces.Text(5),
            "goal": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(3)]),
            "ram": spaces.Box(0, 9, (4,), np.uint8),
        }
    )


class Cells(Game):
    observation_space = spaces.Box(0, 10, (7, 7, 3), np.uint8)


class Switches(Game):
    observation_space = spaces.Box(0, 255, (40, 40, 1), np.uint8)
    action_space = spaces.MultiBinary(3)


class Arm(Game):
    action_space = spaces.Box(np.float32([[-2, 0]]), np.float32([[2, 10]]))

    def __init__(self, length=1.0):
        assert length == 2.0


class Eye(Arm):
    observation_space = COLOR


class Robot(Arm):
    observation_space = Camera.observation_space


class Masked(Game):
    def info(self):
        return {"action_mask": np.array([0, 1, 1, 0], np.int8)}


class Memory(Game):
    observation_space = spaces.Box(0, 255, (128,), np.uint8)


class Screen(Game):
    observation_space = spaces.Box(0, 255, (160, 150), np.uint8)


class States(Game):
    """Parts with the names of a network's inputs and outputs."""

    observation_space = spaces.Dict(
        {name: spaces.Box(-1.0, 1.0, (3,)) for name in ("state", "q", "next_state")}
        | {"planes": Camera.observation_space["planes"]}
    )


class Pads(Game):
    action_space = spaces.MultiDiscrete([2, 3])

    def info(self):
        return {"action_mask": (np.array([0, 1], np.int8), np.array([1, 0, 1], np.int8))}


class Flawed(Game):
    """Can be described, but not created at the export."""

    created = 0

    def __init__(self):
        Flawed.created += 1
        if Flawed.created > 1:
            raise RuntimeError("the simulator has no licence")


def make_run(folder, environment, algorithm=""):
    """A run with a policy whose actions depend on the observations."""
    schema = describe(environment, 3)
    config = Config(
        algorithm=algorithm,
        environment=environment,
        network=NetworkConfig(**({} if schema.action_size else {"hidden": 16, "body_hidden": 8, "width": 0.5})),
        r2d2=R2d2Config(units=8),
        run=RunConfig(folder=str(folder), name="mine"),
    )
    schema = with_sequences(config, schema)
    run = RunFolder.create(config, schema, argv=[])
    module = make_algorithm(config, schema).make_network()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 0)  # A bias would prefer one action.
    info = PolicyInfo(schema=schema, config=config, num_updates=7, score=None)
    save_policy(run.checkpoints / BEST, flatten_parameters(module), info)
    return run


def own(name, **options):
    return EnvironmentConfig(id=f"{__name__}:{name}", image_size=40, frame_stack=2, **options)


def play_bare(run, env):
    policy = load_policy(run.path)
    (observation, info), score, over = env.reset(seed=1), 0.0, False
    while not over:
        action = policy(observation, info.get("action_mask"))
        observation, reward, terminated, truncated, info = env.step(action)
        score, over = score + reward, terminated or truncated
    return score


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (EnvironmentConfig(id="CartPole-v1"), lambda: gymnasium.make("CartPole-v1")),
        (EnvironmentConfig(id="Pendulum-v1", args={"g": 9.0}), lambda: gymnasium.make("Pendulum-v1", g=9.0)),
        (own("Game"), Game),
        (own("Grid"), Grid),
        (own("Switches"), Switches),
        (own("Arm", args={"length": 2.0}), lambda: Arm(2.0)),
        (own("Masked"), Masked),
        (own("Pads"), Pads),
        (own("Memory"), Memory),
        (replace(own("Screen"), image_size=None), Screen),
        (own("Camera"), Camera),
        (replace(own("Camera"), image_size=None, image_crop="2:44,0:38"), Camera),
        (replace(own("Cells"), frame_stack=3), Cells),
        (EnvironmentConfig(id="CartPole-v1", frame_stack=3), lambda: gymnasium.make("CartPole-v1")),
        (replace(own("Grid"), grayscale=True), Grid),
        (own("Eye", args={"length": 2.0}), lambda: Eye(2.0)),
        (own("Robot", args={"length": 2.0}), lambda: Robot(2.0)),
    ],
    ids=lambda value: value.id.rpartition(":")[2] if isinstance(value, EnvironmentConfig) else "",
)
def test_code_of_the_card_scores_as_the_policy(tmp_path, monkeypatch, capsys, config, make):
    check_card(make_run(tmp_path, config), monkeypatch, capsys, make)


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")  # The code registers it once more.
def test_code_of_the_card_registers_the_namespace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where the package leaves a file
    monkeypatch.syspath_prepend(install_planes(tmp_path))
    monkeypatch.setattr(foreign, "_registered", [])
    monkeypatch.setattr(gymnasium, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium.envs.registration, "registry", gymnasium.registry)
    trust.allow("planes")
    run = make_run(tmp_path, EnvironmentConfig(id="Planes/Race-v1"))
    assert "import register_all\n\nregister_all()" in (export(run.path) / "README.md").read_text()
    check_card(run, monkeypatch, capsys, lambda: gymnasium.make("Planes/Race-v1"))


def test_code_of_the_card_registers_the_tasks_of_dm_control():
    pytest.importorskip("shimmy", reason="needs the extra dm-control, which dev has")
    imports, make = _creation(EnvironmentConfig(id="dm_control/cartpole-swingup-v0"))
    code = "\n".join([*imports, f"env = {make}", "env.reset()"])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # This process has the tasks already.


@pytest.mark.parametrize("game", [Game, Grid, Masked, Camera, Cells, Memory, States])
def test_code_of_the_card_remembers_as_a_recurrent_policy(tmp_path, monkeypatch, capsys, game):
    run = make_run(tmp_path, replace(own(game.__name__), frame_stack=1), "r2d2")
    check_card(run, monkeypatch, capsys, game)


def check_card(run, monkeypatch, capsys, make):
    """Plays a game with the code of the card, with torch and with ONNX, and compares the scores."""
    out = export(run.path, onnx=True)
    monkeypatch.chdir(out)
    expected = play_bare(run, make())
    load, setup, play, onnx = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    names = {}
    for code in (load, setup, play):
        exec(code, names)
    assert float(capsys.readouterr().out) == pytest.approx(expected, abs=1e-3)
    exec(onnx, {})  # needs no code from above
    assert float(capsys.readouterr().out) == pytest.approx(expected, abs=1e-3)


def test_card_of_atari_has_code_that_plays_a_step(tmp_path, monkeypatch):
    run = make_run(tmp_path, EnvironmentConfig(id="ms_pacman", full_action_space=True))
    out = export(run.path)
    monkeypatch.chdir(out)
    load, setup, _ = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(load, names)
    exec(setup, names)
    observation, _ = names["env"].reset(seed=1)
    with torch.no_grad():
        output = names["q_values"](torch.from_numpy(names["observe"](observation))).numpy()
    assert output.shape == (1, 18)
    names["env"].step(names["choose"](output))


def test_code_of_the_card_presses_fire_where_training_did():
    breakout = EnvironmentConfig(id="ALE/Breakout-v5", fire_after_life_loss=True)
    assert write_fire(EnvironmentConfig(id="ALE/MsPacman-v5")) == ""

    class Game(gymnasium.Env):
        lives, played = [3, 3, 2, 2], []

        def reset(self, **options):
            return 0, {"lives": 3}

        def step(self, action):
            self.played.append(action)
            return 0, 0.0, False, False, {"lives": self.lives.pop(0)}

    names = {"gymnasium": gymnasium}
    exec(write_fire(breakout), names)
    env = names["Fire"](Game())
    env.reset()
    for action in (2, 3, 4):
        env.step(action)
    assert Game.played == [1, 2, 3, 1], "FIRE at the start, and instead of an action"


def test_card_without_environment_says_why_it_has_no_example(tmp_path):
    Flawed.created = 0
    out = export(make_run(tmp_path, own("Flawed")).path)
    card = (out / "README.md").read_text()
    assert "env.step" not in card
    assert "the simulator has no licence" in card
