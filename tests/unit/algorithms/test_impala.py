"""The IMPALA torso: spectral norm against numpy's and torch's, pooling, layers, and DQN with this torso."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from apex.algorithms.custom_network import seeded
from apex.algorithms.encoders import Encoder
from apex.algorithms.exported import ENCODERS
from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.impala import Pool, SpectralConvolution, impala
from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, NetworkConfig
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.autograd_update import EagerUpdate
from apex.schema import Part, Schema

IMAGES = Schema(frame_shape=(44, 40), frame_dtype="uint8", stack=2, num_actions=3, n_step=3, codec="lz4")


def make(channels=3, outputs=5, seed=0):
    with seeded(seed):
        return SpectralConvolution(channels, outputs, 3, padding=1)


def effective_weight(layer):
    """The weights [outputs, inputs * 9] that the layer applies, read from its response to single pixels."""
    channels = layer.in_channels
    inputs = torch.zeros(channels * 9, channels, 3, 3)
    for i in range(channels * 9):
        inputs[i, i // 9, i % 9 // 3, i % 3] = 1
    with torch.no_grad():
        return (layer(inputs)[:, :, 1, 1] - layer.bias).T


def largest_singular_value(matrix):
    return np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)[0]


def test_power_iterations_converge_to_the_largest_singular_value():
    layer = make()
    with torch.no_grad():
        layer.weight.mul_(7)
    for _ in range(300):
        layer(torch.zeros(1, 3, 4, 4))
    assert largest_singular_value(effective_weight(layer)) == pytest.approx(1.0, rel=1e-4)
    expected = layer.weight.flatten(1).detach() / largest_singular_value(layer.weight.flatten(1))
    torch.testing.assert_close(effective_weight(layer), expected.float(), rtol=1e-3, atol=1e-5)


def test_a_new_layer_is_nearly_normalized_whatever_its_scale():
    for seed in range(5):
        assert 0.97 < largest_singular_value(effective_weight(make(16, 16, seed))) < 1.15


def test_the_value_follows_weights_that_change():
    """One iteration per update is enough for small updates."""
    layer, rng = make(8, 8), torch.Generator().manual_seed(1)
    for _ in range(100):
        with torch.no_grad():
            layer.weight.add_(0.01 * torch.randn(layer.weight.shape, generator=rng))
        layer(torch.zeros(1, 8, 4, 4))
    assert largest_singular_value(effective_weight(layer)) == pytest.approx(1.0, abs=0.03)


def test_output_and_gradient_equal_those_of_torchs_spectral_norm():
    layer = make()
    other = nn.Conv2d(3, 5, 3, padding=1)
    other.load_state_dict({name: layer.state_dict()[name] for name in ("weight", "bias")})
    other = parametrizations.spectral_norm(other)
    images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    for _ in range(300):
        layer(images), other(images)
    outputs = layer(images), other(images)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.parametrizations.weight.original.grad, rtol=1e-3, atol=1e-4)


def test_only_differentiated_passes_in_training_iterate():
    layer, images = make(), torch.randn(1, 3, 4, 4)
    before = layer.u.clone()
    with torch.no_grad():
        layer(images)
    layer.eval()(images)
    assert torch.equal(layer.u, before)
    layer.train()(images)
    assert not torch.equal(layer.u, before)


def test_two_passes_can_be_differentiated_together():
    layer, images = make(), torch.randn(1, 3, 4, 4)
    (layer(images).sum() + layer(2 * images).square().sum()).backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize(("height", "width"), [(11, 11), (5, 7), (6, 1), (28, 13)])
def test_pooling_equals_torchs_adaptive_pooling(height, width):
    features = torch.randn(2, 3, height, width)
    assert torch.equal(Pool((6, 6))(features), functional.adaptive_max_pool2d(features, 6))


def test_torso_has_three_blocks_of_two_residual_blocks():
    layers = impala(4, 1.0)
    sizes = [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Conv2d)]
    assert sizes == [(32, 4, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3)]
    torso = nn.Sequential(*layers)
    assert sum(isinstance(module, SpectralConvolution) for module in torso.modules()) == 12
    assert torso(torch.zeros(1, 4, 84, 84, dtype=torch.uint8)).shape == (1, 64 * 36)


@pytest.mark.parametrize("parts", [(), (Part("camera", "uint8", (40, 36, 3)), Part("speed", "float32", (5,)))])
def test_exported_code_computes_the_same_features(parts):
    shape = (sum(part.num_bytes for part in parts),) if parts else (44, 40)
    schema = replace(IMAGES, frame_shape=shape, parts=parts, stack=1)
    encoder = Encoder(schema, width=0.25, units=8, torso="impala").eval()
    frames = torch.randint(2, (3, *schema.observation_shape), dtype=torch.uint8)
    w = {f"body.{name}": tensor for name, tensor in encoder.state_dict().items()}
    names = {"torch": torch, "F": functional, "w": w}
    names["linear"] = lambda name, x: functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])
    exec(ENCODERS, names)
    start, x = 0, {}
    for part in parts:
        values = frames[..., start : start + part.num_bytes].clone().view(getattr(torch, part.dtype))
        x[part.name], start = values.reshape(3, 1, *part.shape), start + part.num_bytes
    features = eval(encoder.code("body"), names | {"x": x or frames})
    torch.testing.assert_close(features, encoder(frames), rtol=1e-4, atol=1e-5)


def test_dqn_learns_with_this_torso_by_autograd():
    config = Config(network=NetworkConfig(torso="impala", width=0.25, hidden=16))
    algorithm = DqnAlgorithm(config, IMAGES)
    online, target = algorithm.make_network(), algorithm.make_network().requires_grad_(False).eval()
    update = algorithm.make_update(online, target, torch.optim.Adam(online.parameters(), 1e-3), torch.device("cpu"))
    assert isinstance(update, EagerUpdate)
    rng, rewards = np.random.default_rng(0), torch.tensor([-1.0, 0.0, 1.0])
    stacks = torch.from_numpy(rng.integers(0, 256, (2, 3, 2, 44, 40), np.uint8))
    batch = DeviceBatch(stacks, torch.arange(3), rewards, torch.zeros(3), torch.ones(3))
    kept, errors = copy.deepcopy(target.state_dict()), [update(batch).td_errors.mean().item() for _ in range(100)]
    assert errors[-1] < 0.3 < errors[0]
    assert all(torch.equal(kept[name], tensor) for name, tensor in target.state_dict().items())
    actor = algorithm.make_network()
    actor.load_state_dict(online.state_dict())
    assert np.array_equal(flatten_parameters(actor), flatten_parameters(online))
    q = algorithm.make_agent(actor).q_values(stacks[0].numpy())
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(q), online.eval()(stacks[0]))
