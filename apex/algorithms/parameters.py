"""A network's parameters as one array: all tensors of the state dict, in its order. Parts of one can be frozen."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apex.types import Tensor
from apexreplay.errors import require


def num_parameters(module: nn.Module) -> int:
    """Returns the number of elements in all tensors of the state dict: the length of `flatten_parameters`."""
    return sum(tensor.numel() for tensor in _tensors(module))


def require_finite(module: nn.Module) -> None:
    """Raises UsageError if a tensor of the state dict has a value that is not finite: none would be sent or saved."""
    for name, tensor in module.state_dict().items():
        problem = f"{name} has values that are not finite"
        require(bool(tensor.isfinite().all()), problem, remedy="register such a buffer with persistent=False")


def describe(module: nn.Module) -> list[Tensor]:
    """Returns name and shape of each tensor of the state dict, in its order."""
    return [Tensor(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]


def flatten(module: nn.Module) -> torch.Tensor:
    """Returns all parameters as one tensor, float32[num_parameters], on the module's device."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in _tensors(module)])  # `cat` always copies.


def flatten_parameters(module: nn.Module) -> NDArray[np.float32]:
    """Returns a copy of all tensors of the state dict, each row-major, as one array, float32[num_parameters]."""
    values: NDArray[np.float32] = flatten(module).cpu().numpy()
    return values


def load_parameters(module: nn.Module, values: NDArray[np.float32]) -> None:
    """Copies `values`, as from `flatten_parameters`, into the module. Raises UsageError if the size does not match."""
    tensors = _tensors(module)
    sizes = [tensor.numel() for tensor in tensors]
    problem = f"received parameters of shape {list(values.shape)}, but this network has {sum(sizes)} parameters"
    remedy = "use the same network.* settings and the same code for network.factory on every host"
    require(values.shape == (sum(sizes),), problem, remedy=remedy)
    flat = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))  # copies a read-only array: torch would warn
    for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, share: float) -> None:
    """Moves the target network's parameters by `share` of the way to those of the network; 1: copies them.

    Buffers, such as the statistics of observations, are always copied.
    """
    if share == 1:
        target.load_state_dict(online.state_dict())
        return
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), share)
    for own, other in zip(target.buffers(), online.buffers(), strict=True):
        own.copy_(other)


def freeze(module: nn.Module, parts: str) -> int:
    """Excludes the parameters of these parts, such as "body,value.0", from training; returns how many tensors.

    Raises UsageError if a part has no parameter, or if no parameter is left to train.
    """
    parameters, frozen = dict(module.named_parameters()), 0
    for part in map(str.strip, parts.split(",")):
        own = [parameter for name, parameter in parameters.items() if f"{name}.".startswith(f"{part}.")]
        known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in parameters))
        problem = f"learner.freeze {parts!r}: the network has no parameters in {part!r}"
        require(bool(own), problem, remedy=f"use {known}, or the beginning of a tensor's name")
        frozen += sum(parameter.requires_grad for parameter in own)
        for parameter in own:
            parameter.requires_grad_(False)
    is_left = any(parameter.requires_grad for parameter in parameters.values())
    require(is_left, f"learner.freeze {parts!r}: no parameter is left to train", remedy="name fewer parts")
    return frozen


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Returns the tensors of the state dict, detached, without a copy. Raises UsageError unless all are float32."""
    state = module.state_dict()
    remedy = "convert it, keep it out of the state dict (persistent=False), or replace BatchNorm by LayerNorm"
    for name, tensor in state.items():
        problem = f"the network's tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}, but must be float32"
        require(tensor.dtype is torch.float32, problem, remedy=remedy)
    return list(state.values())
