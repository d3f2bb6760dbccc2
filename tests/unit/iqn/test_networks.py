"""The quantile network: the embedding by hand, mean quantiles, kinds of observations, and networks of the user."""

from dataclasses import replace
from math import cos, pi

import numpy as np
import pytest
import torch
from support.builders import VECTORS
from torch import nn

from apex.algorithms.dormant_units import NUM_STATES, DormantUnits
from apex.algorithms.parameters import flatten_parameters, load_parameters
from apex.config import IqnConfig, NetworkConfig
from apex.iqn.networks import make_network
from apex.schema import Part, Schema
from apexreplay.errors import UsageError

IMAGES = Schema(frame_shape=(42, 40), frame_dtype="uint8", stack=2, num_actions=3, n_step=3, codec="lz4")
PARTS = (Part("camera", "uint8", (40, 36, 3)), Part("speed", "float32", (5,)))
MIXED = replace(IMAGES, frame_shape=(sum(part.num_bytes for part in PARTS),), parts=PARTS, stack=1)
GRID = replace(IMAGES, frame_shape=(5, 6))


class Own(nn.Sequential):
    """A user's torso with 9 features."""

    def __init__(self, schema):
        super().__init__(nn.Flatten(), nn.Linear(np.prod(schema.observation_shape), 9), nn.Tanh())


class Ones(Own):
    """A user's torso with initial weights of its own, and no bias."""

    def __init__(self, schema):
        super().__init__(schema)
        self[1] = nn.Linear(np.prod(schema.observation_shape), 9, bias=False)
        nn.init.ones_(self[1].weight)


class Fixed(nn.Module):
    def __init__(self, schema):
        super().__init__()

    def forward(self, observation):
        return observation.flatten(1)


def make(schema=VECTORS, seed=1, network=None, **iqn):
    return make_network(NetworkConfig(**{"width": 0.125, **(network or {})}), IqnConfig(**iqn), schema, seed=seed)


def draw(schema, size=3):
    shape = (size, *schema.observation_shape)
    if schema.parts:  # Random bytes may be numbers that are not finite.
        return torch.randint(2, shape, dtype=torch.uint8)
    return torch.randint(256, shape).to(getattr(torch, schema.frame_dtype))


def test_embedding_is_a_layer_of_cosines_times_the_features():
    network = make(network={"body_hidden": 2, "hidden": 4})
    x, tau = torch.ones(1, 1, 4), 0.3
    weight, bias = network.embedding[0].weight, network.embedding[0].bias
    cosines = [cos(pi * i * tau) for i in range(64)]
    embedding = [max(0.0, float(weight[k].detach() @ torch.tensor(cosines) + bias[k].detach())) for k in range(2)]
    features = network.body(x).detach()
    expected = network.values(features * torch.tensor(embedding))
    torch.testing.assert_close(network.quantiles(x, torch.tensor([[tau]]))[0], expected)


def test_q_values_are_means_of_quantiles_at_fixed_fractions():
    network, x = make(num_policy_fractions=4), torch.randn(3, 1, 4)
    quantiles = network.quantiles(x, torch.tensor([[0.125, 0.375, 0.625, 0.875]] * 3))
    assert quantiles.shape == (3, 4, VECTORS.num_actions)
    torch.testing.assert_close(network(x), quantiles.mean(1))
    assert torch.equal(network(x), network(x))
    assert quantiles.std(1).min() > 1e-4


def test_heads_are_normalized_before_their_activation():
    network, seen = make(layer_norm=True, network={"hidden": 32}), []
    for head in (network.value, network.advantage):
        head.activation[1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(torch.randn(3, 1, 4))
    assert len(seen) == 2
    for hidden in seen:
        assert hidden.mean(-1).abs().max() < 1e-5
        torch.testing.assert_close(hidden.var(-1, correction=0), torch.ones(96), rtol=0.01, atol=0)


def test_dormant_units_are_counted_for_each_layer():
    network = make(network={"hidden": 8, "body_hidden": 16})
    with torch.no_grad():
        network.value.hidden.bias[3] = network.embedding[0].bias[5] = -1e3
    units = DormantUnits(network)
    units.add(torch.randn(NUM_STATES, 1, 4))
    shares = units.shares()
    assert set(shares) == {"body.2", "body.4", "advantage.activation", "value.activation", "embedding.1"}
    assert shares["value.activation"] >= 1 / 8
    assert shares["embedding.1"] >= 1 / 16
    assert all(
        (share * (16 if "body" in name or "embedding" in name else 8)) % 1 == 0 for name, share in shares.items()
    )


@pytest.mark.parametrize("schema", [VECTORS, IMAGES, GRID, MIXED], ids=["vector", "image", "grid", "parts"])
@pytest.mark.parametrize("network", [{}, {"torso": "impala", "dueling": False, "initialization": "balanced"}])
def test_parameters_of_every_kind_of_observation_can_be_sent(schema, network):
    before = torch.get_rng_state()
    one, same, other = (make(schema, seed, network) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(flatten_parameters(one), flatten_parameters(same))
    observation = draw(schema)
    expected = one.eval()(observation)
    assert expected.shape == (3, schema.num_actions)
    assert not torch.equal(other.eval()(observation), expected)
    load_parameters(other, flatten_parameters(one))
    assert torch.equal(other(observation), expected)


def test_a_custom_network_gives_the_features():
    network = make(network={"factory": f"{__name__}:Own"})
    assert network.embedding[0].out_features == 9
    assert network(torch.randn(3, 1, 4)).shape == (3, VECTORS.num_actions)
    with pytest.raises(UsageError, match=r"Fixed'.*depends on no trainable parameter"):
        make(network={"factory": f"{__name__}:Fixed"})


def test_balanced_weights_leave_a_custom_network_as_it_is():
    network = make(network={"factory": f"{__name__}:Ones", "initialization": "balanced"})
    assert bool((network.body[1].weight == 1).all())
    assert network.advantage.hidden.weight.sum(1).abs().max() < 1e-5
