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
        if config.factory:
            return make_custom(config.factory, schema, schema.num_actions)[0]
        return _make_own(config, schema)


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
            self._balance(ignored="body" if config.factory else "")

    def forward(self, observation: Tensor) -> Tensor:
        """uint8 or float32 [B, S, *F] -> float32 [B, A]; an `Encoder` also takes a dictionary of parts."""
        return self.values(self.body(observation))

    def values(self, features: Tensor) -> Tensor:
        """[B, features] -> float32 [B, A]."""
        advantage: Tensor = self.advantage(features)
        if self.value is None:
            return advantage
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(1, keepdim=True)

    @torch.no_grad()
    def _balance(self, ignored: str) -> None:
        """Changes torch's initial parameters, which are uniform within 1 / sqrt(fan in), so that fewer ReLUs stay at 0.

        The weights of each hidden unit sum to 0, because its inputs, pixels or outputs of ReLUs, are never negative:
        otherwise their mean decides the unit's sign for all states. The biases are larger (Krizhevsky et al. 2012,
        section 5). `ignored`: the name of a module of the user, which stays as it is.
        """
        for name, module in self.named_modules():
            if name.partition(".")[0] == ignored or name.endswith("output"):
                continue
            if isinstance(module, nn.Conv2d | nn.Linear):
                weights = module.weight.flatten(1)
                weights.sub_(weights.mean(1, keepdim=True))
                cast(Tensor, module.bias).add_(BALANCED_BIAS)


class VectorQNetwork(QNetwork):
    """The network for vectors: flatten, linear, ReLU, linear, ReLU, heads. Only `make_network` creates it."""


class GridQNetwork(QNetwork):
    """The network for one grid of cells: an `Encoder`, heads. Only `make_network` creates it."""


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
        self.activation: nn.Module = nn.ReLU()
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


def _make_own(config: NetworkConfig, schema: Schema) -> QNetwork:
    hidden, num_actions = hidden_units(config, schema), schema.num_actions
    if schema.has_images and not schema.parts and config.torso == "dqn":
        height, width, channels = (*schema.frame_shape, 1)[:3]
        layers, num_features = convolutions(schema.stack * channels, height, width, config.width)
        return PixelQNetwork(config, nn.Sequential(*layers), num_features, num_actions, hidden)
    body, num_features = make_body(config, schema)
    kind: type[QNetwork] = VectorQNetwork
    if isinstance(body, Encoder):
        kind = QNetwork if body.grid is None else GridQNetwork
    return kind(config, body, num_features, num_actions, hidden)


def make_body(config: NetworkConfig, schema: Schema) -> tuple[nn.Module, int]:
    """Returns layers from observations to features, and the number of features: two layers for vectors, or an encoder.

    An encoder computes the same as the layers of `PixelQNetwork`, which have hand-written gradients.
    """
    if len(schema.frame_shape) == 1 and not schema.parts:
        units = config.body_hidden
        inputs = nn.Linear(prod(schema.observation_shape), units)
        return nn.Sequential(ScaledFlatten(), inputs, nn.ReLU(), nn.Linear(units, units), nn.ReLU()), units
    grid_width = 1.0 if schema.has_images else config.width
    widths = {"width": config.width, "grid_width": grid_width}
    encoder = Encoder(schema, **widths, units=config.body_hidden, torso=config.torso)
    return encoder, encoder.num_features


def hidden_units(config: NetworkConfig, schema: Schema) -> int:
    """Returns the units in the hidden layer of each head."""
    return max(1, round(config.hidden * config.width)) if schema.has_images else config.hidden


def make_custom(path: str, schema: Schema, num_outputs: int | None) -> tuple[nn.Module, int]:
    """Returns the module of the user's factory, and its number of outputs. `num_outputs`: the wanted one; None: any.

    Raises UsageError if the network cannot be trained or its parameters cannot be sent.
    """
    custom = CustomNetwork(path, schema)
    module: nn.Module = custom.module
    custom.require(isinstance(module, nn.Module), f"returned {type(module).__name__}", "return a torch.nn.Module")
    module = custom.adapt(module)
    output = custom.check_output("module", (2, num_outputs), module)
    custom.check_parameters(module)
    return module, output.shape[1]
