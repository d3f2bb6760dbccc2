"""Tests that the units that Sokar et al. call dormant are found."""

import pytest
import torch
from torch import nn

from apex.algorithms.dormant_units import NUM_STATES, DormantUnits
from apex.config import NetworkConfig
from apex.dqn.networks import make_network
from apex.schema import Schema


def constant(*outputs):
    """A network with one layer, whose outputs before the ReLU are the same for every state."""
    layer = nn.Linear(1, len(outputs))
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor(outputs))
    return nn.Sequential(layer, nn.ReLU())


def shares_of(network, states):
    units = DormantUnits(network)
    units.add(states)
    return units.shares()


def test_unit_is_dormant_up_to_a_fortieth_of_its_layers_mean():
    # The mean is (0 + 0.18 + 1 + 40 + 0.9 + 1.92) / 6 = 7.33, and 0.025 of it is 0.183.
    network = constant(-5.0, 0.18, 1.0, 40.0, 0.9, 1.92)
    assert shares_of(network, torch.zeros(NUM_STATES, 1)) == {"1": pytest.approx(2 / 6)}


def test_layer_without_activation_is_wholly_dormant():
    assert shares_of(constant(-1.0, -2.0), torch.zeros(NUM_STATES, 1)) == {"1": 1.0}


def test_newest_thousand_states_count_for_any_batch_size():
    network = nn.Sequential(nn.Linear(1, 2), nn.ReLU())
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        network[0].bias.zero_()
    units = DormantUnits(network)
    for _ in range(3):
        units.add(torch.ones(400, 1))  # Only the first unit is active.
    assert units.shares() == {"1": 0.5}
    units.add(-torch.ones(400, 1))
    assert units.shares() == {"1": 0.0}
    units.add(-torch.ones(400, 1))
    units.add(-torch.ones(400, 1))  # The three batches of ones are forgotten.
    assert units.shares() == {"1": 0.5}


class Skipping(nn.Module):
    """Runs its second layer only in every other pass."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.passes = constant(1.0, -1.0), constant(1.0, -1.0), 0

    def forward(self, states):
        self.passes += 1
        self.always(states)
        if self.passes % 2:
            self.sometimes(states)


def test_layer_that_a_pass_skips_is_left_out():
    units = DormantUnits(Skipping())
    for _ in range(3):
        units.add(torch.zeros(500, 1))
    assert units.shares() == {"always.1": 0.5}


def test_shares_are_empty_before_a_thousand_states_or_without_relu():
    assert shares_of(constant(1.0, -1.0), torch.zeros(NUM_STATES - 1, 1)) == {}
    assert shares_of(nn.Linear(1, 2), torch.zeros(NUM_STATES, 1)) == {}


@pytest.mark.parametrize("layer", ["body.0", "body.2", "body.4", "advantage.hidden", "value.hidden"])
def test_every_hidden_layer_of_built_in_networks_is_examined(layer):
    schema = Schema(frame_shape=(36, 36), frame_dtype="uint8", stack=1, num_actions=3, n_step=3, codec="lz4")
    network = make_network(NetworkConfig(width=0.25, hidden=64), schema, seed=1)
    states = torch.randint(0, 256, (NUM_STATES, 1, 36, 36), dtype=torch.uint8)
    module = network.get_submodule(layer)
    with torch.no_grad():
        module.bias[1:] = -1e6  # Only one unit is left, and it is always active.
        module.bias[0] = 1e3
    head, _, place = layer.partition(".")
    name = f"{head}.activation" if place == "hidden" else f"{head}.{int(place) + 1}"
    shares = shares_of(network, states)
    assert len(shares) == 5
    assert shares[name] == pytest.approx(1 - 1 / len(module.bias))
