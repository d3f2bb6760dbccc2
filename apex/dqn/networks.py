"""The Q-network: from a batch of observations to one value per action.

Dueling heads (Wang et al. 2016) on the body of DQN (Mnih et al. 2015) for images, on two fully connected layers for
vectors, or the user's own module. Every layer keeps torch's default initialisation, uniform within 1 / sqrt(fan in),
which is that of DQN's own code. Axes: B batch, A actions, S stacked frames, *F one frame.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.config import NetworkConfig
from apex.config.importer import find_factory
from apex.dqn.kernels.pixel_convolution import PixelConvolution, scale
from apex.errors import ConfigError, require
from apex.types import Schema

CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride of each layer [DQN]


def make_network(config: NetworkConfig, schema: Schema, *, seed: int) -> nn.Module:
    """Returns a module: uint8 or float32 [B, S, *F] -> float32 [B, A]; equal seeds give equal parameters.

    uint8 is scaled to 0 ... 1 inside. torch's global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # Not torch.manual_seed: that would also seed every GPU.
        return _make_custom(config.factory, schema) if config.factory else _make_own(config, schema)


def num_parameters(module: nn.Module) -> int:
    """Elements of all tensors of the state dict: the length of `flatten_parameters`."""
    return sum(tensor.numel() for tensor in _tensors(module))


def flatten_parameters(module: nn.Module) -> NDArray[np.float32]:
    """Every tensor of the state dict in its order, each row-major, in one new array that the module never touches."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in _tensors(module)])  # `cat` always copies.
    values: NDArray[np.float32] = flat.cpu().numpy()
    return values


def load_parameters(module: nn.Module, values: NDArray[np.float32]) -> None:
    """The inverse of `flatten_parameters`: copies `values` into the module; raises ConfigError for another size."""
    tensors = _tensors(module)
    sizes = [tensor.numel() for tensor in tensors]
    require(
        values.shape == (sum(sizes),),
        f"parameters of shape {list(values.shape)} do not fit a network of {sum(sizes)}: "
        "use the same network.* settings, and the same code behind network.factory, on every host",
    )
    flat = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))  # torch warns of arrays it could not write to.
    for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
        tensor.copy_(part.view(tensor.shape))


def dormant_share(network: nn.Module) -> float:
    """Share of the units that the newest gradient passed by, of the hidden layer where it is greatest; else 0.

    A ReLU that no sample of the batch has made fire learns nothing from it (Sokar et al. 2023, The dormant neuron
    phenomenon in deep reinforcement learning). The gradient of its bias is then exactly 0, and otherwise hardly ever.
    """
    shares = [
        float((parameter.grad == 0).float().mean())
        for name, parameter in network.named_parameters()
        if name.endswith("bias") and not name.endswith("output.bias") and parameter.grad is not None
    ]
    return max(shares, default=0.0)


def q_values(network: nn.Module, observation: NDArray[Any], *, bfloat16: bool = False) -> NDArray[np.float32]:
    """Q of a batch, frame_dtype[B, S, *F] -> float32[B, A], to act by."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        values: NDArray[np.float32] = network(torch.from_numpy(observation)).float().numpy()
    return values


class QNetwork(nn.Module):
    """Q = V + A - mean A with dueling heads; else one head, which is Q. The body scales uint8."""

    def __init__(self, body: nn.Module, num_features: int, num_actions: int, *, hidden: int, dueling: bool) -> None:
        super().__init__()
        self.body = body
        self.advantage = Head(num_features, hidden, num_actions)
        self.value = Head(num_features, hidden, 1) if dueling else None

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 or float32 [B, S, *F] -> float32 [B, A]."""
        features = self.body(observation)
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(1, keepdim=True)


class VectorQNetwork(QNetwork):
    """As `make_network` makes it for vectors, and nobody else: flatten, linear, ReLU, linear, ReLU, and the heads."""


class PixelQNetwork(QNetwork):
    """As `make_network` makes it for bytes of images: `CONVOLUTIONS`, a ReLU after each, flatten, and the heads."""


class ScaledFlatten(nn.Flatten):
    """Flattens, and scales uint8 to 0 ... 1."""

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 or float32 [B, S, *F] -> [B, all of it]."""
        return super().forward(scale(observation))


class Head(nn.Module):
    """A hidden layer and a linear one. The linear one is float32 also under autocast.

    In bfloat16 a Q-value between 2 and 4 would be rounded to steps of 1/64, which is more than many a TD error.
    """

    def __init__(self, num_features: int, hidden: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, hidden)
        self.output = nn.Linear(hidden, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """[B, num_features] -> float32 [B, num_outputs]."""
        hidden = torch.relu(self.hidden(features))
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):  # To say so again would take a small network as long as a layer.
            output: Tensor = self.output(hidden)
            return output
        with torch.autocast(device, enabled=False):
            output = self.output(hidden.float())
        return output


def _make_own(config: NetworkConfig, schema: Schema) -> QNetwork:
    axes = len(schema.frame_shape)
    if axes == 2:
        body, num_features = _convolutional_body(config, schema)
        kind = PixelQNetwork if schema.frame_dtype == "uint8" else QNetwork
        return kind(
            body, num_features, schema.num_actions, hidden=_scaled(config.hidden, config.width), dueling=config.dueling
        )
    require(
        axes == 1,
        f"frames of shape {list(schema.frame_shape)} are neither images [height, width] nor vectors [D]: "
        "give a network of your own by network.factory",
    )
    units = config.body_hidden
    body = nn.Sequential(
        ScaledFlatten(),
        nn.Linear(prod(schema.observation_shape), units),
        nn.ReLU(),
        nn.Linear(units, units),
        nn.ReLU(),
    )
    return VectorQNetwork(body, units, schema.num_actions, hidden=config.hidden, dueling=config.dueling)


def _convolutional_body(config: NetworkConfig, schema: Schema) -> tuple[nn.Sequential, int]:
    """The layers, and how many features they give for frames of this size."""
    layers: list[nn.Module] = []
    in_channels, (height, width) = schema.stack, schema.frame_shape
    smallest = 1
    for _, kernel, stride in reversed(CONVOLUTIONS):
        smallest = (smallest - 1) * stride + kernel
    require(
        min(height, width) >= smallest,
        f"frames of {height} x {width} pixels are too small for the convolutions, which need {smallest} x {smallest}: "
        "raise environment.image_size, or give a network of your own by network.factory",
    )
    for channels, kernel, stride in CONVOLUTIONS:
        out_channels = _scaled(channels, config.width)
        convolution = nn.Conv2d if layers else PixelConvolution
        layers += [convolution(in_channels, out_channels, kernel, stride), nn.ReLU()]
        in_channels, height, width = out_channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten()), in_channels * height * width


def _scaled(units: int, width: float) -> int:
    return max(1, round(units * width))


def _make_custom(path: str, schema: Schema) -> nn.Module:
    """Calls the user's factory, and refuses what could not learn or travel."""
    factory = find_factory("network.factory", path)
    try:
        module: nn.Module = factory(schema)
    except Exception as error:
        raise ConfigError(f"network.factory {path!r} raised {type(error).__name__}: {error}") from error
    require(
        isinstance(module, nn.Module),
        f"network.factory {path!r} must return a torch.nn.Module, got {type(module).__name__}",
    )
    shape = (2, *schema.observation_shape)
    observation = torch.randint(256, shape).to(torch.uint8) if schema.frame_dtype == "uint8" else torch.rand(shape)
    asked = f"network.factory {path!r}: its module, given {schema.frame_dtype}{list(shape)},"
    expected = f"it must be finite float32[2, {schema.num_actions}]: one value per action"
    try:
        q = module(observation)
    except Exception as error:
        raise ConfigError(f"{asked} raised {type(error).__name__}: {error}") from error
    require(isinstance(q, Tensor), f"{asked} returned {type(q).__name__}; {expected}")
    require(
        q.shape == (2, schema.num_actions) and q.dtype is torch.float32,
        f"{asked} returned {str(q.dtype).removeprefix('torch.')}{list(q.shape)}; {expected}",
    )
    require(bool(q.isfinite().all()), f"{asked} returned {q.tolist()}; {expected}")
    require(q.requires_grad, f"{asked} returned what depends on no parameter that can learn")
    try:
        _tensors(module)
    except ConfigError as error:
        raise ConfigError(f"network.factory {path!r}: {error}") from error
    return module


def _tensors(module: nn.Module) -> list[Tensor]:
    """The state dict's tensors: detached, on the module's own memory; all float32, as parameters travel."""
    state = module.state_dict()
    for name, tensor in state.items():
        require(
            tensor.dtype is torch.float32,
            f"{name!r} of the network is {str(tensor.dtype).removeprefix('torch.')}, but parameters travel as float32: "
            "convert it, keep it out of the state dict (persistent=False), or use LayerNorm in the place of BatchNorm",
        )
    return list(state.values())
