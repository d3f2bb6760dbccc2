"""Tests the Q-network against the papers' formulas, its initial parameters, its refusals and its flat parameters."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from apex.algorithms.parameters import flatten_parameters, load_parameters, num_parameters
from apex.config import NetworkConfig
from apex.dqn.networks import make_network, q_values
from apex.schema import Schema
from apexreplay.errors import UsageError


def images(size=84, *, stack=4, num_actions=6):
    return Schema(
        frame_shape=(size, size), frame_dtype="uint8", stack=stack, num_actions=num_actions, n_step=3, codec="lz4"
    )


def vectors(dimensions=4, *, stack=1, num_actions=2, dtype="float32"):
    return Schema(
        frame_shape=(dimensions,), frame_dtype=dtype, stack=stack, num_actions=num_actions, n_step=3, codec="raw"
    )


def small(**settings):
    return NetworkConfig(**{"width": 0.125, "hidden": 16, "body_hidden": 8, **settings})


def observations(schema, batch=3, seed=0):
    shape = (batch, *schema.observation_shape)
    rng = np.random.default_rng(seed)
    if schema.frame_dtype == "uint8":
        return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def naive_image_network(state, observation):
    """Computes one layer after the other, as in the two papers."""
    x = observation.double() / 255
    for layer, stride in ((0, 4), (2, 2), (4, 1)):
        x = torch.relu(nn.functional.conv2d(x, state[f"body.{layer}.weight"], state[f"body.{layer}.bias"], stride))
    x = x.reshape(len(x), -1)
    return naive_heads(state, x)


def naive_vector_network(state, observation):
    x = observation.double().reshape(len(observation), -1)
    for layer in (1, 3):
        x = torch.relu(x @ state[f"body.{layer}.weight"].T + state[f"body.{layer}.bias"])
    return naive_heads(state, x)


def naive_heads(state, x):
    """Q(s, a) = V(s) + A(s, a) - (sum of A(s, .)) / |A|, or A alone."""
    outputs = {}
    for head in ("value", "advantage"):
        if f"{head}.hidden.weight" in state:
            hidden = torch.relu(x @ state[f"{head}.hidden.weight"].T + state[f"{head}.hidden.bias"])
            outputs[head] = hidden @ state[f"{head}.output.weight"].T + state[f"{head}.output.bias"]
    advantage = outputs["advantage"]
    if "value" not in outputs:
        return advantage
    return outputs["value"] + advantage - advantage.sum(1, keepdim=True) / advantage.shape[1]


def doubles(network):
    return {name: tensor.double() for name, tensor in network.state_dict().items()}


# Outputs


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("schema", [images(), images(36, stack=1), images(61, stack=2, num_actions=18)])
def test_image_network_has_dqns_body_and_the_heads(schema, dueling):
    network = make_network(small(dueling=dueling), schema, seed=1)
    observation = observations(schema)
    q = network(observation)
    assert q.shape == (3, schema.num_actions)
    assert q.dtype is torch.float32
    torch.testing.assert_close(q.double(), naive_image_network(doubles(network), observation), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("schema", [vectors(), vectors(7, stack=3, num_actions=5)])
def test_vector_network_has_two_layers_and_the_heads(schema, dueling):
    network = make_network(small(dueling=dueling), schema, seed=1)
    observation = observations(schema)
    q = network(observation)
    assert q.dtype is torch.float32
    torch.testing.assert_close(q.double(), naive_vector_network(doubles(network), observation), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schema", [images(36), vectors(5)])
def test_balanced_weights_sum_to_0_and_biases_are_larger(schema):
    plain, balanced = (make_network(small(initialization=kind), schema, seed=1) for kind in ("uniform", "balanced"))
    before, after = plain.state_dict(), balanced.state_dict()
    for name, tensor in before.items():
        if "output" in name:
            assert torch.equal(after[name], tensor)
        elif name.endswith("bias"):
            assert torch.equal(after[name], tensor + 0.1)
        else:
            units, expected = after[name].flatten(1), tensor.flatten(1)
            assert units.sum(1).abs().max() < 1e-5
            torch.testing.assert_close(units - units[:, :1], expected - expected[:, :1])  # one shift for each unit


def test_papers_network_has_the_published_size():
    convolutions = (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64
    heads = 2 * (7 * 7 * 64 + 1) * 512 + (512 + 1) * (1 + 6)
    assert num_parameters(make_network(NetworkConfig(), images(), seed=1)) == convolutions + heads


def test_width_scales_the_channels_and_the_hidden_layers_of_images():
    shapes = {
        name: list(tensor.shape)
        for name, tensor in make_network(NetworkConfig(width=0.5), images(), seed=1).state_dict().items()
        if name.endswith("weight")
    }
    assert shapes == {
        "body.0.weight": [16, 4, 8, 8],
        "body.2.weight": [32, 16, 4, 4],
        "body.4.weight": [32, 32, 3, 3],
        "advantage.hidden.weight": [256, 32 * 49],
        "advantage.output.weight": [6, 256],
        "value.hidden.weight": [256, 32 * 49],
        "value.output.weight": [1, 256],
    }


def test_tiny_width_leaves_one_unit_per_layer():
    network = make_network(NetworkConfig(width=0.001), images(), seed=1)
    assert network(observations(images())).shape == (3, 6)


def test_mean_over_actions_is_the_value_of_the_state():
    schema = images()
    network = make_network(small(), schema, seed=1)
    before = network(observations(schema))
    with torch.no_grad():
        network.value.output.bias += 10  # All values rise ...
        network.advantage.output.bias += 1000  # ... but a common part of all advantages has no effect.
    torch.testing.assert_close(network(observations(schema)), before + 10, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("schema", "divisor"), [(images(), 255), (vectors(dtype="uint8"), 255), (vectors(), 1)])
def test_network_scales_bytes_but_not_floats(schema, divisor):
    network = make_network(small(), schema, seed=1)
    observation = observations(schema)
    torch.testing.assert_close(network(observation), network(observation.float() / divisor))


def test_forward_does_not_change_the_observation():
    for schema in (images(), vectors()):
        observation = observations(schema)
        make_network(small(), schema, seed=1)(observation)
        assert torch.equal(observation, observations(schema))


def test_channels_last_changes_neither_values_nor_flat_parameters():
    schema = images()
    network = make_network(small(), schema, seed=1)
    other = make_network(small(), schema, seed=1).to(memory_format=torch.channels_last)
    assert not other.state_dict()["body.0.weight"].is_contiguous()
    torch.testing.assert_close(other(observations(schema)), network(observations(schema)))
    assert np.array_equal(flatten_parameters(other), flatten_parameters(network))
    load_parameters(other, flatten_parameters(make_network(small(), schema, seed=2)))
    assert np.array_equal(flatten_parameters(other), flatten_parameters(make_network(small(), schema, seed=2)))


@pytest.mark.parametrize("schema", [images(), vectors()])
def test_output_under_autocast_is_float32_and_finer_than_bfloat16(schema):
    network = make_network(small(), schema, seed=1)
    with torch.no_grad():
        network.value.output.bias += 2
    expected = network(observations(schema))
    with torch.autocast("cpu", torch.bfloat16):
        q = network(observations(schema))
    assert q.dtype is torch.float32
    torch.testing.assert_close(q, expected, rtol=0, atol=5e-3)  # bfloat16 numbers near 2 have a distance of 1/64.
    assert not torch.equal(q, q.bfloat16().float())


@pytest.mark.parametrize("bfloat16", [False, True])
def test_q_values_agree_in_both_number_formats(bfloat16):
    network = make_network(small(hidden=256), images(), seed=1)
    observation = observations(images())
    with torch.no_grad():
        expected = network(observation).numpy()
    q = q_values(network, observation.numpy(), bfloat16=bfloat16)
    assert q.dtype == np.float32
    np.testing.assert_allclose(q, expected, rtol=0, atol=5e-3 if bfloat16 else 1e-6)
    assert (q != expected).any() == bfloat16  # bfloat16 was used.


# Initial parameters


@pytest.mark.parametrize("schema", [images(), vectors()])
def test_parameters_depend_only_on_the_seed(schema):
    one, same, other = (flatten_parameters(make_network(small(), schema, seed=seed)) for seed in (7, 7, 8))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_global_generator_is_neither_read_nor_advanced():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    first = flatten_parameters(make_network(small(), images(), seed=7))
    assert torch.equal(torch.rand(4), expected)
    assert np.array_equal(first, flatten_parameters(make_network(small(), images(), seed=7)))


# Refusals


# Flat parameters


@pytest.mark.parametrize("config", [small(), small(dueling=False)])
@pytest.mark.parametrize("schema", [images(), vectors()])
def test_parameters_survive_the_round_trip(schema, config):
    source, target = make_network(config, schema, seed=1), make_network(config, schema, seed=2)
    values = flatten_parameters(source)
    assert values.dtype == np.float32
    assert values.shape == (num_parameters(source),)
    load_parameters(target, values)
    assert torch.equal(target(observations(schema)), source(observations(schema)))


def test_flat_parameters_follow_the_order_of_the_state_dict():
    network = make_network(small(), vectors(), seed=1)
    expected = np.concatenate([tensor.numpy().ravel() for tensor in network.state_dict().values()])
    assert np.array_equal(flatten_parameters(network), expected)


@pytest.mark.parametrize("module", [nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])
def test_published_parameters_share_no_memory_with_the_network(module):
    values = flatten_parameters(module)
    before = values.copy()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 1
    assert np.array_equal(values, before)
    values += 5
    assert np.array_equal(flatten_parameters(module), before + 1)


def test_loading_copies_into_the_tensors_that_an_optimizer_holds():
    module, values = nn.Linear(3, 2), np.arange(8, dtype=np.float32)
    weight = module.weight
    load_parameters(module, np.frombuffer(values.tobytes(), np.float32))  # The bytes of a message are read-only.
    assert module.weight is weight
    assert weight.requires_grad
    load_parameters(module, values)
    values += 5
    assert np.array_equal(flatten_parameters(module), np.arange(8))


@pytest.mark.parametrize(("shape", "text"), [((7,), r"\[7\]"), ((9,), r"\[9\]"), ((2, 4), r"\[2, 4\]")])
def test_parameters_of_another_network_are_refused(shape, text):
    module = nn.Linear(3, 2)
    before = flatten_parameters(module)
    with pytest.raises(UsageError, match=rf"{text}.*\b8\b.*network\.\*"):
        load_parameters(module, np.zeros(shape, np.float32))
    assert np.array_equal(flatten_parameters(module), before)


@pytest.mark.parametrize("function", [flatten_parameters, num_parameters])
def test_tensors_that_are_not_float32_are_refused(function):
    with pytest.raises(UsageError, match=r"'num_batches_tracked' is int64.*LayerNorm"):
        function(nn.BatchNorm1d(3))


# Custom networks

FACTORIES = """
import torch
from torch import nn

def good(schema):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(schema.num_actions))

def raises(schema):
    raise KeyError("lost")

def not_a_module(schema):
    return lambda observation: torch.zeros(2, 2)

class Answers(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.answer = answer

    def forward(self, observation):
        return self.answer(observation, self.scale)

def shape(schema):
    return Answers(lambda observation, scale: scale * torch.zeros(len(observation), 3))

def dtype(schema):
    return Answers(lambda observation, scale: (scale * torch.zeros(2, 2)).double())

def infinite(schema):
    return Answers(lambda observation, scale: scale * torch.full((2, 2), float("inf")))

def a_tuple(schema):
    return Answers(lambda observation, scale: (scale * torch.zeros(2, 2),))

def fails(schema):
    return Answers(lambda observation, scale: observation @ torch.zeros(99, 2))

def constant(schema):
    return Answers(lambda observation, scale: torch.zeros(2, 2))

def batch_norm(schema):
    return nn.Sequential(good(schema), nn.BatchNorm1d(schema.num_actions))

def masked(schema):
    network = good(schema)
    network.register_buffer("mask", torch.full((2, 2), -torch.inf))
    return network

def pixels(schema):
    return Answers(lambda observation, scale: scale * observation.float().mean((1, 2, 3))[:, None].expand(-1, 6))

number = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with a user's module; restores sys.path and sys.modules."""
    (tmp_path / "my_networks.py").write_text(FACTORIES)
    (tmp_path / "my_broken_networks.py").write_text("def good(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def custom(factory, schema=None, seed=1):
    return make_network(NetworkConfig(factory=factory), schema or vectors(), seed=seed)


def test_factory_in_the_current_folder_gets_schema_and_seed(folder):
    network = custom("my_networks:good", vectors(4, stack=2, num_actions=5))
    assert network(torch.zeros(3, 2, 4)).shape == (3, 5)
    assert num_parameters(network) == (2 * 4 + 1) * 5
    assert custom("my_networks:pixels", images())(observations(images())).shape == (3, 6)  # It is checked with bytes.
    one, same, other = (flatten_parameters(custom("my_networks:good", seed=seed)) for seed in (7, 7, 8))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert sys.path.count(str(folder)) == 1


def test_program_finds_a_factory_in_its_current_folder(folder):
    program = (
        "from apex.config import NetworkConfig; from apex.dqn.networks import make_network; "
        "from apex.runtime.trust import allow; from apex.schema import Schema; allow('my_networks'); "
        "schema = Schema(frame_shape=(4,), frame_dtype='float32', stack=1, num_actions=2, n_step=3, codec='raw'); "
        "print(type(make_network(NetworkConfig(factory='my_networks:good'), schema, seed=1)).__name__)"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{type(custom('my_networks:good')).__name__}\n", done.stderr


REFUSED = {  # factory -> what the error names
    "no_such_module:good": r"'no_such_module'.* /.*ModuleNotFoundError",
    "my_broken_networks:good": r"'my_broken_networks'.* /.*SyntaxError",
    ":good": r"'' is not",
    "my_networks:missing": r"'my_networks' .*'missing'",
    "my_networks:number": r"'my_networks' .*'number'",
    "my_networks:raises": r"KeyError: 'lost'",
    "my_networks:not_a_module": r"function",
    "my_networks:shape": r"float32\[2, 1, 4\] .*float32\[2, 3\].*float32\[2, 2\]",
    "my_networks:dtype": r"float64\[2, 2\].*float32\[2, 2\]",
    "my_networks:infinite": r"\[\[inf, inf\], \[inf, inf\]\]",
    "my_networks:a_tuple": r"tuple",
    "my_networks:fails": r"float32\[2, 1, 4\] .*RuntimeError",
    "my_networks:constant": r"trainable",
    "my_networks:batch_norm": r"'1\.num_batches_tracked' is int64.*LayerNorm",
    "my_networks:masked": r"mask .*not finite.*persistent=False",
}


@pytest.mark.parametrize(("factory", "names"), REFUSED.items(), ids=REFUSED)
def test_unusable_factory_is_refused_by_its_name(folder, factory, names):
    with pytest.raises(UsageError, match=names) as refusal:
        custom(factory)
    assert f"network.factory {factory!r}" in refusal.value.problem
