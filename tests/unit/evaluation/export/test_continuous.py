"""Tests of `apex export` with continuous actions: the code of the card and ONNX act as the policy."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from apex import export, load_policy
from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, DpgConfig, EnvironmentConfig, NetworkConfig, RunConfig
from apex.environments.factory import describe
from apex.evaluation.command import evaluate
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy
from apex.runs.folder import RunFolder

PENDULUM = EnvironmentConfig(id="Pendulum-v1", clip_rewards=False)
SMALL = {"policy_units": 6, "policy_units_2": 5, "critic_units": 4, "critic_units_2": 4}
PLAIN = DpgConfig(**SMALL)
CONTROL = DpgConfig(**SMALL, num_critics=2, first_activation="relu", normalize_observations=True)
OWN_SOURCE = """
import math
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, schema):
        super().__init__()
        (num_actions,), num_inputs = schema.action_shape, math.prod(schema.observation_shape)
        self.policy = nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_actions), nn.Tanh())
        self.critics = Critic(num_inputs + num_actions)

class Critic(nn.Linear):
    def __init__(self, size):
        super().__init__(size, 1)

    def forward(self, observation, action):
        return super().forward(torch.cat([observation.flatten(1), action], 1)).T

def make_own(schema):
    return Own(schema)

def make_gaussian(schema):
    own = Own(schema)
    own.policy = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.observation_shape), 2 * schema.action_shape[0]))
    return own
"""
STRANGER = """
import json, sys, torch
names = {}
exec(sys.stdin.read(), names)
observation = torch.tensor(json.loads(sys.argv[1]))
print(json.dumps(names["act"](observation).tolist()))
"""


def make_run(folder, dpg, factory="", algorithm=""):
    network = NetworkConfig(factory=factory)
    run_config = RunConfig(name="mine", folder=str(folder))
    config = Config(algorithm=algorithm, environment=PENDULUM, network=network, dpg=dpg, run=run_config)
    schema = describe(PENDULUM, config.actor.n_step)
    run = RunFolder.create(config, schema, argv=[])
    module = make_algorithm(config, schema).make_network()
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        if module.normalizer is not None:
            module.normalizer.mean += 0.5
            module.normalizer.variance *= 4
    info = PolicyInfo(schema=schema, config=config, num_updates=70, score=-150.0)
    save_policy(run.checkpoints / BEST, flatten_parameters(module), info)
    return run


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(OWN_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("dpg", "factory", "algorithm"),
    [
        (PLAIN, "", "dpg"),
        (CONTROL, "", "dpg"),
        (CONTROL, "own_network:make_own", "dpg"),
        (CONTROL, "", "sac"),
        (CONTROL, "own_network:make_gaussian", "sac"),
    ],
    ids=["paper", "control", "own", "sac", "own-sac"],
)
def test_code_of_the_card_acts_as_the_policy(tmp_path, dpg, factory, algorithm):
    run = make_run(tmp_path, dpg, factory, algorithm)
    out = export(run.path)
    observation = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    shown = observation[:, None] if factory else observation
    code, *_ = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    answer = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{STRANGER}",
            json.dumps(shown.tolist()),
        ],
        input=code,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=out,
    )
    assert answer.returncode == 0, answer.stderr
    expected = load_policy(run.path).act(observation)
    assert np.allclose(json.loads(answer.stdout), expected, atol=1e-6)
    assert np.ptp(expected) > 1e-3
    assert np.array_equal(load_policy(out / "model.safetensors").act(observation), expected)


@pytest.mark.parametrize(
    ("dpg", "algorithm", "summary"),
    [
        (PLAIN, "dpg", "A deterministic policy"),
        (CONTROL, "dpg", "A deterministic policy"),
        (CONTROL, "sac", "The mean of a Gaussian policy"),
    ],
)
def test_onnx_returns_the_action_and_the_card_describes_it(tmp_path, dpg, algorithm, summary):
    import onnxruntime

    run = make_run(tmp_path, dpg, algorithm=algorithm)
    out = export(run.path, onnx=True)
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    observation = np.random.default_rng(0).normal(size=(9, 1, 3)).astype(np.float32)
    (action,) = session.run(["action"], {"observation": observation})
    assert np.allclose(action, load_policy(run.path).act(observation), atol=1e-6)
    card = (out / "README.md").read_text()
    for text in (
        summary,
        "an action computed",
        "Output: float32 [batch, 1]",
        "low + (a + 1) / 2 * (high - low)",
        'session.run(["action"]',
    ):
        assert text in card, text
    assert ("subtracts the mean" in card) == dpg.normalize_observations
    assert "Q-values are" not in card


def test_evaluations_add_no_noise_to_continuous_actions_by_default(tmp_path):
    run = make_run(tmp_path, PLAIN)
    assert evaluate(run.path, episodes=1).epsilon == 0
    assert evaluate(run.path, episodes=1, epsilon=0.1).epsilon == 0.1
