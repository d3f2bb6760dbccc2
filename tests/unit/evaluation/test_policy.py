"""Tests of loaded policies: actions, observations, sources, and the environment of a policy."""

from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from support.policy_runs import CARTPOLE, make_run

from apex import UsageError, load_policy
from apex.config import Config, EnvironmentConfig, NetworkConfig
from apex.dqn.algorithm import DqnAgent
from apex.dqn.networks import make_network
from apex.environments.factory import describe, make_environment
from apex.environments.single import AgentEnvironment
from apex.evaluation.policy import Policy, require_fit
from apex.runs.checkpoints.policy_file import PolicyInfo
from apex.schema import Schema

VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=3, n_step=3, codec="raw")
STACKS = Schema(frame_shape=(40, 40), frame_dtype="uint8", stack=4, num_actions=3, n_step=3, codec="lz4")
IMAGES = Schema(frame_shape=(40, 40), frame_dtype="uint8", stack=1, num_actions=3, n_step=3, codec="lz4")


def make_policy(schema, **options):
    config = NetworkConfig(width=0.5, hidden=32, body_hidden=8)
    info = PolicyInfo(schema=schema, config=Config(network=config, environment=CARTPOLE), num_updates=5, score=None)
    network = make_network(config, schema, seed=3)
    with torch.no_grad():  # An untrained network prefers one action for every observation.
        features = network.body(
            torch.from_numpy(observations(schema, 9)).float() / (255 if schema.frame_dtype == "uint8" else 1)
        )
        network.advantage.output.bias -= network.advantage(features).mean(0)
    return Policy(info, DqnAgent(network), path=None, **options)


def observations(schema, size):
    shape = (size, *schema.observation_shape)
    rng = np.random.default_rng(1)
    if schema.frame_dtype == "uint8":
        return rng.integers(256, size=shape, dtype=np.uint8)
    return rng.standard_normal(shape, dtype=np.float32)


def test_policy_that_was_trained_with_masks_needs_a_mask():
    policy, (observation,) = make_policy(replace(VECTORS, masked=True)), observations(VECTORS, 1)
    with pytest.raises(UsageError, match=CARTPOLE.id) as error:
        policy.act(observation[0])
    assert 'info["action_mask"]' in error.value.remedy
    assert policy.act(observation[0], [False, False, True]) == 2


def test_policy_without_masks_fits_an_environment_with_masks():
    taxi = EnvironmentConfig(id="Taxi-v4")
    schema = describe(taxi, 3)
    assert schema.masked
    info = PolicyInfo(schema=replace(schema, masked=False), config=Config(environment=taxi), num_updates=1, score=None)
    require_fit(Path("best.safetensors"), info)


@pytest.mark.parametrize("schema", [VECTORS, STACKS, IMAGES])
def test_one_observation_gives_an_int_and_a_batch_an_array_of_actions(schema):
    policy, batch = make_policy(schema), observations(schema, 9)
    q = policy.network(torch.from_numpy(batch)).detach().numpy()
    actions = policy.act(batch)
    assert (actions.dtype, actions.tolist()) == (np.int64, q.argmax(1).tolist())
    assert len(set(actions.tolist())) > 1  # The actions depend on the observations.
    for observation, row in zip(batch, q, strict=True):
        one = observation if schema.stack > 1 else observation[0]
        action = policy.act(one)
        assert type(action) is int
        assert action == row.argmax()
        assert policy.q_values(one).shape == (3,)
    assert policy.q_values(batch) == pytest.approx(q, abs=1e-6)


def test_observations_need_no_axis_for_a_stack_of_one():
    policy, batch = make_policy(VECTORS), observations(VECTORS, 5)
    assert policy.act(batch[:, 0]).tolist() == policy.act(batch).tolist()
    assert policy.act(batch[:1, 0]).tolist() == [policy.act(batch[0, 0])]  # [1, D] is a batch of one.


def test_observations_may_be_read_only_float64_or_lists():
    policy, batch = make_policy(VECTORS), observations(VECTORS, 5)
    frozen = batch[:, 0].astype(np.float64)
    frozen.flags.writeable = False
    assert policy.act(frozen).tolist() == policy.act(batch).tolist()
    assert policy.act(frozen[0].tolist()) == policy.act(batch[0, 0])


@pytest.mark.parametrize(
    ("schema", "observation", "message"),
    [
        (VECTORS, np.zeros(5, np.float32), r"float32\[4\].* float32\[B, 4\]; got float32\[5\]"),
        (VECTORS, 1.0, r"got float64\[\]"),
        (VECTORS, np.array(list("abcd")), "must be float32, got <U1"),
        (STACKS, np.zeros((40, 40), np.uint8), r"uint8\[4, 40, 40\], .* got uint8\[40, 40\]"),
        (STACKS, np.zeros((4, 40, 40), np.float32), "must be uint8, got float32"),
    ],
)
def test_other_observation_is_refused_with_dtype_and_shape(schema, observation, message):
    with pytest.raises(UsageError, match=message):
        make_policy(schema).act(observation)


def test_epsilon_is_the_share_of_random_actions_of_a_seed():
    observation = np.zeros((3_000, 4), np.float32)
    greedy = make_policy(VECTORS).act(observation)[0]
    actions = make_policy(VECTORS, epsilon=0.3, seed=1).act(observation)
    # Two of three random actions differ from the greedy one: 0.2, with a standard deviation of 0.0073.
    assert (actions != greedy).mean() == pytest.approx(0.2, abs=0.03)
    assert (actions == make_policy(VECTORS, epsilon=0.3, seed=1).act(observation)).all()
    assert (actions != make_policy(VECTORS, epsilon=0.3, seed=2).act(observation)).any()


def test_policy_is_loaded_from_a_run_a_checkpoint_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run("runs", best=70, last=[80, 90])
    updates = [
        load_policy(source, **options).info.num_updates
        for source, options in [
            (run.path, {}),
            ("mine", {}),
            ("mine", {"checkpoint": "last"}),
            (run.checkpoints / "000000080", {}),
            (str(run.checkpoints / "best.safetensors"), {}),
        ]
    ]
    assert updates == [70, 70, 90, 80, 70]
    assert load_policy("mine").act([0.0, 0.0, 0.0, 0.0]) == 1  # The policy always pushes to the right.
    assert repr(load_policy("mine")) == "Policy(CartPole-v1, 70 updates, epsilon 0)"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", {}, "nowhere"),
        (3, {}, "run must be .* got 3"),
        (None, {}, "run must be .* got None"),
        ("mine", {"epsilon": 1.5}, r"epsilon.* 1\.5"),
        ("mine", {"checkpoint": "bets"}, "--checkpoint.* 'bets'"),
        ("runs/mine/checkpoints/best.safetensors", {"checkpoint": "last"}, r"best\.safetensors.* single policy"),
        ("runs/mine/manifest.json", {}, r"manifest\.json"),
    ],
)
def test_source_without_a_policy_is_refused(tmp_path, monkeypatch, source, options, message):
    monkeypatch.chdir(tmp_path)
    make_run("runs", best=70)
    with pytest.raises(UsageError, match=message):
        load_policy(source, **options)


@pytest.mark.filterwarnings("ignore:.*infinity:UserWarning")  # The values of a vector have no bounds.
def test_environment_passes_the_checks_of_gymnasium():
    env = AgentEnvironment(CARTPOLE, describe(CARTPOLE, 1))
    check_env(env, skip_render_check=True)
    env.close()
    env.close()


def test_environment_plays_the_games_of_training():
    pong = EnvironmentConfig(id="ALE/Pong-v5", max_episode_frames=80)
    env, games = AgentEnvironment(pong, describe(pong, 1)), make_environment(pong, 1, seed=5, num_threads=1)
    observation, _ = env.reset(seed=5)
    assert env.observation_space.contains(observation)
    assert (observation == games.reset()[0]).all()
    ends = 0
    for action in np.random.default_rng(0).integers(6, size=50):
        step = games.step(np.array([action]))
        observation, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated) == (step.reward[0], step.terminated[0], step.truncated[0])
        assert info == {"life_lost": False, "failed": False}
        if truncated:
            ends += 1
            assert (observation == step.final_observation[0]).all()
            observation, _ = env.reset()
        assert (observation == step.observation[0]).all()
    assert ends == 2
    env.close()
    games.close()


def test_episode_that_is_over_must_be_reset():
    env = AgentEnvironment(CARTPOLE, describe(CARTPOLE, 1))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    first, _ = env.reset(seed=3)
    while not env.step(1)[2]:
        pass
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(1)
    assert (env.reset()[0] != first).any()
    assert (env.reset(seed=3)[0] == first).all()
    env.close()


class Failing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if action == 1:
            raise ValueError("broken")
        return np.ones(2, np.float32), 1.0, False, False, {}


def test_failed_environment_truncates_the_episode():
    config = EnvironmentConfig(id=f"{__name__}:Failing")
    env = AgentEnvironment(config, describe(config, 1))
    env.reset(seed=1)
    assert env.step(0)[1:] == (1.0, False, False, {"life_lost": False, "failed": False})
    observation, *answer = env.step(1)
    assert answer == [0.0, False, True, {"life_lost": False, "failed": True}]
    assert observation.tolist() == [1.0, 1.0]  # the one before the failure
    assert env.reset()[0].tolist() == [0.0, 0.0]


def test_pictures_need_the_render_mode_rgb_array():
    env = AgentEnvironment(CARTPOLE, describe(CARTPOLE, 1), render_mode="rgb_array")
    with pytest.raises(RuntimeError, match="reset"):
        env.render()
    env.reset(seed=1)
    assert env.render().shape == (400, 600, 3)
    env.close()
    with pytest.raises(UsageError, match=r"render_mode.*'human'"):
        AgentEnvironment(CARTPOLE, describe(CARTPOLE, 1), render_mode="human")
