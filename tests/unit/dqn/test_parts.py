"""Q-networks for grids, parts of observations, and networks of the user that take parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.builders import PIXELS, VECTORS
from torch import nn

from apex.algorithms.encoders import Encoder, split
from apex.algorithms.exported import describe_input
from apex.config import Config, NetworkConfig
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.networks import PixelQNetwork, VectorQNetwork, make_network
from apex.schema import Part, Schema

PARTS = (Part("camera", "uint8", (36, 40, 3)), Part("arm", "uint8", (3,), 9))
MIXED = replace(PIXELS, frame_shape=(sum(part.num_bytes for part in PARTS),), parts=PARTS)
SMALL = NetworkConfig(hidden=8, body_hidden=4, width=0.25)


def observations(schema, size=3):
    return torch.randint(256, (size, *schema.observation_shape), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("schema", "kind", "hidden"),
    [
        (replace(PIXELS, frame_shape=(36, 36)), PixelQNetwork, 2),
        (replace(PIXELS, frame_shape=(36, 36, 3)), PixelQNetwork, 2),
        (replace(VECTORS, frame_dtype="uint8"), VectorQNetwork, 8),
        (replace(PIXELS, frame_shape=(7, 7, 3)), Encoder, 8),
        (MIXED, Encoder, 2),
    ],
)
def test_each_kind_of_observations_has_its_network(schema, kind, hidden):
    network = make_network(SMALL, schema, seed=1)
    assert isinstance(network.body if kind is Encoder else network, kind)
    assert network.advantage.hidden.out_features == hidden
    assert network(observations(schema)).shape == (3, schema.num_actions)


def test_a_dictionary_of_the_parts_gives_the_same_values():
    network, frames = make_network(SMALL, MIXED, seed=1), observations(MIXED)
    assert torch.equal(network(dict(split(frames, PARTS))), network(frames))


class TakesDictionary(nn.Module):
    """A network of the user."""

    def __init__(self, schema):
        super().__init__()
        self.names = [part.name for part in schema.parts]
        self.layer = nn.Linear(schema.stack * 3, schema.num_actions)

    def forward(self, parts):
        assert list(parts) == self.names
        return self.layer(parts["arm"].float().flatten(1))


def test_a_custom_network_gets_a_dictionary_of_the_parts():
    config = Config(network=NetworkConfig(factory=f"{__name__}:TakesDictionary"))
    algorithm = DqnAlgorithm(config, MIXED)
    network, frames = algorithm.make_network(), observations(MIXED)
    expected = network.module(split(frames, PARTS))
    assert torch.equal(network(frames), expected)
    found = algorithm.make_agent(network).q_values(frames.numpy())
    assert np.allclose(found, expected.detach().numpy())


def test_a_custom_network_of_a_single_image_gets_an_array():
    schema = replace(PIXELS, frame_shape=(36, 36))
    config = NetworkConfig(factory=f"{__name__}:make_flat")
    assert type(make_network(config, schema, seed=1)) is nn.Sequential


class _Scale(nn.Module):
    def forward(self, images):
        return images.float() / 255


def make_flat(schema):
    return nn.Sequential(_Scale(), nn.Flatten(), nn.Linear(int(np.prod(schema.observation_shape)), schema.num_actions))


def test_exported_code_says_what_it_takes():
    assert describe_input("", MIXED) == "a dictionary of the inputs"
    assert describe_input("", replace(PIXELS, frame_shape=(7, 7, 3))) == "uint8 [batch, 4, 7, 7, 3]"
    assert describe_input("", replace(VECTORS, stack=2)) == "float32 [batch, 2, 4]"


def test_a_schema_with_parts_survives_json():
    saved = Schema.from_dict(MIXED.to_dict())
    assert saved == MIXED
    assert saved.observations == "4 x camera 36 x 40 x 3 uint8, arm 3 uint8"
    assert (saved.has_images, saved.is_vector) == (True, False)


@pytest.mark.parametrize(
    "change",
    [
        {"parts": [["arm", "object", [3], 9]]},
        {"parts": [["arm", "uint8", [-3], 9]]},
        {"parts": [["arm", "uint8", [3.0], 9]]},
        {"parts": [["arm", "uint8", [3], "9"]]},
        {"parts": [["arm\x1b", "uint8", [3], 9]]},
        {"parts": [["arm", "uint8", [3]]]},
        {"parts": [[5, "uint8", [3], 9]], "frame_shape": [3]},
        {"parts": [["arm", "uint8", [3], 0]], "frame_shape": [3]},
        {"parts": [["arm", "int32", [3], -1]], "frame_shape": [12]},
        {"parts": [["arm", "uint8", [3], 9], ["arm", "uint8", [2], 9]], "frame_shape": [5]},
        {"frame_shape": [3]},
    ],
)
def test_a_schema_whose_parts_do_not_fit_is_refused(change):
    with pytest.raises(ValueError, match=r"part|unpack|values"):
        Schema.from_dict({**MIXED.to_dict(), **change})
