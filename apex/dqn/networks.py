"""The Q-network: maps a batch of observations to one value per action.

The body is that of DQN (Mnih et al. 2015) for images, two fully connected layers for vectors, and an `Encoder` for all
other observations. Dueling heads (Wang et al. 2016) follow. A custom module may replace the whole network. Axes: B
batch, A actions, S stacked frames, *F one frame, H height, W width, C channels.
"""

from math import prod
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.algorithms.custom_network import CustomNetwork, seeded
from apex.algorithms.encoders import Encoder, channels_first, convolutions
from apex.algorithms.kernels.pixel_convolution import scale
from apex.config import NetworkConfig
from apex.schema import Schema

BALANCED_BIAS = 0.1  # added to the biases of hidden layers by initialization balanced


def make_network(config: NetworkConfig, schema: Schema, *, seed: int) -> nn.Module:
    """Returns a module: uint8 or float32 [B, S, *F] -> float32 [B, A]. Equal seeds give equal parameters.

    The module scales uint8. torch's global random state does not change.
    """
    with seeded(seed):
        return _make_custom(config.factory, schema) if config.factory else _make_own(config, schema)


def q_values(network: nn.Module, observation: NDArray[Any], *, bfloat16: bool = False) -> NDArray[np.float32]:
    """Returns Q-values for acting, without gradients: frame_dtype[B, S, *F] -> float32[B, A]."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        values: NDArray[np.float32] = network(torch.from_numpy(observation)).float().numpy()
    return values


class QNetwork(nn.Module):
    """Returns Q = V + A - mean(A) with dueling heads, else the output of one head. The body scales uint8 input."""

    def __init__(
        self, config: NetworkConfig, body: nn.Module, num_features: int, num_actions: int, hidden: int
    ) -> None:
        super().__init__()
        self.body = body
        self.advantage = Head(num_features, hidden, num_actions)
        self.value = Head(num_features, hidden, 1) if config.dueling else None
        if config.initialization == "balanced":
            self._balance()

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 or float32 [B, S, *F] -> float32 [B, A]; an `Encoder` also takes a dictionary of parts."""
        return self.score(self.body(observation))

    def score(self, features: Tensor) -> Tensor:
        """Returns the output of the heads: [B, num_features] -> float32 [B, A]."""
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(1, keepdim=True)

    @torch.no_grad()
    def _balance(self) -> None:
        """Changes torch's initial parameters, which are uniform within 1 / sqrt(fan in), so that fewer ReLUs stay at 0.

        The weights of each hidden unit sum to 0, because its inputs, pixels or outputs of ReLUs, are never negative:
        otherwise their mean decides the unit's sign for all states. The biases are larger (Krizhevsky et al. 2012,
        section 5).
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and not name.endswith("output"):
                weights = module.weight.flatten(1)
                weights.sub_(weights.mean(1, keepdim=True))
                cast(Tensor, module.bias).add_(BALANCED_BIAS)


class VectorQNetwork(QNetwork):
    """The network for vectors: flatten, linear, ReLU, linear, ReLU, heads. Only `make_network` creates it."""


class PixelQNetwork(QNetwork):
    """The network for uint8 images: `convolutions`, heads. Only `make_network` creates it."""

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 [B, S, H, W] or [B, S, H, W, C] -> float32 [B, A]."""
        return super().forward(channels_first(observation))


class ScaledFlatten(nn.Flatten):
    """Flattens observations and scales uint8 to 0 ... 1."""

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 or float32 [B, S, *F] -> [B, product of S and F]."""
        return super().forward(scale(observation))


class Head(nn.Module):
    """A hidden layer with ReLU and a linear output layer in float32, even under autocast.

    bfloat16 would round Q-values between 2 and 4 to multiples of 1/64, which is more than many TD errors.
    """

    def __init__(self, num_features: int, hidden: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, hidden)
        self.activation = nn.ReLU()
        self.output = nn.Linear(hidden, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        """[B, num_features] -> float32 [B, num_outputs]."""
        hidden: Tensor = self.activation(self.hidden(features))
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):  # autocast() below takes as long as a small layer.
            output: Tensor = self.output(hidden)
            return output
        with torch.autocast(device, enabled=False):
            output = self.output(hidden.float())
        return output


def make_body(config: NetworkConfig, schema: Schema) -> tuple[type[QNetwork], nn.Module, int]:
    """Returns the class of network for these observations, its body, and the number of features of the body."""
    if len(schema.frame_shape) == 1 and not schema.parts:
        units = config.body_hidden
        inputs = nn.Linear(prod(schema.observation_shape), units)
        body = nn.Sequential(ScaledFlatten(), inputs, nn.ReLU(), nn.Linear(units, units), nn.ReLU())
        return VectorQNetwork, body, units
    if schema.parts or not schema.has_images:
        encoder = Encoder(schema, width=config.width, units=config.body_hidden)
        return QNetwork, encoder, encoder.num_features
    height, width, channels = (*schema.frame_shape, 1)[:3]
    layers, num_features = convolutions(schema.stack * channels, height, width, config.width)
    return PixelQNetwork, nn.Sequential(*layers), num_features


def head_units(config: NetworkConfig, schema: Schema) -> int:
    """Returns the number of units in the hidden layer of each head."""
    return max(1, round(config.hidden * config.width)) if schema.has_images else config.hidden


def _make_own(config: NetworkConfig, schema: Schema) -> QNetwork:
    kind, body, num_features = make_body(config, schema)
    return kind(config, body, num_features, schema.num_actions, head_units(config, schema))


def _make_custom(path: str, schema: Schema) -> nn.Module:
    """Calls the user's factory. Raises UsageError if the network cannot be trained or its parameters cannot be sent."""
    custom = CustomNetwork(path, schema)
    module: nn.Module = custom.module
    custom.require(isinstance(module, nn.Module), f"returned {type(module).__name__}", "return a torch.nn.Module")
    module = custom.adapt(module)
    custom.check_output("module", (2, schema.num_actions), module)
    custom.check_parameters(module)
    return module
