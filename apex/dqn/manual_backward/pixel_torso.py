"""The three convolutions of the built-in image network, computed by convolution.c, with hand-written gradients.

Their outputs have the channels last: float32[B, H, W, C].
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.algorithms.encoders import channels_first
from apex.algorithms.kernels.convolution import KERNEL, LANES, STRIDE, call, load_convolution
from apex.algorithms.kernels.pixel_convolution import convolve, output_size, weight_gradient
from apex.dqn.manual_backward.layers import relu_backward

CONVOLUTIONS_IN_BODY = (0, 2, 4)  # indices of the convolutions in the body; ReLUs lie between them


class ConvolutionLayer(NamedTuple):
    """A convolution and its ReLU."""

    weight: Tensor  # float32[outputs, inputs, kernel, kernel]
    bias: Tensor  # float32[outputs]
    weight_gradient: Tensor | None
    bias_gradient: Tensor | None
    stride: int

    def __call__(self, inputs: Tensor) -> Tensor:
        """float32[B, H, W, inputs] -> float32[B, out H, out W, outputs]."""
        kernel = self.weight.shape[2]
        height, width = ((size - kernel) // self.stride + 1 for size in inputs.shape[1:3])
        out = inputs.new_empty(len(inputs), height, width, len(self.weight))
        packed = self.weight.permute(2, 3, 1, 0).contiguous()
        call("layer", self._shape(inputs), inputs, packed, self.bias, out)
        return out

    def differentiate(self, inputs: Tensor, output_gradient: Tensor) -> None:
        """Stores the gradients of weight and bias.

        output_gradient: gradient of the loss with respect to the outputs before the ReLU.
        """
        outputs, channels, kernel, _ = self.weight.shape
        gradient = inputs.new_zeros(kernel, kernel, channels, outputs)
        call("layer_weight_gradient", self._shape(inputs), inputs, output_gradient, gradient)
        self.store(gradient.permute(3, 2, 0, 1), output_gradient)

    def store(self, gradient: Tensor, output_gradient: Tensor) -> None:
        """Stores `gradient` as that of the weights, and the gradient of the bias, computed from `output_gradient`."""
        assert self.weight_gradient is not None
        self.weight_gradient.copy_(gradient)
        torch.sum(output_gradient.flatten(0, 2), 0, out=self.bias_gradient)

    def input_gradient(self, inputs: Tensor, output_gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to the previous layer's outputs before its ReLU, shaped as `inputs`."""
        weight = self.weight.permute(2, 0, 3, 1).contiguous()
        gradient = torch.empty_like(inputs)
        call("layer_input_gradient", self._shape(inputs), inputs, output_gradient, weight, gradient)
        return gradient

    def _shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Returns the `struct layer` of convolution.c."""
        return (*inputs.shape, len(self.weight), self.weight.shape[2], self.stride)


class PixelTorso:
    """The body of a `networks.PixelQNetwork`, if `supports` accepts it."""

    def __init__(self, body: nn.Sequential) -> None:
        self._first, self._second, self._third = (convolution_layer(body[index]) for index in CONVOLUTIONS_IN_BODY)

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """Returns the output of each convolution after its ReLU, and the features in the order of `nn.Flatten`."""
        weight, bias = self._first.weight, self._first.bias
        images = flatten_images(stacks, weight.shape[1])
        out = weight.new_empty(len(images), *output_size(images.shape[2:]), len(weight))
        first = convolve(images, weight, bias, out, rectified=True)
        second = self._second(first)
        third = self._third(second)
        return first, second, third, third.permute(0, 3, 1, 2).flatten(1)

    def backward(self, stacks: Tensor, outputs: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """See `layers.VectorTorso.backward`."""
        first, second, third, features = (rows[: len(output_gradient)] for rows in outputs)
        output_gradient = last_layer_gradient(output_gradient, features, third)
        self._third.differentiate(second, output_gradient)
        output_gradient = self._third.input_gradient(second, output_gradient)
        self._second.differentiate(first, output_gradient)
        output_gradient = self._second.input_gradient(first, output_gradient)
        images = channels_first(stacks[0])
        self._first.store(weight_gradient(images, output_gradient), output_gradient)


def last_layer_gradient(output_gradient: Tensor, features: Tensor, outputs: Tensor) -> Tensor:
    """Returns the gradient before the ReLU of the last layer, float32[B, H, W, C].

    output_gradient: gradient with respect to `features`, which are `outputs` in the order of `nn.Flatten`.
    """
    batch, height, width, channels = outputs.shape
    by_channel = relu_backward(output_gradient, features).view(batch, channels, height, width)
    return by_channel.permute(0, 2, 3, 1).contiguous()


def flatten_images(stacks: Tensor, channels: int) -> Tensor:
    """Returns the stacks, uint8[N, B, S, H, W] or [N, B, S, H, W, C], as uint8[N * B, channels, H, W].

    Raises ValueError for any other tensor, because convolution.c does not check bounds.
    """
    images = channels_first(stacks.flatten(0, 1)) if stacks.dim() in (5, 6) else stacks.flatten(0, 1)
    if images.dtype is not torch.uint8 or images.dim() != 4 or images.shape[1] != channels:
        raise ValueError(f"a batch is {stacks.dtype}{list(stacks.shape)}, expected uint8[N, B, {channels}, H, W]")
    return images


def supports(body: nn.Sequential) -> bool:
    """Whether convolution.c is available and supports these layers."""
    layers = [cast(nn.Conv2d, body[index]) for index in CONVOLUTIONS_IN_BODY]
    known = layers[0].kernel_size == (KERNEL, KERNEL) and layers[0].stride == (STRIDE, STRIDE)
    return known and load_convolution() is not None and not any(layer.out_channels % LANES for layer in layers)


def convolution_layer(layer: nn.Module) -> ConvolutionLayer:
    """Returns the parameters of a module and the tensors that store their gradients."""
    layer = cast(nn.Conv2d, layer)
    assert layer.bias is not None
    return ConvolutionLayer(layer.weight, layer.bias, layer.weight.grad, layer.bias.grad, layer.stride[0])
