"""Policy and critics. The policy maps observations to actions in -1 ... 1; a critic maps both to a Q-value.

Axes: B batch, C critics, K numbers of an action, S stacked frames, *F one frame, D all numbers of an observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from apex.algorithms.custom_network import CustomNetwork, seeded
from apex.algorithms.encoders import Encoder
from apex.config import DpgConfig
from apex.schema import Schema

OUTPUT_WEIGHT = 3e-3  # largest initial weight of the policy's last layer: actions start near 0 [Lillicrap et al. 2016]
MOST_DEVIATIONS = 10.0  # Normalized numbers are clipped to -10 ... 10.
MOST_ROWS = 1e6  # rows after which the running mean gives newer rows more weight than older ones
ENCODED = 64  # outputs of the encoder of images, grids and parts
ENCODER_WIDTH = 0.5  # factor on the channels of DQN's convolutions
LEAST_DEVIATION = 1e-3  # smallest divisor, so that a constant number is not divided by a standard deviation of 0


class ActorCritic(nn.Module):
    """A policy and its critics, which share no parameters, and what prepares observations for both.

    The policy is called with prepared observations, the critics with prepared observations and actions.
    """

    def __init__(
        self, policy: nn.Module, critics: nn.Module, normalizer: Normalizer | None, encoder: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.policy = policy  # float32[B, S, *F] -> float32[B, K] in -1 ... 1
        self.critics = critics  # float32[B, S, *F], float32[B, K] -> float32[C, B]
        self.normalizer = normalizer
        self.encoder = encoder  # of images, grids and parts; trained by the critics only (SAC-AE; Yarats et al. 2021)

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns the policy's actions: frame_dtype[B, S, *F] -> float32[B, K] in -1 ... 1."""
        action: Tensor = self.policy(self.prepare(observation))
        return action

    def first_value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns the first critic's values of prepared observations and actions, float32[B]."""
        if isinstance(self.critics, Critics):
            return self.critics.first(observation, action)
        value: Tensor = self.critics(observation, action)[0]
        return value

    def trained_by_critics(self) -> list[nn.Parameter]:
        """Returns the parameters of critics and encoder."""
        return [*self.critics.parameters(), *(self.encoder.parameters() if self.encoder is not None else ())]

    def prepare(self, observation: Any) -> Tensor:
        """Returns the observation as input of policy and critics: normalized or encoded, if configured."""
        if self.encoder is not None:
            observation = self.encoder(observation)
        prepared: Tensor = observation if self.normalizer is None else self.normalizer(observation)
        return prepared


class Normalizer(nn.Module):
    """Returns (observation - mean) / deviation, clipped. Mean and variance are buffers, so actors receive them."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))  # rows so far, at most MOST_ROWS

    def forward(self, observation: Tensor) -> Tensor:
        """float32[B, S, *F] -> the same shape."""
        deviation = self.variance.sqrt().clamp(min=LEAST_DEVIATION)
        return ((observation - self.mean) / deviation).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)

    @torch.no_grad()
    def update(self, observation: Tensor, usable: Tensor, finite: Tensor) -> None:
        """Adds a batch to mean and variance (Chan et al. 1983) if `finite`, bool[], is True. Does not wait for a GPU.

        Rows where `usable`, bool[B], is False are replaced by the mean. Ignores batches whose variance overflows.
        """
        size = len(observation)
        observation = torch.where(usable.view(-1, *(1,) * self.mean.dim()), observation, self.mean)
        share = size / (self.count + size)
        gap = observation.mean(0) - self.mean
        variance = (
            self.variance * (1 - share) + observation.var(0, correction=0) * share + gap.square() * share * (1 - share)
        )
        finite = finite & torch.isfinite(gap).all() & torch.isfinite(variance).all()
        self.mean.copy_(torch.where(finite, self.mean + gap * share, self.mean))
        self.variance.copy_(torch.where(finite, variance, self.variance))
        self.count.copy_(torch.where(finite, (self.count + size).clamp(max=MOST_ROWS), self.count))


class Policy(nn.Module):
    """Two hidden layers and tanh."""

    outputs = 1  # of the last layer, per number of an action

    def __init__(self, num_inputs: int, action_size: int, config: DpgConfig) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(num_inputs, config.policy_units)
        self.hidden2 = nn.Linear(config.policy_units, config.policy_units_2)
        self.output = nn.Linear(config.policy_units_2, self.outputs * action_size)
        self.activation1 = nn.ReLU() if config.first_activation == "relu" else nn.Tanh()
        self.activation2 = nn.ReLU()
        nn.init.uniform_(self.output.weight, -OUTPUT_WEIGHT, OUTPUT_WEIGHT)
        nn.init.uniform_(self.output.bias, -OUTPUT_WEIGHT, OUTPUT_WEIGHT)

    def forward(self, observation: Tensor) -> Tensor:
        """float32[B, S, *F] -> float32[B, K]."""
        return torch.tanh(self.last_layer(observation))

    def last_layer(self, observation: Tensor) -> Tensor:
        """Returns the outputs before tanh, float32[B, outputs * K]."""
        hidden = self.activation1(self.hidden1(observation.flatten(1)))
        output: Tensor = self.output(self.activation2(self.hidden2(hidden)))
        return output


class Critics(nn.Module):
    """C critics with two hidden layers each; one batched matrix product computes a layer of all critics."""

    def __init__(self, num_inputs: int, action_size: int, config: DpgConfig) -> None:
        super().__init__()
        self.hidden1 = Layers(config.num_critics, num_inputs + action_size, config.critic_units)
        self.hidden2 = Layers(config.num_critics, config.critic_units, config.critic_units_2)
        self.output = Layers(config.num_critics, config.critic_units_2, 1)
        self._num_critics = config.num_critics
        self._activation = ACTIVATIONS[config.first_activation]

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """float32[B, S, *F] and float32[B, K] -> float32[C, B]."""
        inputs = torch.cat([observation.flatten(1), action], 1).expand(self._num_critics, -1, -1)
        hidden = self._activation(self.hidden1(inputs))
        value: Tensor = self.output(torch.relu(self.hidden2(hidden)))
        return value.squeeze(2)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """Returns what `forward` returns of the first critic, float32[B]."""
        hidden = self._activation(self.hidden1.first(torch.cat([observation.flatten(1), action], 1)))
        return self.output.first(torch.relu(self.hidden2.first(hidden))).squeeze(1)


class Layers(nn.Module):
    """C linear layers, one for each critic, with the initialization of `nn.Linear`."""

    def __init__(self, number: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        bound = num_inputs**-0.5
        self.weight = nn.Parameter(torch.empty(number, num_inputs, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(number, 1, num_outputs).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        """float32[C, B, num_inputs] -> float32[C, B, num_outputs]."""
        return torch.baddbmm(self.bias, inputs, self.weight)

    def first(self, inputs: Tensor) -> Tensor:
        """float32[B, num_inputs] -> float32[B, num_outputs] of the first layer."""
        return torch.addmm(self.bias[0], inputs, self.weight[0])


ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


def make_network(config: DpgConfig, factory: str, schema: Schema, *, seed: int) -> ActorCritic:
    """Returns the network that `dpg.*` describes, or that of `factory`. Equal seeds give equal parameters."""
    return ActorCritic(*make_parts(config, factory, schema, Policy, seed=seed))


def make_parts(
    config: DpgConfig, factory: str, schema: Schema, policy_class: type[Policy], *, seed: int
) -> tuple[nn.Module, nn.Module, Normalizer | None, nn.Module | None]:
    """Returns the arguments of `ActorCritic`. torch's global random state does not change."""
    with seeded(seed):
        normalizer = Normalizer(schema.observation_shape) if config.normalize_observations else None
        if factory:
            return *_make_custom(factory, schema, policy_class.outputs), normalizer, None
        encoder = None if schema.is_vector else _make_encoder(schema)
        inputs = prod(schema.observation_shape) if encoder is None else ENCODED
        policy, critics = policy_class(inputs, schema.action_size, config), Critics(inputs, schema.action_size, config)
        return policy, critics, normalizer, encoder


def _make_encoder(schema: Schema) -> nn.Module:
    """Returns an encoder with outputs of limited size, as in DrQ-v2 (Yarats et al. 2021), where both heads have one."""
    encoder = Encoder(schema, width=ENCODER_WIDTH, units=ENCODED)
    return nn.Sequential(encoder, nn.Linear(encoder.num_features, ENCODED), nn.LayerNorm(ENCODED), nn.Tanh())


def _make_custom(path: str, schema: Schema, outputs: int) -> tuple[nn.Module, nn.Module]:
    """Returns `policy` and `critics` of the user's module. Raises UsageError if they cannot be trained."""
    custom, size = CustomNetwork(path, schema), schema.action_size
    policy: Any = getattr(custom.module, "policy", None)
    critics: Any = getattr(custom.module, "critics", None)
    kinds = ", ".join(type(part).__name__ for part in (custom.module, policy, critics))
    custom.require(
        isinstance(policy, nn.Module) and isinstance(critics, nn.Module),
        f"module, policy and critics are {kinds}",
        "return a module whose attributes policy and critics are torch.nn.Modules",
    )
    policy, critics = custom.adapt(policy), custom.adapt(critics)
    shared = {id(parameter) for parameter in policy.parameters()} & {id(other) for other in critics.parameters()}
    custom.require(not shared, f"policy and critics share {len(shared)} parameters", "let them share none")
    output = custom.check_output("policy", (2, outputs * size), policy)
    bounded = outputs > 1 or bool((output.abs() <= 1).all())  # Several outputs describe a distribution.
    custom.require(bounded, f"policy returned {output.tolist()}", "keep it in -1 ... 1")
    custom.check_output("critics", (None, 2), critics, torch.zeros(2, size))
    custom.check_parameters(nn.ModuleList([policy, critics]))
    return policy, critics
