"""Parameters of a network as one array, in the order of their description."""

import numpy as np
from torch import nn

from apex.algorithms.parameters import describe, flatten_parameters, load_parameters, num_parameters


def test_the_description_has_names_and_shapes_in_the_order_of_the_values():
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    described = describe(network)
    assert [tuple(each) for each in described] == [("0.weight", (3, 2)), ("0.bias", (3,)), ("2.weight", (1, 3))]
    values = flatten_parameters(network)
    assert len(values) == num_parameters(network) == 12
    np.testing.assert_array_equal(values[6:9], network[0].bias.detach().numpy())
    load_parameters(network, np.arange(12, dtype=np.float32))
    assert network[2].weight.tolist() == [[9.0, 10.0, 11.0]]
