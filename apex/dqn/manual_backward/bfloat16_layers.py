"""The layers of the built-in image network in bfloat16, with hand-written gradients.

Parameters, their gradients and Q-values are float32. Images have the channels last, for which oneDNN is fastest.

Axes: B observations, C channels, D inputs and H units of a layer.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from apex.algorithms.kernels.convolution import PACKED_CHANNELS, call, load_convolution
from apex.algorithms.kernels.pixel_convolution import PixelConvolution
from apex.dqn.manual_backward.layers import relu_backward
from apex.dqn.manual_backward.pixel_torso import CONVOLUTIONS_IN_BODY, flatten_images

LAST = torch.channels_last


class Rounded:
    """A bfloat16 tensor that is computed from parameters, and again after each change of one of them."""

    def __init__(self, parameters: Sequence[Tensor], compute: Callable[[], Tensor]) -> None:
        self._parameters = parameters
        self._compute = compute
        self._versions: list[int] = []
        self._value = torch.empty(0)

    def __call__(self) -> Tensor:
        """Returns the tensor, with the channels last if it has four axes."""
        versions = [parameter._version for parameter in self._parameters]
        if versions != self._versions:
            value = self._compute()
            self._value = value.to(torch.bfloat16, memory_format=LAST if value.dim() == 4 else torch.contiguous_format)
            self._versions = versions
        return self._value


class Bfloat16Linear:
    """A linear layer; see `layers.Linear`."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._weight = Rounded([layer.weight], lambda: layer.weight)

    def __call__(self, inputs: Tensor) -> Tensor:
        """bfloat16[B, D] -> float32[B, H]."""
        return (inputs @ self._weight().t()).float().add_(self._layer.bias)

    def differentiate(self, inputs: Tensor, output_gradient: Tensor) -> None:
        """Stores the gradients of weight and bias; output_gradient: float32[B, H]."""
        cast(Tensor, self._layer.weight.grad).copy_(output_gradient.bfloat16().t() @ inputs)
        torch.sum(output_gradient, 0, out=self._layer.bias.grad)

    def input_gradient(self, output_gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to the inputs, bfloat16[B, D]."""
        return output_gradient.bfloat16() @ self._weight()


class Bfloat16Convolution:
    """A convolution and its ReLU. The first one takes pixels of 0 ... 255, and scales its weights instead of them."""

    def __init__(self, layer: nn.Conv2d) -> None:
        self._layer = layer
        self._scale = 1 / 255 if isinstance(layer, PixelConvolution) else 1.0
        bias = cast(Tensor, layer.bias)
        self._weight = Rounded([layer.weight], lambda: layer.weight * self._scale)
        self._bias = Rounded([bias], lambda: bias)

    def __call__(self, inputs: Tensor) -> Tensor:
        """bfloat16[B, inputs, H, W] -> bfloat16[B, outputs, out H, out W]."""
        return torch.conv2d(inputs, self._weight(), self._bias(), self._layer.stride).relu_()

    def backward(self, inputs: Tensor, output_gradient: Tensor, *, to_inputs: bool) -> Tensor:
        """Stores the gradients of weight and bias; returns that with respect to the inputs if `to_inputs`.

        output_gradient: gradient of the loss with respect to the outputs before the ReLU.
        """
        layer, zeros = self._layer, [0, 0]
        input_gradient: Tensor
        input_gradient, weight_gradient, bias_gradient = torch.ops.aten.convolution_backward(
            output_gradient, inputs, self._weight(), [layer.out_channels], layer.stride, zeros, [1, 1], False, zeros, 1,
            [to_inputs, True, True],
        )  # fmt: skip
        cast(Tensor, layer.weight.grad).copy_(weight_gradient).mul_(self._scale)
        cast(Tensor, cast(Tensor, layer.bias).grad).copy_(bias_gradient)
        return input_gradient


class Bfloat16Torso:
    """The body of a `networks.PixelQNetwork`; see `pixel_torso.PixelTorso`."""

    def __init__(self, body: nn.Sequential) -> None:
        layers = [cast(nn.Conv2d, body[index]) for index in CONVOLUTIONS_IN_BODY]
        self._channels = layers[0].in_channels
        self._layers = [Bfloat16Convolution(layer) for layer in layers]

    def forward(self, stacks: Tensor) -> tuple[Tensor, ...]:
        """Returns images, the output of each convolution after its ReLU, and features in the order of `nn.Flatten`."""
        outputs = [interleave(flatten_images(stacks, self._channels))]
        for layer in self._layers:
            outputs.append(layer(outputs[-1]))
        return *outputs, outputs[-1].flatten(1)

    def backward(self, stacks: Tensor, outputs: tuple[Tensor, ...], output_gradient: Tensor) -> None:
        """See `layers.VectorTorso.backward`."""
        *images, features = (rows[: len(output_gradient)] for rows in outputs)
        gradient = relu_backward(output_gradient, features).view_as(images[-1]).contiguous(memory_format=LAST)
        for index in (2, 1, 0):
            gradient = self._layers[index].backward(images[index], gradient, to_inputs=index > 0)
            if index:
                gradient = relu_backward(gradient, images[index])


def interleave(images: Tensor) -> Tensor:
    """uint8[B, C, H, W] -> the same numbers in bfloat16 with the channels last."""
    batch, channels, height, width = images.shape
    if channels != PACKED_CHANNELS or load_convolution() is None:
        return images.contiguous(memory_format=LAST).to(torch.bfloat16)
    images = images.contiguous()
    out = torch.empty(batch, height, width, channels, dtype=torch.bfloat16)
    call("interleave", (batch, height * width), images, out)
    return out.permute(0, 3, 1, 2)
