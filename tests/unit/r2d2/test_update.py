"""R2D2's update: gradients and priorities against a naive twin, and by hand."""

import numpy as np
import pytest
import torch
from support.r2d2 import BURN_IN, LENGTH, D, Twin, make_batch, make_config, make_schema

from apex.r2d2.algorithm import R2d2Algorithm
from apex.r2d2.update import mix

ALL = ["whole", "first", "short", "end", "whole"]


def make_step(config, *, seed=0, optimizer=None, **form):
    """Returns an update, its online network and its target network, which has other parameters; the schema; twins."""
    schema = make_schema(config, **form)
    algorithm = R2d2Algorithm(config, schema)
    online, target = algorithm.make_network(), algorithm.make_network()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    rule = (optimizer or algorithm.make_optimizer)(online)
    return algorithm.make_update(online, target, rule, torch.device("cpu")), online, target, schema


def assert_equals_twin(config, batch, update, online, target):
    twin = Twin(online, config)
    loss, priorities, errors = twin.losses(Twin(target, config), batch)
    gradients = dict(zip(twin.leaves, torch.autograd.grad(loss, list(twin.leaves.values())), strict=True))
    before = {name: tensor.clone() for name, tensor in online.state_dict().items()}
    updated = update(batch)
    assert bool(updated.finite)
    assert updated.figures["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert updated.figures["td_error"].item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert updated.td_errors.tolist() == pytest.approx(priorities, rel=1e-5)
    for name, parameter in online.named_parameters():
        change = before[name].double() - parameter.detach().double()
        assert torch.allclose(change, gradients[name], rtol=2e-3, atol=2e-6), name


def descent(online):
    return torch.optim.SGD(online.parameters(), lr=1.0)


PLAIN = {"max_gradient_norm": 1e9}


@pytest.mark.parametrize(
    ("learner", "network", "masked"),
    [
        ({}, {}, False),
        ({}, {}, True),
        ({"target": "munchausen"}, {}, False),
        ({}, {"value_rescaling": True}, True),
        ({"target": "munchausen"}, {"value_rescaling": True}, False),
    ],
    ids=["double-q", "masked", "munchausen", "rescaled", "both"],
)
@pytest.mark.parametrize(
    "kinds", [ALL, ["whole"] * 3, ["first"] * 2, ["short"] * 2], ids=["all", "whole", "first", "short"]
)
def test_gradients_and_priorities_equal_those_of_a_naive_twin(kinds, learner, network, masked):
    config = make_config(learner=PLAIN | learner, network=network, priority_max_share=0.8)
    update, online, target, schema = make_step(config, optimizer=descent)
    batch = make_batch(np.random.default_rng(1), schema, kinds, masked=masked)
    assert_equals_twin(config, batch, update, online, target)


def test_without_burn_in_all_states_are_stored_ones():
    config = make_config(learner=PLAIN, burn_in=0)
    update, online, target, schema = make_step(config, optimizer=descent)
    batch = make_batch(np.random.default_rng(1), schema, ["first"] * 3)
    batch = batch._replace(state=torch.randn(3, D, generator=torch.Generator().manual_seed(1)))
    assert_equals_twin(config, batch, update, online, target)


def test_episodes_that_are_shorter_than_the_burn_in_are_trained():
    config = make_config(learner=PLAIN)
    update, online, target, schema = make_step(config, optimizer=descent)
    batch = make_batch(np.random.default_rng(8), schema, ["short"] * 3)
    batch = batch._replace(span=torch.tensor([[1] + [0] * (LENGTH - 1)] * 3, dtype=torch.uint8))
    assert_equals_twin(config, batch, update, online, target)


def test_gradients_are_centered_if_configured():
    config = make_config(learner={"centered_gradients": True})
    update, online, _, schema = make_step(config)
    update(make_batch(np.random.default_rng(9), schema, ALL))
    matrices = [parameter.grad for parameter in online.parameters() if parameter.dim() == 2]
    assert all(gradient.any() for gradient in matrices)
    assert max(gradient.mean(1).abs().max().item() for gradient in matrices) < 1e-6


def test_burn_in_gives_no_gradient_but_changes_the_values():
    config = make_config(learner=PLAIN)
    update, online, _, schema = make_step(config, optimizer=descent)
    batch = make_batch(np.random.default_rng(2), schema, ["whole"])
    update(batch)
    first = {name: parameter.grad.clone() for name, parameter in online.named_parameters()}
    frames = batch.stacks.clone()
    frames[0, 0, BURN_IN - 1] += 1
    other, online, *_ = make_step(config, optimizer=descent)
    other(batch._replace(stacks=frames))
    assert any(not torch.equal(first[name], parameter.grad) for name, parameter in online.named_parameters())


def test_frames_after_the_last_window_change_nothing():
    config = make_config()
    batch = make_batch(np.random.default_rng(3), make_schema(config), ["short", "short"])
    frames = batch.stacks.clone()
    frames[0, :, 4:] = 7.0
    results = []
    for stacks in (batch.stacks, frames):
        update, online, *_ = make_step(config)
        update(batch._replace(stacks=stacks))
        results.append(torch.cat([parameter.flatten() for parameter in online.parameters()]))
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_update_that_is_not_finite_changes_no_parameter(value):
    config = make_config()
    update, online, _, schema = make_step(config)
    batch = make_batch(np.random.default_rng(4), schema, ALL)
    returns = batch.n_step_return.clone()
    returns[1, 0] = value
    before = {name: tensor.clone() for name, tensor in online.state_dict().items()}
    updated = update(batch._replace(n_step_return=returns))
    assert not bool(updated.finite)
    assert all(torch.equal(before[name], tensor) for name, tensor in online.state_dict().items())
    assert torch.isfinite(updated.td_errors).tolist() == [True, False, True, True, True]


def test_sequences_of_weight_0_train_nothing():
    config = make_config()
    update, online, _, schema = make_step(config, optimizer=descent)
    before = {name: tensor.clone() for name, tensor in online.state_dict().items()}
    update(make_batch(np.random.default_rng(5), schema, ALL, weights=[0.0] * len(ALL)))
    assert all(torch.equal(before[name], tensor) for name, tensor in online.state_dict().items())


def test_the_loss_is_the_mean_over_trained_steps():
    """One step with error 3 and weight 0.5, one with error 1 and weight 1, in two sequences."""
    config = make_config(learner=PLAIN | {"loss": "huber"})
    update, online, _, schema = make_step(config, optimizer=descent)
    batch = make_batch(np.random.default_rng(6), schema, ["short", "short"], weights=[0.5, 1.0])
    span = torch.zeros(2, LENGTH, dtype=torch.uint8)
    span[0, 0], span[1, BURN_IN] = 1, 1
    with torch.no_grad():
        q, _ = online(batch.stacks[0], batch.state)
        chosen = q.gather(2, batch.action.unsqueeze(2)).squeeze(2)
    returns = chosen.clone()
    returns[0, 0] += 3
    returns[1, BURN_IN] += 1
    batch = batch._replace(span=span, n_step_return=returns, discount=torch.zeros_like(returns))
    updated = update(batch)
    assert updated.figures["loss"].item() == pytest.approx((0.5 * 2.5 + 1.0 * 0.5) / 2, rel=1e-5)
    assert updated.td_errors.tolist() == pytest.approx([3.0, 1.0], rel=1e-5)


def test_priorities_mix_the_largest_and_the_mean_error():
    errors, rows = torch.tensor([1.0, 3.0, 8.0]), torch.tensor([0, 0, 2])
    assert mix(errors, rows, 3, 0.9).tolist() == pytest.approx([0.9 * 3 + 0.1 * 2, 0.0, 8.0])
    assert mix(errors, rows, 3, 0.0).tolist() == pytest.approx([2.0, 0.0, 8.0])


def test_the_same_batch_gives_the_same_bits():
    config = make_config()
    batch = make_batch(np.random.default_rng(7), make_schema(config), ALL)
    results = []
    for _ in range(2):
        update, online, *_ = make_step(config)
        for _ in range(3):
            update(batch)
        results.append(torch.cat([parameter.detach().flatten() for parameter in online.parameters()]))
    assert torch.equal(*results)
