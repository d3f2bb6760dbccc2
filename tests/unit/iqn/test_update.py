"""IQN's update: the loss by hand, steps against a naive twin, Munchausen targets, masks, and 200 updates of `btr`."""

import copy
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from support.builders import MASKED, VECTORS
from support.iqn import IqnTwin, draw

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, IqnConfig, LearnerConfig, NetworkConfig
from apex.config.presets import BTR
from apex.dqn.losses import munchausen
from apex.iqn.algorithm import IqnAlgorithm
from apex.iqn.update import munchausen_quantiles, quantile_huber
from apex.schema import Schema

B, CPU = 5, torch.device("cpu")
SCHEMA = replace(VECTORS, num_actions=3)
SMALL = {"hidden": 6, "body_hidden": 7}


def make_batch(seed=0, schema=SCHEMA, **changes):
    rng = np.random.default_rng(seed)
    rows = {
        "stacks": rng.normal(size=(2, B, *schema.observation_shape)).astype(np.float32),
        "action": rng.integers(0, schema.num_actions, B),
        "n_step_return": rng.normal(size=B).astype(np.float32),
        "discount": np.where(rng.random(B) < 0.3, 0, 0.95).astype(np.float32),
        "weights": rng.uniform(0.1, 1, B).astype(np.float32),
        **changes,
    }
    return DeviceBatch(**{name: torch.from_numpy(np.asarray(row)) for name, row in rows.items()})


def make_step(schema=SCHEMA, network=None, learner=None, lr=1.0, seed=1, **iqn):
    """Returns an update that subtracts the gradient times `lr`, its different networks and its configuration."""
    config = Config(
        learner=LearnerConfig(**{"num_threads": 1, "max_gradient_norm": 1e9, **(learner or {})}),
        network=NetworkConfig(**SMALL, **(network or {})),
        iqn=IqnConfig(**{"num_fractions": 4, "num_policy_fractions": 3, **iqn}),
    )
    online, target = (IqnAlgorithm(replace(config, seed=s), schema).make_network() for s in (seed, seed + 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (*online.parameters(), *target.parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        online.advantage.output.bias[0] += 3  # The networks prefer different actions.
        target.advantage.output.bias[1] += 3
    algorithm = IqnAlgorithm(config, schema)
    rule = torch.optim.SGD(online.parameters(), lr=lr)
    return algorithm.make_update(online, target.eval(), rule, CPU), online, target, config


def test_quantile_huber_loss_by_hand():
    """Row 0: predictions 0 (tau 0.25) and 3 (tau 0.5), targets 0.5 and 2. Row 1: all are equal."""
    targets, predictions = torch.tensor([[0.5, 2.0], [1.0, 1.0]]), torch.tensor([[0.0, 3.0], [1.0, 1.0]])
    fractions = torch.tensor([[0.25, 0.5], [0.9, 0.1]])
    losses = quantile_huber(targets[:, None] - predictions[:, :, None], fractions)
    below = 0.25 * (0.5**2 / 2 + (2 - 0.5)) / 2  # Targets above the prediction count tau.
    above = (1 - 0.5) * ((2.5 - 0.5) + 1 / 2) / 2  # Those below it count 1 - tau.
    assert losses.tolist() == pytest.approx([below + above, 0.0])


def test_the_loss_is_least_at_the_quantile():
    """0.2 of the targets are below 10, so among their neighbours the 0.25-quantile 10 has the smallest loss."""
    targets = torch.arange(0.0, 50.0, 5.0)[None]
    tau = torch.tensor([[0.25]])
    losses = [quantile_huber(targets[:, None] - guess, tau).item() for guess in (5.0, 10.0, 15.0)]
    assert losses[1] == min(losses)


def test_munchausen_quantiles_by_hand():
    """Two actions, and their mean quantiles differ by 0.03 log 3: probabilities are 3/4 and 1/4."""
    gap = 0.03 * log(3)
    q = torch.tensor([[1 + gap, 1.0]])
    next_quantiles = torch.tensor([[[1 + gap, 0.0], [3 + gap, 4.0]]])
    bonus, values = munchausen_quantiles(q, next_quantiles, torch.tensor([1]))
    entropy = -(0.75 * log(0.75) + 0.25 * log(0.25))
    assert bonus.tolist() == pytest.approx([0.9 * 0.03 * log(0.25)], rel=1e-5)
    expected = [0.75 * (1 + gap) + 0.03 * entropy, 0.75 * (3 + gap) + 0.25 * 4 + 0.03 * entropy]
    assert values[0].tolist() == pytest.approx(expected, rel=1e-5)


def test_munchausen_bonus_is_clipped_and_the_mean_is_the_soft_value():
    quantiles = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    q = torch.tensor([[0.0, 50.0, 0.0]] * 6)
    bonus, values = munchausen_quantiles(q, quantiles, torch.zeros(6, dtype=torch.int64))
    assert bonus.tolist() == pytest.approx([-0.9] * 6)
    torch.testing.assert_close(values.mean(1), munchausen(q, quantiles.mean(1), torch.zeros(6, dtype=torch.int64))[1])


@pytest.mark.parametrize("target", ["double_q", "munchausen"])
@pytest.mark.parametrize(
    ("network", "layer_norm"), [({}, False), ({"dueling": False}, True), ({"value_rescaling": True}, True)]
)
def test_a_step_equals_that_of_a_naive_twin(target, network, layer_norm):
    update, online, other, config = make_step(network=network, learner={"target": target}, layer_norm=layer_norm)
    twin, target_twin = IqnTwin(online, config), IqnTwin(other, config)
    batch = make_batch()
    loss, td_errors = twin.loss(target_twin, batch, draw(3, batch, 4))
    updated = update(batch)
    assert float(updated.figures["loss"]) == pytest.approx(loss.item(), rel=1e-4)
    assert updated.td_errors.tolist() == pytest.approx(td_errors, rel=1e-3, abs=1e-5)
    loss.backward()
    for name, tensor in online.state_dict().items():
        leaf = twin.leaves[name]
        torch.testing.assert_close(tensor.double(), leaf.detach() - leaf.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_forbidden_action_is_no_greedy_one():
    mask = np.eye(MASKED.num_actions, dtype=np.bool_)[[7, 2, 0, 10, 4]]
    update, online, other, config = make_step(schema=MASKED)
    batch = make_batch(schema=MASKED, next_mask=mask)
    _, td_errors = IqnTwin(online, config).loss(IqnTwin(other, config), batch, draw(3, batch, 4))
    assert update(batch).td_errors.tolist() == pytest.approx(td_errors, rel=1e-3)
    _, without = IqnTwin(online, config).loss(IqnTwin(other, config), batch._replace(next_mask=None), draw(3, batch, 4))
    assert without != pytest.approx(td_errors, rel=1e-2)


def test_gradients_are_clipped_and_centered():
    for settings, check in (
        ({"max_gradient_norm": 0.01}, lambda gradient: gradient.norm() <= 0.01),
        ({"centered_gradients": True}, lambda gradient: gradient.mean(1).abs().max() < 1e-6),
    ):
        update, online, *_ = make_step(learner=settings, lr=0.0)
        update(make_batch())
        assert check(online.advantage.hidden.weight.grad)
        assert online.advantage.hidden.weight.grad.abs().max() > 1e-5


@pytest.mark.parametrize("field", ["n_step_return", "stacks"])
def test_non_finite_update_changes_nothing(field):
    update, online, *_ = make_step()
    before = flatten_parameters(online)
    batch = make_batch()
    getattr(batch, field)[-1] = torch.nan
    assert not update(batch).finite
    assert np.array_equal(before, flatten_parameters(online))
    assert update(make_batch()).finite
    assert not np.array_equal(before, flatten_parameters(online))


def test_row_with_weight_0_has_no_effect():
    states = []
    for value in (0.0, 1e3):
        update, online, *_ = make_step()
        batch = make_batch(weights=np.float32([1, 1, 1, 1, 0]))
        batch.n_step_return[-1] = value
        torch.manual_seed(0)
        update(batch)
        states.append(flatten_parameters(online))
    assert np.allclose(*states, atol=1e-6)


def test_rows_of_another_shape_are_refused():
    update, *_ = make_step()
    for name in ("discount", "weights"):
        with pytest.raises(ValueError, match=rf"{name} .*\[5, 1\]"):
            update(make_batch(**{name: np.zeros((B, 1), np.float32)}))


def test_bfloat16_agrees_with_float32_up_to_rounding():
    losses = []
    for form in ("off", "on"):
        update, *_ = make_step(learner={"bfloat16": form})
        torch.manual_seed(0)
        losses.append(float(update(make_batch()).figures["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] != losses[0]


def test_quantiles_of_random_returns_are_learned():
    """Returns are 0 or 4 with equal probability: quantiles below 1/2 are 0, those above are 4, and Q is 2."""
    update, online, *_ = make_step(lr=0.05, num_fractions=8, num_policy_fractions=32)
    rng = np.random.default_rng(0)
    state = np.ones((2, B, 1, 4), np.float32)
    for _ in range(1_500):
        rewards = 4 * rng.integers(0, 2, B).astype(np.float32)
        action, ones = np.zeros(B, np.int64), np.ones(B, np.float32)
        update(make_batch(stacks=state, action=action, n_step_return=rewards, discount=0 * ones, weights=ones))
    with torch.no_grad():
        low, high = online.quantiles(torch.ones(1, 1, 4), torch.tensor([[0.2, 0.8]]))[0, :, 0].tolist()
        q = online(torch.ones(1, 1, 4))[0, 0].item()
    assert low < 1
    assert high > 3
    assert abs(q - 2) < 0.5


@pytest.mark.timeout(200)
def test_200_updates_of_btr_reduce_the_loss_on_a_cpu():
    """Three terminal states, each with its own reward. Images have a quarter of the pixels, to save time."""
    schema = Schema(frame_shape=(42, 42), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
    config = replace(BTR, learner=replace(BTR.learner, batch_size=3, num_threads=1, device="cpu"))
    algorithm = IqnAlgorithm(config, schema)
    online, target = algorithm.make_network(), algorithm.make_network().requires_grad_(False).eval()
    update = algorithm.make_update(online, target, algorithm.make_optimizer(online), CPU)
    rng = np.random.default_rng(0)
    rewards = np.float32([-1, 0, 1])
    batch = DeviceBatch(
        stacks=torch.from_numpy(rng.integers(0, 256, (2, 3, 4, 42, 42), np.uint8)),
        action=torch.arange(3),
        n_step_return=torch.from_numpy(rewards),
        discount=torch.zeros(3),
        weights=torch.ones(3),
    )
    before = copy.deepcopy(target.state_dict())
    for number in range(200):
        if number == 100:
            target.load_state_dict(online.state_dict())
            before = copy.deepcopy(target.state_dict())
        updated = update(batch)
        assert updated.finite
    assert updated.td_errors.mean() < 0.1
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
    agent = algorithm.make_agent(algorithm.make_network())
    agent.network.load_state_dict(online.state_dict())
    q = agent.q_values(batch.stacks[0].numpy())[np.arange(3), np.arange(3)]
    assert q == pytest.approx(rewards, abs=0.95)  # The bonus of Munchausen targets is -0.9 ... 0.
