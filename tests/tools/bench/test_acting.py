"""`python -m bench acting`: all four ways compute the same Q-values, those in int8 nearly."""

from dataclasses import replace

import pytest
import torch
from support.builders import VECTORS
from support.native import skip_without_convolution

from apex.config import Config, NetworkConfig
from apex.dqn.networks import make_network
from apex.schema import Schema
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.acting import PACKED, STREAMS, WAYS, Ways, measure

PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
INT8_ERROR = 0.15  # of the largest value
NETWORK = NetworkConfig(width=0.25, hidden=64)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),  # These operators are deprecated.
]


@pytest.fixture
def images():
    skip_without_convolution()
    return torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def make_pixel_network():
    """Returns a network whose values depend on the images far more than on its biases."""
    network = make_network(NETWORK, PIXELS, seed=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.0 if parameter.dim() == 1 else 3.0)
    return network


def q_values(ways, images):
    with torch.inference_mode():
        return {way: ways.forward[way](images) for way in WAYS}


@pytest.mark.parametrize(("bfloat16", "rounding"), [(False, 1e-5), (True, 0.02)])
def test_all_ways_compute_the_values_of_the_network(images, bfloat16, rounding):
    network = make_pixel_network()
    with torch.inference_mode():
        expected = network(images)
    size = float(expected.abs().max())
    for way, values in q_values(Ways(network, bfloat16=bfloat16, calibration=images), images).items():
        most = INT8_ERROR if way.startswith("int8") else rounding
        torch.testing.assert_close(values, expected, rtol=0, atol=most * size)


def test_packing_takes_the_newest_weights(images):
    network = make_pixel_network()
    ways = Ways(network, bfloat16=False, calibration=images)
    with torch.no_grad():
        for layer in (network.body[4], network.value.hidden, network.advantage.hidden):
            layer.weight.copy_(
                layer.weight.flip(0)
            )  # Inputs of the next layer trade places, of the same size as before.
    old = q_values(ways, images)
    for pack in PACKED:
        ways.pack[pack]()
    new = q_values(ways, images)
    torch.testing.assert_close(old["own"], new["own"])
    size = float(new["own"].abs().max())
    for way in PACKED:
        assert (old[way] - new["own"]).abs().max() > 3 * INT8_ERROR * size
        torch.testing.assert_close(new[way], new["own"], rtol=0, atol=INT8_ERROR * size)


def test_other_networks_are_refused():
    network = make_network(replace(NETWORK, dueling=False), PIXELS, seed=1)
    with pytest.raises(UsageError, match="dueling network"):
        Ways(network, bfloat16=False, calibration=torch.zeros(1, 4, 84, 84, dtype=torch.uint8))
    network = make_network(NETWORK, VECTORS, seed=1)
    with pytest.raises(UsageError, match="dueling network"):
        Ways(network, bfloat16=False, calibration=torch.zeros(1, *VECTORS.observation_shape))


def test_every_way_is_measured(images):
    figures = measure(Config(network=NETWORK), PIXELS, 0.2, Stop())
    assert all(figures[f"{streams}_{way}_us"] > 0 for streams in STREAMS for way in WAYS)
    assert all(figures[f"{streams}_own_ratio"] == 1.0 for streams in STREAMS)
    assert all(figures[f"{way}_pack_ms"] > 0 for way in PACKED)
