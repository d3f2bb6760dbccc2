"""SAC's network: log densities against torch.distributions, the initial policy, images, and networks of the user."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import CONTINUOUS
from support.dpg import SCHEMA, D, K
from torch import nn
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.parameters import flatten_parameters, load_parameters
from apex.config import Config, DpgConfig, LearnerConfig, SacConfig
from apex.sac.algorithm import SacAlgorithm
from apex.sac.networks import SoftActorCritic, log_density, make_network
from apexreplay.errors import UsageError

IMAGES = replace(CONTINUOUS, frame_shape=(36, 40, 3), frame_dtype="uint8", codec="lz4", stack=2)
UNITS = {"policy_units": 5, "policy_units_2": 4, "critic_units": 7, "critic_units_2": 6}


class Own(nn.Module):
    """A user's network; its policy has `outputs` outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.policy = nn.Sequential(nn.Flatten(), nn.Linear(D, outputs))
        self.critics = OwnCritics()


class OwnCritics(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D + K, 3)

    def forward(self, observation, action):
        return self.linear(torch.cat([observation.flatten(1), action], 1)).T


def make_own(schema):
    return Own(2 * K)


def make_deterministic(schema):
    return Own(K)


def make(factory="", seed=1, schema=SCHEMA, dpg=None, **settings):
    return make_network(dpg or DpgConfig(), SacConfig(**settings), factory, schema, seed=seed)


def test_log_density_equals_that_of_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    mean, logs, noise = (torch.randn(50, K, generator=generator, dtype=torch.float64) for _ in range(3))
    u = mean + logs.exp() * noise
    squashed = TransformedDistribution(Independent(Normal(mean, logs.exp()), 1), [TanhTransform(cache_size=1)])
    expected = squashed.log_prob(squashed.transforms[0](u))
    assert torch.allclose(log_density(u, logs, noise.square()), expected)


def test_log_density_is_finite_where_tanh_rounds_to_1():
    """Far out, log(1 - tanh(u)^2) is log 4 - 2 |u|."""
    u = torch.tensor([[50.0], [-50.0]])
    assert (torch.tanh(u).abs() == 1).all()
    log = log_density(u, torch.zeros(2, 1), 0.0)
    assert log.tolist() == pytest.approx([-0.5 * np.log(2 * np.pi) - np.log(4) + 100] * 2)


def test_log_deviations_are_clipped():
    network = make()
    with torch.no_grad():
        network.policy.output.weight.zero_()
        network.policy.output.bias.copy_(torch.tensor([0.0, 0.0, 9.0, -99.0]))
        _, logs = network.distribution(torch.zeros(3, 1, D))
    assert logs.tolist() == [[2.0, -20.0]] * 3


def test_initial_policy_has_mean_0_deviation_1_and_two_critics():
    network = make(initial_temperature=0.2)
    with torch.no_grad():
        mean, logs = network.distribution(torch.randn(100, 1, D))
    assert mean.abs().max() < 0.2
    assert logs.abs().max() < 0.2
    assert network.critics(torch.zeros(9, 1, D), torch.zeros(9, K)).shape == (2, 9)
    assert network.log_temperature.exp().item() == pytest.approx(0.2)


def test_parameters_depend_only_on_the_seed_and_include_the_temperature():
    before = torch.get_rng_state()
    one, other = make(seed=3, initial_temperature=0.3), make(seed=4)
    assert np.array_equal(flatten_parameters(make(seed=3, initial_temperature=0.3)), flatten_parameters(one))
    assert torch.equal(before, torch.get_rng_state())
    load_parameters(other, flatten_parameters(one))
    assert torch.equal(other.log_temperature, one.log_temperature)
    assert torch.equal(one(torch.ones(2, 1, D)), other(torch.ones(2, 1, D)))


def test_custom_policy_has_means_and_log_deviations():
    network = make(factory=f"{__name__}:make_own")
    assert isinstance(network, SoftActorCritic)
    assert network(torch.zeros(4, 1, D)).shape == (4, K)
    with pytest.raises(UsageError, match=r"make_deterministic'.*policy of .*float32\[2, 2\].*float32\[2, 4\]"):
        make(factory=f"{__name__}:make_deterministic")


def test_policy_from_images_leaves_the_encoder_to_the_critics():
    """The update subtracts the gradients of the critics' loss from the encoder, whatever the policy's loss is."""
    config = Config(
        algorithm="sac", learner=LearnerConfig(max_gradient_norm=1e9, num_threads=1), dpg=DpgConfig(**UNITS)
    )
    algorithm = SacAlgorithm(config, IMAGES)
    online, target = algorithm.make_network(), algorithm.make_network()
    twin = copy.deepcopy(online)
    size, generator = 5, torch.Generator().manual_seed(1)
    batch = DeviceBatch(
        torch.randint(256, (2, size, *IMAGES.observation_shape), generator=generator, dtype=torch.uint8),
        torch.rand(size, CONTINUOUS.action_size, generator=generator) * 2 - 1,
        torch.randn(size, generator=generator),
        torch.full((size,), 0.9),
        torch.rand(size, generator=generator),
    )
    torch.manual_seed(7)
    assert algorithm.make_update(online, target, torch.optim.SGD(online.parameters(), lr=1.0), torch.device("cpu"))(
        batch
    ).finite
    torch.manual_seed(7)
    noise, next_noise = torch.randn_like(batch.action), torch.randn_like(batch.action)
    features = twin.encoder(batch.stacks[0])
    with torch.no_grad():
        action, log_pi = twin.sample(twin.encoder(batch.stacks[1]), next_noise)
        soft = target.critics(target.encoder(batch.stacks[1]), action).amin(0) - log_pi
        value = batch.n_step_return + 0.9 * soft
    loss = (batch.weights * (value - twin.critics(features, batch.action)).square() / 2).mean(1).sum()
    action, log_pi = twin.sample(features.detach(), noise)
    policy_loss = (batch.weights * (log_pi - twin.critics(features.detach(), action).amin(0))).mean()
    trained = [*twin.encoder.parameters(), *twin.critics.parameters()]
    by_critics = torch.autograd.grad(loss, trained)
    by_policy = torch.autograd.grad(policy_loss, list(twin.policy.parameters()))
    pairs = zip([*trained, *twin.policy.parameters()], [*by_critics, *by_policy], strict=True)
    found = [*online.encoder.parameters(), *online.critics.parameters(), *online.policy.parameters()]
    for new, (old, gradient) in zip(found, pairs, strict=True):
        torch.testing.assert_close(new, old - gradient, rtol=1e-4, atol=1e-5)
