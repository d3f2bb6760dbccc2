"""DPG from images and parts: the critics train the encoder, and the policy takes its outputs as they are."""

import copy
from dataclasses import replace

import pytest
import torch
from support.builders import CONTINUOUS

from apex.algorithms.gradient_step import DeviceBatch
from apex.config import Config, DpgConfig, LearnerConfig
from apex.dpg.algorithm import DpgAlgorithm
from apex.dpg.update import DpgUpdate
from apex.schema import Part

SIZE = 5
IMAGES = replace(CONTINUOUS, frame_shape=(36, 40, 3), frame_dtype="uint8", codec="lz4", stack=2)
PARTS = (Part("camera", "uint8", (36, 36)), Part("arm", "uint8", (3,), 9))
MIXED = replace(IMAGES, frame_shape=(sum(part.num_bytes for part in PARTS),), parts=PARTS)
UNITS = {"policy_units": 5, "policy_units_2": 4, "critic_units": 7, "critic_units_2": 6}


def make_step(schema, **settings):
    """Returns an update whose optimizer subtracts the gradient, its networks, and a batch."""
    config = Config(
        learner=LearnerConfig(max_gradient_norm=1e9, loss="squared", num_threads=1),
        dpg=DpgConfig(num_critics=2, action_gradient_clip=0.0, **UNITS, **settings),
    )
    algorithm = DpgAlgorithm(config, schema)
    online, target = algorithm.make_network(), algorithm.make_network().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in online.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    batch = DeviceBatch(
        torch.randint(256, (2, SIZE, *schema.observation_shape), generator=generator, dtype=torch.uint8),
        torch.rand(SIZE, 3, generator=generator) * 2 - 1,
        torch.randn(SIZE, generator=generator),
        torch.full((SIZE,), 0.9),
        torch.rand(SIZE, generator=generator),
        None,
    )
    optimizer = torch.optim.SGD(online.parameters(), lr=1.0)
    return DpgUpdate(config.learner, config.dpg, online, target, optimizer), online, target, batch


def subtract(parameters, gradients):
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= gradient


@pytest.mark.parametrize("schema", [IMAGES, MIXED])
def test_a_step_subtracts_the_gradients_of_both_losses(schema):
    update, online, target, batch = make_step(schema)
    twin = copy.deepcopy(online)
    state, following = batch.stacks
    with torch.no_grad():
        seen = target.encoder(following)
        value = batch.n_step_return + 0.9 * target.critics(seen, target.policy(seen)).amin(0)
    features = twin.encoder(state)
    losses = (batch.weights * (value - twin.critics(features, batch.action)).square() / 2).mean(1)
    trained = [*twin.critics.parameters(), *twin.encoder.parameters()]
    by_critics = torch.autograd.grad(losses.sum(), trained, retain_graph=True)
    fixed = features.detach()
    policy_loss = -(batch.weights * twin.critics(fixed, twin.policy(fixed))[0]).mean()
    by_policy = torch.autograd.grad(policy_loss, list(twin.policy.parameters()))
    subtract(trained, by_critics)
    subtract(twin.policy.parameters(), by_policy)
    assert bool(update(batch).finite)
    for (name, found), expected in zip(online.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_the_policy_alone_leaves_the_encoder_as_it_is():
    update, online, _, batch = make_step(IMAGES)
    update._differentiate_critics = lambda delta, weights: (torch.zeros(()), torch.zeros(()))
    before = copy.deepcopy(online)
    update(batch)
    for part, changes in (("encoder", False), ("critics", False), ("policy", True)):
        pairs = zip(getattr(online, part).parameters(), getattr(before, part).parameters(), strict=True)
        assert any(not torch.equal(*pair) for pair in pairs) is changes, part


def test_the_critics_optimizer_has_the_encoder():
    algorithm = DpgAlgorithm(Config(learner=LearnerConfig(optimizer="adam")), IMAGES)
    network = algorithm.make_network()
    given = {id(p) for group in algorithm.make_optimizer(network).param_groups for p in group["params"]}
    assert {id(parameter) for parameter in network.parameters()} == given
