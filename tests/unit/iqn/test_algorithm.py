"""Which algorithm is chosen, its decisions, its exported code and ONNX, and the values of preset `btr`."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import CONTINUOUS, MASKED, VECTORS

from apex import export, load_policy
from apex.algorithms.graph_update import GraphUpdate
from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.algorithms.trial import build
from apex.config import Config, EnvironmentConfig, IqnConfig, NetworkConfig, RunConfig, flatten
from apex.config.presets import PRESETS
from apex.dqn.algorithm import DqnAlgorithm
from apex.environments.factory import describe
from apex.iqn.algorithm import IqnAlgorithm
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy
from apex.runs.folder import RunFolder
from apexreplay.errors import UsageError

CARTPOLE = EnvironmentConfig(id="CartPole-v1", clip_rewards=False)
PONG = EnvironmentConfig(id="ALE/Pong-v5", image_size=44)
SMALL = NetworkConfig(width=0.25, hidden=32, body_hidden=16)
OWN_SOURCE = """
import math
from torch import nn

def make_own(schema):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(schema.observation_shape), 9), nn.ReLU())
"""
STRANGER = """
import sys, torch, numpy
names = {}
exec(sys.stdin.read(), names)
numpy.save("q.npy", names["q_values"](torch.from_numpy(numpy.load("observations.npy"))).detach().numpy())
"""


def test_iqn_is_chosen_by_its_name_for_discrete_actions_only():
    assert type(make_algorithm(Config(), VECTORS)) is DqnAlgorithm
    assert type(make_algorithm(Config(algorithm="iqn"), VECTORS)) is IqnAlgorithm
    with pytest.raises(UsageError, match=r"'iqn'.*discrete.*continuous"):
        make_algorithm(Config(algorithm="iqn"), CONTINUOUS)


@pytest.mark.parametrize("schema", [VECTORS, MASKED])
def test_algorithm_creates_parts_that_fit_together(schema):
    build(Config(algorithm="iqn"), schema, "--algorithm iqn")


def test_masks_are_refused_with_munchausen_targets():
    config = Config(algorithm="iqn", learner=replace(Config().learner, target="munchausen"))
    with pytest.raises(UsageError, match=r"munchausen.*no action masks"):
        make_algorithm(config, MASKED)


def test_the_agent_gives_mean_quantiles_and_never_a_forbidden_action():
    algorithm = IqnAlgorithm(Config(), MASKED)
    agent = algorithm.make_agent(algorithm.make_network())
    observation = np.random.default_rng(0).normal(size=(3, 1, 4)).astype(np.float32)
    with torch.no_grad():
        q = agent.network(torch.from_numpy(observation)).numpy()
    mask = np.eye(MASKED.num_actions, dtype=np.bool_)[[1, 5, 9]]
    decision = agent.decide(observation, mask, np.ones(3), np.random.default_rng(0))
    assert decision.action.tolist() == [1, 5, 9]
    assert np.allclose(decision.state_value, q[np.arange(3), [1, 5, 9]])
    assert np.allclose(agent.q_values(observation), q)


def test_the_step_on_a_gpu_is_a_graph():
    algorithm = IqnAlgorithm(Config(), VECTORS)
    online = algorithm.make_network()
    update = algorithm.make_update(
        online, algorithm.make_network(), algorithm.make_optimizer(online), torch.device("cuda")
    )
    assert isinstance(update, GraphUpdate)


def make_run(folder, environment, network, **iqn):
    config = Config(
        algorithm="iqn",
        environment=environment,
        network=network,
        iqn=IqnConfig(**iqn),
        run=RunConfig(name="mine", folder=str(folder)),
    )
    schema = describe(environment, config.actor.n_step)
    run = RunFolder.create(config, schema, argv=[])
    module = make_algorithm(config, schema).make_network()
    with torch.no_grad():
        for parameter in (*module.advantage.parameters(), *module.embedding.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    info = PolicyInfo(schema=schema, config=config, num_updates=70, score=9.0)
    save_policy(run.checkpoints / BEST, flatten_parameters(module), info)
    return run


def observations(schema, size):
    shape, rng = (size, *schema.observation_shape), np.random.default_rng(1)
    if schema.frame_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("environment", "network", "iqn"),
    [
        (CARTPOLE, SMALL, {}),
        (CARTPOLE, replace(SMALL, dueling=False), {"layer_norm": True, "num_policy_fractions": 5}),
        (CARTPOLE, replace(SMALL, factory="own_torso:make_own"), {}),
        (PONG, SMALL, {}),
        (replace(PONG, image_size=84), replace(SMALL, torso="impala"), {"layer_norm": True}),
    ],
    ids=["vector", "one-head", "own", "image", "impala"],
)
def test_exported_code_and_onnx_have_the_policys_values(tmp_path, monkeypatch, environment, network, iqn):
    import onnxruntime

    (tmp_path / "own_torso.py").write_text(OWN_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path, environment, network, **iqn)
    out = export(run.path, onnx=True)
    seen = observations(run.schema, 9)
    expected = load_policy(run.path).q_values(seen)
    assert np.ptp(expected, 0).min() > 1e-4
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.run(["q"], {"observation": seen})[0] == pytest.approx(expected, abs=1e-4)
    is_plain = run.schema.frame_dtype == "float32" and not network.factory
    np.save(out / "observations.npy", seen[:, 0] if is_plain else seen)
    card = (out / "README.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    begin = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    subprocess.run([sys.executable, "-c", begin + STRANGER], input=code, text=True, check=True, timeout=100, cwd=out)
    assert np.load(out / "q.npy") == pytest.approx(expected, abs=1e-4)
    assert np.array_equal(load_policy(out / "model.safetensors").q_values(seen), expected)
    assert "mean of" in card
    assert json.loads((out / "config.json").read_text())["config"]["algorithm"] == "iqn"


@pytest.mark.parametrize(
    ("setting", "value"),  # Clark et al. 2024 and their code, typed a second time.
    [
        ("algorithm", "iqn"),
        ("environment.sticky_actions", 0.25),
        ("environment.life_loss_terminates", False),
        ("environment.clip_rewards", True),
        ("actor.num_actors", 64),
        ("actor.n_step", 3),
        ("actor.gamma", 0.997),
        ("replay.capacity", 1_048_576),
        ("replay.min_size_to_sample", 200_000),
        ("replay.priority_exponent", 0.2),
        ("replay.samples_per_insert", 4.0),
        ("learner.batch_size", 256),
        ("learner.optimizer", "adam"),
        ("learner.learning_rate", 1e-4),
        ("learner.optimizer_epsilon", 0.005 / 256),
        ("learner.max_gradient_norm", 10.0),
        ("learner.importance_sampling_exponent", 0.4),
        ("learner.target", "munchausen"),
        ("learner.target_period", 500),
        ("network.torso", "impala"),
        ("network.width", 1.0),
        ("network.hidden", 512),
        ("network.dueling", True),
        ("iqn.num_fractions", 8),
        ("iqn.num_policy_fractions", 8),
        ("iqn.layer_norm", True),
    ],
)
def test_preset_btr_has_the_values_of_the_authors(setting, value):
    assert flatten(PRESETS["btr"].config)[setting] == value
