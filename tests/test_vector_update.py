"""Claims about `apex.vector_update`: it is autograd's step, for every shape of our own network for vectors."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from apex.config import LearnerConfig, NetworkConfig
from apex.gradient_step import DeviceBatch
from apex.networks import QNetwork, flatten_parameters, make_network
from apex.optimizers import make_optimizer, restore_optimizer
from apex.types import Schema
from apex.update import EagerUpdate, make_update, place
from apex.vector_update import VectorUpdate

CPU = torch.device("cpu")
NUM_ACTIONS = 3


def make_schema(stack=1, dtype="float32", frame_shape=(5,)):
    return Schema(
        frame_shape=frame_shape, frame_dtype=dtype, stack=stack, num_actions=NUM_ACTIONS, n_step=3, codec="lz4"
    )


def make_batch(schema, size, seed):
    rng = np.random.default_rng(seed)
    shape = (2, size, *schema.observation_shape)
    return DeviceBatch(
        stacks=torch.from_numpy(
            rng.integers(0, 256, shape, np.uint8)
            if schema.frame_dtype == "uint8"
            else rng.normal(size=shape).astype(np.float32)
        ),
        action=torch.from_numpy(rng.integers(0, NUM_ACTIONS, size)),
        n_step_return=torch.from_numpy((3 * rng.normal(size=size)).astype(np.float32)),
        discount=torch.from_numpy(rng.choice([0.0, 0.97], size).astype(np.float32)),
        weights=torch.from_numpy(rng.uniform(0.1, 1, size).astype(np.float32)),
    )


def make(kind, schema, *, dueling=True, **knobs):
    """An update of that kind, its networks and its optimizer; equal for equal arguments but the kind."""
    config = LearnerConfig(**{"batch_size": 8, "optimizer": "adam", "learning_rate": 1e-2, **knobs})
    network = NetworkConfig(hidden=7, body_hidden=6, dueling=dueling)
    online, target = (place(make_network(network, schema, seed=seed), CPU) for seed in (1, 2))
    optimizer = make_optimizer(config, online.parameters())
    return kind(config, online, target.requires_grad_(False), optimizer), online, target, optimizer


def gradients(network):
    return torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()])


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("loss", ["huber", "squared"])
@pytest.mark.parametrize(("stack", "dtype"), [(1, "float32"), (3, "float32"), (2, "uint8")])
@pytest.mark.parametrize("max_gradient_norm", [1e9, 0.05])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_each_step_is_that_of_autograd(dueling, loss, stack, dtype, max_gradient_norm, optimizer):
    """Within the rounding of float32, step after step, for batches of several sizes."""
    schema = make_schema(stack, dtype)
    knobs = {"dueling": dueling, "loss": loss, "max_gradient_norm": max_gradient_norm, "optimizer": optimizer}
    plain, plain_network, _, _ = make(EagerUpdate, schema, **knobs)
    update, network, target, _ = make(VectorUpdate, schema, **knobs)
    judge = flatten_parameters(target)
    for seed, size in enumerate((8, 1, 33, 8)):
        before = flatten_parameters(network)
        expected = plain(make_batch(schema, size, seed))
        got = update(make_batch(schema, size, seed))
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.figures, expected.figures, rtol=1e-4, atol=1e-5)
        assert bool(got.finite)
        torch.testing.assert_close(gradients(network), gradients(plain_network), rtol=1e-3, atol=1e-6)
        assert (flatten_parameters(network) != before).any()
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(plain_network), rel=1e-3, abs=1e-5)
    assert (flatten_parameters(target) == judge).all()
    assert all(parameter.grad is None for parameter in target.parameters())


def test_gradients_are_clipped_to_a_joint_norm_of_the_most():
    schema = make_schema()
    update, network, _, _ = make(VectorUpdate, schema, max_gradient_norm=0.05)
    told = update(make_batch(schema, 8, 0)).figures.gradient_norm
    assert told > 0.5
    assert float(gradients(network).norm()) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["stacks", "n_step_return", "weights"])
def test_an_update_that_is_not_finite_leaves_everything_as_it_was_and_the_next_is_made(field, value):
    schema = make_schema()
    plain, plain_network, _, _ = make(EagerUpdate, schema)
    update, network, _, optimizer = make(VectorUpdate, schema)
    for step in (plain, update):
        step(make_batch(schema, 8, 0))
    batch = make_batch(schema, 8, 1)
    getattr(batch, field).view(-1)[3] = value
    before, averages = (
        flatten_parameters(network),
        [tensor.clone() for state in optimizer.state.values() for tensor in state.values()],
    )
    updated = update(batch)
    assert not bool(updated.finite)
    assert (flatten_parameters(network) == before).all()
    after = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(averages, after, strict=True))
    for step in (plain, update):
        assert bool(step(make_batch(schema, 8, 2)).finite)
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(plain_network), rel=1e-3, abs=1e-5)


def test_the_batch_stays_as_it_was():
    """Its memory is a slot of the ring, of which a batch that no update could be made with is kept."""
    schema = make_schema()
    update, *_ = make(VectorUpdate, schema)
    batch, same = make_batch(schema, 8, 0), make_batch(schema, 8, 0)
    update(batch)
    assert all(torch.equal(one, other) for one, other in zip(batch, same, strict=True))


def test_what_one_step_tells_is_not_changed_by_the_next():
    schema = make_schema()
    update, *_ = make(VectorUpdate, schema)
    told = update(make_batch(schema, 8, 0))
    kept = told.td_errors.clone(), [figure.clone() for figure in told.figures]
    update(make_batch(schema, 8, 1))
    assert torch.equal(told.td_errors, kept[0])
    assert all(torch.equal(one, other) for one, other in zip(told.figures, kept[1], strict=True))


def test_it_goes_on_from_a_state_that_was_loaded_and_sees_a_target_that_was_copied():
    schema = make_schema()
    source, source_network, _, source_optimizer = make(EagerUpdate, schema)
    source(make_batch(schema, 8, 0))
    update, network, target, optimizer = make(VectorUpdate, schema)
    update(make_batch(schema, 8, 5))
    network.load_state_dict(source_network.state_dict())
    restore_optimizer(optimizer, copy.deepcopy(source_optimizer.state_dict()))
    target.load_state_dict(network.state_dict())
    source._target.load_state_dict(source_network.state_dict())
    for seed in (1, 2):
        expected, got = source(make_batch(schema, 8, seed)), update(make_batch(schema, 8, seed))
        torch.testing.assert_close(got.td_errors, expected.td_errors, rtol=1e-4, atol=1e-5)
    assert flatten_parameters(network) == pytest.approx(flatten_parameters(source_network), rel=1e-3, abs=1e-5)


def test_equal_steps_give_equal_bits():
    schema = make_schema()
    curves = []
    for _ in range(2):
        update, network, _, _ = make(VectorUpdate, schema)
        curves.append([])
        for seed in range(5):
            update(make_batch(schema, 8, seed))
            curves[-1].append(flatten_parameters(network).tobytes())
    assert curves[0] == curves[1]
    assert all(one != other for one, other in pairwise(curves[0]))


def test_gradients_are_there_although_somebody_has_cleared_them():
    schema = make_schema()
    update, network, _, optimizer = make(VectorUpdate, schema)
    plain, plain_network, _, _ = make(EagerUpdate, schema)
    optimizer.zero_grad(set_to_none=False)
    for step in (plain, update):
        step(make_batch(schema, 8, 0))
    torch.testing.assert_close(gradients(network), gradients(plain_network), rtol=1e-3, atol=1e-6)


def chosen_for(online, **knobs):
    config = LearnerConfig(**{"batch_size": 8, "num_threads": 1, **knobs})
    optimizer = make_optimizer(config, [parameter for parameter in online.parameters() if parameter.requires_grad])
    return type(make_update(config, online, copy.deepcopy(online), optimizer, CPU))


def test_it_is_chosen_for_our_own_networks_for_vectors_and_nothing_else():
    own = NetworkConfig(hidden=7, body_hidden=6, width=0.25)
    assert chosen_for(make_network(own, make_schema(), seed=1)) is VectorUpdate
    assert chosen_for(make_network(own, make_schema(), seed=1), bfloat16="on") is EagerUpdate
    assert chosen_for(make_network(own, make_schema(), seed=1), num_threads=2) is EagerUpdate
    images = make_schema(4, "uint8", (84, 84))
    assert chosen_for(make_network(own, images, seed=1)) is EagerUpdate
    assert chosen_for(nn.Sequential(nn.Flatten(), nn.Linear(5, NUM_ACTIONS))) is EagerUpdate


def test_a_users_network_goes_by_autograd_however_much_it_is_like_ours():
    """Whatever is changed in it, autograd knows: layers that are frozen, tied, hooked, or other than they seem."""
    ours = make_network(NetworkConfig(hidden=7, body_hidden=6), make_schema(), seed=1)
    assert chosen_for(QNetwork(ours.body, 6, NUM_ACTIONS, hidden=7, dueling=True)) is EagerUpdate
    ours.body.requires_grad_(False)
    assert chosen_for(ours) is EagerUpdate
