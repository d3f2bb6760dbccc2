"""A recurrent agent keeps a state for each environment; the policy of a file plays, and is exported, with it."""

import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from support.r2d2 import D, make_batch, make_config, make_schema
from support.scripted import ScriptedEnvironment

from apex import export, load_policy
from apex.algorithms.interface import forget, make_algorithm
from apex.algorithms.parameters import flatten_parameters
from apex.algorithms.trial import build
from apex.config.codec import from_dict
from apex.config.presets import PRESETS
from apex.evaluation.episodes import play
from apex.r2d2.algorithm import R2d2Agent, R2d2Algorithm
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, save_policy
from apex.runs.folder import RunFolder
from apexreplay.errors import UsageError

RNG = np.random.default_rng(0)
SEEN = RNG.normal(size=(5, 3, 1, 4)).astype(np.float32)  # five steps of three environments
STRANGER = """
import json, sys, torch
names = {}
exec(sys.stdin.read(), names)
state, found = torch.zeros(1, int(sys.argv[2])), []
for observation in json.loads(sys.argv[1]):
    q, state = names["q_values"](torch.tensor([observation]), state)
    found.append(q[0].tolist())
print(json.dumps(found))
"""


def make(**changes):
    config = make_config(**changes)
    algorithm = R2d2Algorithm(config, make_schema(config))
    return algorithm, algorithm.make_agent(algorithm.make_network())


def values(agent, observations):
    """The Q-values of all steps after each other, computed by the network at once."""
    with torch.no_grad():
        return agent.network(torch.from_numpy(np.concatenate(observations, 1)))[0].numpy()


def test_decisions_follow_the_values_of_the_whole_episode():
    _, agent = make()
    expected = values(agent, SEEN)
    for t, observation in enumerate(SEEN):
        assert np.allclose(agent.q_values(observation), expected[:, t], atol=1e-6)
        assert np.allclose(agent.state_value(observation, None), expected[:, t].max(1), atol=1e-6)
        if t % 2:
            assert agent.act(observation, None, 0.0, RNG).tolist() == expected[:, t].argmax(1).tolist()
        else:
            decision = agent.decide(observation, None, np.zeros(3), RNG)
            assert decision.action.tolist() == expected[:, t].argmax(1).tolist()
            action = np.array([2, 0, 1])
            assert np.allclose(decision.value(action), expected[[0, 1, 2], t, action], atol=1e-6)
            assert np.allclose(decision.state_value, expected[:, t].max(1), atol=1e-6)


def test_an_agent_forgets_only_episodes_that_have_ended():
    _, agent = make()
    agent.forget(np.array([True, False, True]))
    assert agent.state is None
    for observation in SEEN[:3]:
        agent.act(observation, None, 0.0, RNG)
    agent.forget(np.array([False, True, False]))
    assert not agent.state[1].any()
    assert agent.state[[0, 2]].any(1).all()
    whole, fresh = values(agent, SEEN[:4]), values(agent, SEEN[3:4])
    q = agent.q_values(SEEN[3])
    assert np.allclose(q[[0, 2]], whole[[0, 2], 3], atol=1e-6)
    assert np.allclose(q[1], fresh[1, 0], atol=1e-6)
    forget(agent)
    assert agent.state is None
    assert agent.act(SEEN[0, :2], None, 0.0, RNG).shape == (2,)


def test_masks_and_exploration_are_those_of_dqn():
    _, agent = make()
    mask = np.array([[True, False, False]] * 3)
    assert agent.act(SEEN[0], mask, 0.0, RNG).tolist() == [0, 0, 0]
    assert agent.act(SEEN[0], mask, 1.0, RNG).tolist() == [0, 0, 0]
    assert {int(a) for _ in range(50) for a in agent.act(SEEN[0], None, 1.0, RNG)} == {0, 1, 2}
    assert np.allclose(agent.state_value(SEEN[0], mask), agent.q_values(SEEN[0])[:, 0])


def test_games_are_played_with_a_fresh_state_each():
    """Environment 0 has games of 2 and 3 steps, environment 1 of 4; the state must be zero where a game begins."""
    began = []

    class Watched(R2d2Agent):
        def act(self, observation, *rest):
            began.append((observation[:, 0, 0].tolist(), None if self.state is None else self.state.any(1).tolist()))
            return super().act(np.repeat(observation, 4, 2), *rest)

    algorithm, _ = make()
    agent = Watched(algorithm.make_network())
    agent.state = np.ones((7, D), np.float32)  # of an earlier evaluation with other environments
    environment = ScriptedEnvironment([[[0.0] * 2, [0.0] * 3], [[0.0] * 4]])
    play(environment, lambda seen, mask: agent.act(seen, mask, 0.0, RNG), 4, forget=lambda ended: forget(agent, ended))
    assert began[0][1] is None
    for steps, remembered in began[1:]:
        assert remembered == [step > 0 for step in steps]
    assert sum(steps[0] == 0 for steps, _ in began) >= 2


def test_algorithm_creates_parts_that_fit_together():
    algorithm, agent = make()
    assert type(make_algorithm(algorithm.config, algorithm.schema)) is R2d2Algorithm
    optimizer = algorithm.make_optimizer(agent.network)
    update = algorithm.make_update(agent.network, algorithm.make_network(), optimizer, torch.device("cpu"))
    assert update(make_batch(RNG, algorithm.schema, ["whole", "short"])).td_errors.shape == (2,)
    assert algorithm.exploration(3).name == "epsilon"
    build(algorithm.config, algorithm.schema, "--algorithm r2d2")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"r2d2": {"sequence_length": 8, "burn_in": 5}},
            r"sequence_length 8 must be > r2d2.burn_in 5 \+ actor.n_step 3",
        ),
        ({"r2d2": {"units": 0}}, "r2d2.units"),
    ],
)
def test_impossible_sequences_are_refused(changes, problem):
    with pytest.raises(UsageError, match=problem):
        from_dict({"algorithm": "r2d2", **changes})


def test_other_algorithms_ignore_impossible_sequences():
    assert from_dict({"r2d2": {"sequence_length": 8, "burn_in": 5}}).algorithm == ""


def test_the_preset_has_the_papers_sequences():
    """80 steps with an overlap of 40, which are the burn-in and the steps of the last window."""
    config = PRESETS["r2d2"].config
    assert config.r2d2.sequence_length == 80
    assert config.r2d2.period(config.actor.n_step) == 40
    assert config.r2d2.burn_in + config.actor.n_step == 40


@pytest.fixture(params=["built-in", "own"])
def policy_run(tmp_path, monkeypatch, request):
    """A run of CartPole with a policy that has random parameters."""
    factory = ""
    if request.param == "own":
        source = (
            "from torch import nn\ndef make(schema): return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh())\n"
        )
        (tmp_path / "own_features.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        factory = "own_features:make"
    changes = {
        "algorithm": "r2d2",
        "network": {"hidden": 7, "body_hidden": 6, "factory": factory},
        "r2d2": {"units": D // 2},
    }
    environment = {"id": "CartPole-v1", "clip_rewards": False}
    config = from_dict(
        {**changes, "environment": environment, "run": {"name": "mine", "folder": str(tmp_path / "runs")}}
    )
    schema = make_schema(config, n_step=3, num_actions=2)
    run = RunFolder.create(config, schema, argv=[])
    network = R2d2Algorithm(config, schema).make_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.5)
    save_policy(
        run.checkpoints / BEST,
        flatten_parameters(network),
        PolicyInfo(schema=schema, config=config, num_updates=7, score=1.0),
    )
    return run


def test_a_policy_remembers_until_reset_and_its_state_can_be_set(policy_run):
    policy = load_policy(policy_run.path, allow="own_features")
    episode = RNG.normal(size=(6, 4)).astype(np.float32)
    assert policy.state is None
    actions, states = [], []
    for observation in episode:
        states.append(policy.state)
        actions.append(policy(observation))
    with torch.no_grad():
        q, _ = policy.network(torch.from_numpy(episode[None]))
    assert actions == q[0].argmax(1).tolist()
    policy.reset()
    assert policy.state is None
    for t in (3, 1, 5):  # in any order, with explicit states
        policy.state = states[t]
        assert policy.act(episode[t]) == actions[t]
    policy.state = states[3]
    assert np.allclose(policy.q_values(episode[3]), q[0, 3], atol=1e-6)
    assert np.array_equal(policy.state, states[3])


def test_a_policy_forgets_the_episodes_that_have_ended(policy_run):
    policy = load_policy(policy_run.path, allow="own_features")
    policy.act(np.ones((3, 4), np.float32))
    before = policy.state
    policy.reset(np.array([False, True, False]))
    assert np.array_equal(policy.state, before * [[1], [0], [1]])
    assert before[1].any()
    with pytest.raises(UsageError, match=r"bool\[3\], got bool\[2\]"):
        policy.reset([False, True])


def test_wrong_states_are_refused(policy_run):
    policy = load_policy(policy_run.path, allow="own_features")
    with pytest.raises(UsageError, match=rf"float32\[B, {D}\], got \[1, 3\]"):
        policy.state = np.zeros((1, 3))
    policy.act(np.zeros((2, 4), np.float32))
    for call in (policy.act, policy.q_values):
        with pytest.raises(UsageError, match=r"\b2\b.*\b3\b.*Policy\.reset"):
            call(np.zeros((3, 4), np.float32))


def test_code_and_onnx_of_an_export_give_the_same_values(policy_run):
    policy = load_policy(policy_run.path, allow="own_features")
    target = export(policy_run.path, onnx=True, allow="own_features")
    episode = RNG.normal(size=(4, 4)).astype(np.float32)
    with torch.no_grad():
        expected = policy.network(torch.from_numpy(episode[None]))[0][0].numpy()
    card = (target / "README.md").read_text()
    assert "A recurrent Q-network" in card
    code = card.split("```python\n")[1].split("```")[0]
    environment = {"PYTHONPATH": str(policy_run.path.parent.parent), "PATH": "/usr/bin"}
    found = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps(episode[:, None].tolist()), str(D)],
        input=code, cwd=target, env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert np.allclose(json.loads(found.stdout), expected, atol=1e-5)
    session, state = onnxruntime.InferenceSession(target / "model.onnx"), np.zeros((1, D), np.float32)
    for observation, q in zip(episode, expected, strict=True):
        output, state = session.run(["q", "next_state"], {"observation": observation[None, None], "state": state})
        assert np.allclose(output[0], q, atol=1e-5)
    again = load_policy(target / "model.safetensors", allow="own_features")
    assert [again(observation) for observation in episode] == expected.argmax(1).tolist()
