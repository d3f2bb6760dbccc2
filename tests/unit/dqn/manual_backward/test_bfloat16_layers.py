"""Compares the bfloat16 layers with float64: exact for small integers, which bfloat16 does not round, else close."""

import pytest
import torch
from torch import nn

from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apex.algorithms.optimizers import Adam, CenteredRMSProp
from apex.algorithms.parameters import flatten_parameters, load_parameters
from apex.config import NetworkConfig
from apex.dqn.manual_backward.bfloat16_layers import (
    LAST,
    Bfloat16Convolution,
    Bfloat16Linear,
    Bfloat16Torso,
    Rounded,
    interleave,
)
from apex.dqn.networks import make_network
from apex.schema import Schema

PIXELS = Schema(frame_shape=(47, 61), frame_dtype="uint8", stack=2, num_actions=3, n_step=3, codec="lz4")

pytestmark = pytest.mark.usefixtures("one_thread")


def whole(generator, low, high, *shape):
    return torch.randint(low, high + 1, shape, generator=generator).float()


def with_gradients(layer):
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # to be overwritten
    return layer


def differentiated(layer, inputs, output_gradient):
    """Returns outputs, gradients of the parameters and gradient of the inputs, by float64 autograd."""
    inputs = inputs.double().requires_grad_()
    parameters = [parameter.detach().double().requires_grad_() for parameter in layer.parameters()]
    if isinstance(layer, nn.Linear):
        outputs = nn.functional.linear(inputs, *parameters)
    else:
        seen = inputs / 255 if isinstance(layer, PixelConvolution) else inputs
        outputs = torch.conv2d(seen, *parameters, layer.stride)
    gradients = torch.autograd.grad(outputs, [*parameters, inputs], output_gradient.double())
    return outputs.detach(), gradients[:-1], gradients[-1]


@torch.no_grad()
def test_linear_layer_and_its_gradients_are_exact():
    generator = torch.Generator().manual_seed(0)
    layer = with_gradients(nn.Linear(12, 5))
    layer.weight.copy_(whole(generator, -2, 2, 5, 12))
    layer.bias.copy_(whole(generator, -9, 9, 5) / 1024)  # The bias is added in float32.
    inputs, gradient = whole(generator, 0, 3, 6, 12), whole(generator, -2, 2, 6, 5)
    with torch.enable_grad():
        outputs, by_parameters, by_inputs = differentiated(layer, inputs, gradient)
    rounded = Bfloat16Linear(layer)
    assert rounded(inputs.bfloat16()).equal(outputs.float())
    rounded.differentiate(inputs.bfloat16(), gradient)
    assert [p.grad.double().tolist() for p in layer.parameters()] == [g.tolist() for g in by_parameters]
    assert rounded.input_gradient(gradient).double().equal(by_inputs)


@torch.no_grad()
@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (3, 1)])
def test_convolution_and_its_gradients_are_exact(kernel, stride):
    generator = torch.Generator().manual_seed(0)
    layer = with_gradients(nn.Conv2d(3, 8, kernel, stride))
    layer.weight.copy_(whole(generator, -1, 1, *layer.weight.shape))
    layer.bias.copy_(whole(generator, -9, 9, 8))
    inputs = whole(generator, 0, 2, 2, 3, 9, 7)
    rounded = Bfloat16Convolution(layer)
    outputs = rounded(inputs.bfloat16().contiguous(memory_format=LAST))
    gradient = whole(generator, -1, 1, *outputs.shape)
    with torch.enable_grad():
        expected, by_parameters, by_inputs = differentiated(layer, inputs, gradient)
    assert outputs.double().equal(expected.relu())
    got = rounded.backward(inputs.bfloat16(), gradient.bfloat16(), to_inputs=True)
    assert [p.grad.double().tolist() for p in layer.parameters()] == [g.tolist() for g in by_parameters]
    assert got.double().equal(by_inputs)


@torch.no_grad()
def test_first_convolution_scales_pixels():
    generator = torch.Generator().manual_seed(0)
    layer = with_gradients(PixelConvolution(1, 8, 8, 4))
    layer.weight.copy_(255 * whole(generator, -1, 1, *layer.weight.shape))  # whole numbers after scaling
    layer.bias.copy_(whole(generator, -9, 9, 8))
    pixels = whole(generator, 0, 2, 1, 1, 12, 12)
    rounded = Bfloat16Convolution(layer)
    outputs = rounded(pixels.bfloat16())
    gradient = whole(generator, -1, 1, *outputs.shape)
    with torch.enable_grad():
        expected, by_parameters, _ = differentiated(layer, pixels, gradient)
    assert outputs.double().equal(expected.relu())
    rounded.backward(pixels.bfloat16(), gradient.bfloat16(), to_inputs=False)
    for parameter, by_parameter in zip(layer.parameters(), by_parameters, strict=True):
        torch.testing.assert_close(parameter.grad.double(), by_parameter, rtol=1e-6, atol=1e-6)


def test_features_and_gradients_equal_autograds_up_to_rounding():
    body = with_gradients(make_network(NetworkConfig(width=0.25), PIXELS, seed=1).body)
    stacks = torch.randint(256, (2, 5, *PIXELS.observation_shape), generator=torch.Generator().manual_seed(0))
    stacks = stacks.to(torch.uint8)
    features = body(stacks.flatten(0, 1))
    gradient = torch.randn(5, features.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = torch.autograd.grad(features[:5], list(body.parameters()), gradient.float())
    with torch.no_grad():
        torso = Bfloat16Torso(body)
        passed = torso.forward(stacks)
        torch.testing.assert_close(passed[-1].float(), features.detach(), rtol=0.02, atol=0.01)
        torso.backward(stacks, passed, gradient)
    for parameter, by_parameter in zip(body.parameters(), expected, strict=True):
        off = (parameter.grad - by_parameter).norm() / by_parameter.norm()
        assert off < 0.2  # Units near 0 can be active in only one of the networks.


@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (2, 4, 84, 84), (0, 4, 8, 8), (2, 3, 9, 8), (2, 1, 8, 8)])
@pytest.mark.parametrize("stop", [None, -1])
def test_interleaved_pixels_keep_their_values(shape, stop):
    """Four channels use the native code, others torch; the rows may be a part of a larger array."""
    images = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)[..., :stop]
    interleaved = interleave(images)
    assert interleaved.dtype is torch.bfloat16
    assert interleaved.is_contiguous(memory_format=LAST)
    assert interleaved.float().equal(images.float())


def test_images_of_another_network_are_refused():
    body = make_network(NetworkConfig(width=0.25), PIXELS, seed=1).body
    for stacks in (torch.zeros(2, 5, 3, 47, 61, dtype=torch.uint8), torch.zeros(2, 5, 2, 47, 61)):
        with pytest.raises(ValueError, match=r"uint8.*\b2\b"):
            Bfloat16Torso(body).forward(stacks)


def test_rounded_tensor_is_computed_again_only_after_a_change():
    layer = nn.Linear(2, 2)
    computed = []

    def compute():
        computed.append(1)
        return layer.weight

    rounded = Rounded([layer.weight], compute)
    adam, rmsprop = (
        Adam(layer.parameters(), lr=0.5, fused=True),
        CenteredRMSProp(layer.parameters(), lr=0.5, decay=0.9, epsilon=1.0),
    )
    changes = [
        lambda: None,
        lambda: load_parameters(layer, flatten_parameters(layer) + 1),
        lambda: layer.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)}),
        adam.step,
        rmsprop.step,
    ]
    for count, change in enumerate(changes, 1):
        layer.weight.grad, layer.bias.grad = torch.ones(2, 2), torch.ones(2)
        change()
        with torch.inference_mode():
            assert rounded().equal(layer.weight.bfloat16())
            assert rounded().dtype is torch.bfloat16
        assert len(computed) == count
