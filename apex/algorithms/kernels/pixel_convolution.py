"""The first convolution of an image network: by convolution.c if that is faster, else by torch.

The native version scales uint8 pixels to 0 ... 1 by scaling the weights, of which there are 1000 times fewer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from apex.algorithms.kernels.convolution import KERNEL, LANES, STRIDE, call, load_convolution


def scale(observation: Tensor) -> Tensor:
    """Scales uint8 0 ... 255 to 0 ... 1 in the dtype of the first layer; returns other dtypes unchanged."""
    if observation.dtype is not torch.uint8:
        return observation
    return observation.to(_dtype(observation)).mul_(1 / 255)  # One copy, scaled in place: a batch of 512 takes 58 MB.


def _dtype(observation: Tensor) -> torch.dtype:
    device = observation.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


class PixelConvolution(nn.Conv2d):
    """A convolution that first scales uint8 to 0 ... 1.

    With `scales_weights`, torch scales the weights instead of the pixels, which it copies only once, to channels-last.
    """

    scales_weights = False

    def forward(self, images: Tensor) -> Tensor:
        """uint8 or float32 [B, C, H, W] -> [B, outputs, ...]; the memory format of the result may vary."""
        weight, bias = self.weight, self.bias
        if self.scales_weights and images.dtype is torch.uint8:
            pixels = images.to(_dtype(images), memory_format=torch.channels_last)
            out: Tensor = self._conv_forward(pixels, weight * (1 / 255), bias)
            return out
        if bias is None or not self._supports(images):
            return super().forward(scale(images))
        if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad):
            result: Tensor = _Differentiable.apply(images, weight, bias)  # type: ignore[no-untyped-call]
            return result
        return _convolve(images, weight, bias)

    def _supports(self, images: Tensor) -> bool:
        """Whether the native convolution supports this input and is faster than torch.

        The native convolution uses one thread and cannot be traced or compiled. It does not check bounds, so torch gets
        all invalid input and raises the error.
        """
        return (
            not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            and not torch.compiler.is_compiling()
            and images.dtype is torch.uint8
            and images.dim() == 4
            and images.shape[1] == self.in_channels
            and min(images.shape[2:]) >= KERNEL
            and (self.kernel_size, self.stride) == ((KERNEL, KERNEL), (STRIDE, STRIDE))
            and (self.padding, self.dilation, self.groups) == ((0, 0), (1, 1), 1)
            and self.out_channels % LANES == 0
            and self.weight.dtype is torch.float32
            and images.device.type == self.weight.device.type == "cpu"
            and torch.get_num_threads() == 1
            and not torch.is_autocast_enabled("cpu")
            and load_convolution() is not None
        )


class _Differentiable(torch.autograd.Function):
    """`_convolve` with gradients for weight and bias, not for the images, which must not change before `backward`."""

    @staticmethod
    def forward(context: Any, images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        context.save_for_backward(images)
        return _convolve(images, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (images,) = context.saved_tensors
        gradient = gradients[0].permute(0, 2, 3, 1).contiguous()  # rarely copies, because `_convolve` has this layout
        return None, weight_gradient(images, gradient), gradient.sum((0, 1, 2))


def _convolve(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """uint8 [B, C, H, W] -> float32 [B, outputs, ...] in channels-last format, the fastest for the next layer."""
    out = weight.new_empty(len(images), *output_size(images.shape[2:]), len(weight))
    return convolve(images, weight, bias, out).permute(0, 3, 1, 2)


def output_size(pixels: Sequence[int]) -> list[int]:
    """Returns the output size of the convolution along axes of the given numbers of pixels."""
    return [(size - KERNEL) // STRIDE + 1 for size in pixels]


def convolve(images: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, rectified: bool = False) -> Tensor:
    """Convolves uint8 [B, C, H, W], scaled to 0 ... 1, into `out`, float32 [B, out H, out W, outputs]; returns `out`.

    rectified: applies a ReLU too. weight: float32 [outputs, C, KERNEL, KERNEL].
    The native convolution must be available and support this layer.
    """
    images = images.contiguous()
    packed = weight.permute(1, 2, 3, 0).mul(1 / 255).contiguous()
    scratch = weight.new_empty(images.shape[1:].numel())
    shape = (*images.shape, len(weight), rectified)
    call("convolve", shape, images, packed, bias.contiguous(), scratch, out)
    return out


def weight_gradient(images: Tensor, gradient: Tensor) -> Tensor:
    """Returns the gradient of the weights, float32 [outputs, C, KERNEL, KERNEL].

    images: uint8 [B, C, H, W]. gradient: of the loss with respect to the outputs, float32 [B, out H, out W, outputs].
    """
    images = images.contiguous()
    num_outputs = gradient.shape[3]
    total = gradient.new_zeros(images.shape[1], KERNEL, KERNEL, num_outputs)
    scratch = gradient.new_empty(images.shape[1:].numel())
    shape = (*images.shape, num_outputs, False)
    call("convolve_weight_gradient", shape, images, gradient, scratch, total)
    return total.permute(3, 0, 1, 2).mul(1 / 255)
