"""Parameters of a network as one array, in the order of their description."""

import numpy as np
import torch
from torch import nn

from apex.algorithms.parameters import describe, flatten_parameters, follow, load_parameters, num_parameters


def test_the_description_has_names_and_shapes_in_the_order_of_the_values():
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    described = describe(network)
    assert [tuple(each) for each in described] == [("0.weight", (3, 2)), ("0.bias", (3,)), ("2.weight", (1, 3))]
    values = flatten_parameters(network)
    assert len(values) == num_parameters(network) == 12
    np.testing.assert_array_equal(values[6:9], network[0].bias.detach().numpy())
    load_parameters(network, np.arange(12, dtype=np.float32))
    assert network[2].weight.tolist() == [[9.0, 10.0, 11.0]]


def test_a_network_follows_another_by_a_share():
    target, online = nn.Linear(1, 2), nn.Linear(1, 2)
    for network, values in ((target, [0.0, 4.0]), (online, [8.0, 8.0])):
        network.weight.data = torch.tensor(values)[:, None]
        network.register_buffer("mean", torch.tensor(values))
    memory = target.weight.data_ptr()
    follow(target, online, 0.25)
    assert target.weight.flatten().tolist() == [2.0, 5.0]
    assert target.mean.tolist() == [8.0, 8.0]
    follow(target, online, 1.0)
    assert target.weight.flatten().tolist() == [8.0, 8.0]
    assert target.weight.data_ptr() == memory
