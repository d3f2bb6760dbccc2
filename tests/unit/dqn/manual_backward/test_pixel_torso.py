"""Compares each native convolution and its ReLU with the formula in float64, forward and backward."""

from itertools import pairwise

import pytest
import torch
from support.native import skip_without_convolution
from torch import nn

from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apex.dqn.manual_backward.pixel_torso import PixelTorso, convolution_layer, supports

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = [  # batch, height, width, inputs, outputs, kernel, stride
    (3, 20, 20, 8, 16, 4, 2),  # the second and third layer of Pong's preset
    (2, 9, 9, 16, 16, 3, 1),
    (2, 9, 9, 64, 64, 3, 1),  # of the paper's
    (1, 3, 3, 8, 8, 3, 1),  # a single output position
    (2, 11, 14, 8, 24, 4, 2),  # unused pixels; two vectors of channels, then one
    (1, 7, 36, 8, 8, 2, 1),  # 35 output positions in a row: six blocks of five and six
    (1, 6, 9, 24, 40, 3, 3),  # windows that do not overlap
]
skip_without_convolution()


def make(batch, height, width, inputs, outputs, kernel, stride):
    """Returns a layer, its inputs (after a ReLU), and the gradient of the loss with respect to its outputs."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = nn.Conv2d(inputs, outputs, kernel, stride)
        into = torch.randn(batch, height, width, inputs).relu()
        places = ((size - kernel) // stride + 1 for size in (height, width))
        output_gradient = torch.randn(batch, *places, outputs)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)  # must be overwritten
    return convolution_layer(module), into, output_gradient


def windows(layer, rows):
    """Returns each output position's window, float64[B, rows, columns, kernel, kernel, inputs], a writable view."""
    kernel, stride = layer.weight.shape[2], layer.stride
    return rows.unfold(1, kernel, stride).unfold(2, kernel, stride).permute(0, 1, 2, 4, 5, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_is_a_convolution_and_a_relu(shape):
    layer, into, _ = make(*shape)
    weight = layer.weight.detach().double()
    expected = torch.einsum("bijyxc,ocyx->bijo", windows(layer, into.double()), weight) + layer.bias.detach().double()
    assert (expected < 0).any()
    torch.testing.assert_close(layer(into).detach().double(), expected.clamp(min=0), **TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_gradients_equal_the_formula(shape):
    layer, into, output_gradient = make(*shape)
    with torch.no_grad():
        layer.differentiate(into, output_gradient)
    expected = torch.einsum("bijyxc,bijo->ocyx", windows(layer, into.double()), output_gradient.double())
    torch.testing.assert_close(layer.weight_gradient.double(), expected, **TOLERANCE)
    torch.testing.assert_close(layer.bias_gradient.double(), output_gradient.double().sum((0, 1, 2)), **TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_input_gradient_is_zero_where_the_previous_relu_is(shape):
    layer, into, output_gradient = make(*shape)
    expected = torch.zeros(into.shape, dtype=torch.float64)
    _, rows, columns, _ = output_gradient.shape
    kernel, stride = layer.weight.shape[2], layer.stride
    for i in range(rows):
        for j in range(columns):
            share = torch.einsum("bo,ocyx->byxc", output_gradient[:, i, j].double(), layer.weight.detach().double())
            expected[:, i * stride : i * stride + kernel, j * stride : j * stride + kernel] += share
    expected[into == 0] = 0
    with torch.no_grad():
        torch.testing.assert_close(layer.input_gradient(into, output_gradient).double(), expected, **TOLERANCE)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_relu_keeps_nan(value):
    layer, into, output_gradient = make(*SHAPES[1])
    into[1, 4, 4, 3] = value
    with torch.no_grad():
        assert not layer(into)[1].isfinite().all()
        assert layer(into)[0].isfinite().all()
        output_gradient[0, 2, 2, 1] = value
        assert not layer.input_gradient(into.nan_to_num(1.0, 1.0), output_gradient)[0].isfinite().all()


def test_empty_batch_gives_empty_outputs():
    layer, into, output_gradient = make(*SHAPES[0])
    with torch.no_grad():
        assert layer(into[:0]).shape == (0, *output_gradient.shape[1:])
        assert layer.input_gradient(into[:0], output_gradient[:0]).shape == (0, *into.shape[1:])
        layer.differentiate(into[:0], output_gradient[:0])
    assert (layer.weight_gradient == 0).all()


@pytest.mark.parametrize(
    ("outputs", "kernel", "stride", "expected"),
    [
        ((8, 16, 16), 8, 4, True),
        ((4, 8, 8), 8, 4, False),
        ((8, 12, 16), 8, 4, False),
        ((8, 16, 12), 8, 4, False),
        ((8, 16, 16), 6, 4, False),
        ((8, 16, 16), 8, 3, False),
    ],
)
def test_only_known_first_layers_and_full_vectors_are_supported(outputs, kernel, stride, expected):
    layers = [nn.Conv2d(4, outputs[0], kernel, stride), nn.ReLU()]
    for inputs, each in pairwise(outputs):
        layers += [nn.Conv2d(inputs, each, 3), nn.ReLU()]
    assert supports(nn.Sequential(*layers)) == expected


@pytest.mark.parametrize(
    "stacks",
    [
        torch.zeros(2, 3, 1, 84, 84, dtype=torch.uint8),
        torch.zeros(2, 3, 4, 84, 84),
        torch.zeros(3, 4, 84, 84, dtype=torch.uint8),
    ],
)
def test_batch_of_another_network_is_refused_before_it_is_read(stacks):
    layers = [
        PixelConvolution(4, 8, 8, 4),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, 2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
    ]
    with pytest.raises(ValueError, match=r"uint8.*\b4\b"):
        PixelTorso(nn.Sequential(*layers)).forward(stacks)
