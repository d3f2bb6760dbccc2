"""The network of SAC: a Gaussian policy whose samples tanh maps to -1 ... 1, two critics, and the temperature.

See Haarnoja et al. 2018 (arXiv 1812.05905). Axes: B batch, K numbers of an action.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log, pi
from typing import Any

import torch
from torch import Tensor, nn

from apex.config import DpgConfig, SacConfig
from apex.dpg.networks import ActorCritic, Policy, make_parts
from apex.schema import Schema

NUM_CRITICS = 2  # [section 6]
LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION = -20.0, 2.0  # bounds of log sigma, as in the authors' code


class GaussianPolicy(Policy):
    """Two hidden layers; the outputs are means and log standard deviations before tanh."""

    outputs = 2

    def forward(self, observation: Tensor) -> Tensor:
        """float32[B, S, *F] -> float32[B, 2 K]."""
        return self.last_layer(observation)


class SoftActorCritic(ActorCritic):
    """A Gaussian policy, its critics and the temperature alpha, which is learned as its logarithm.

    `policy`: float32[B, S, *F] -> float32[B, 2 K]. A target network uses only critics, encoder and normalizer.
    """

    def __init__(self, *parts: Any, temperature: float) -> None:
        """`parts`: the arguments of `ActorCritic`. `temperature`: its initial value."""
        super().__init__(*parts)
        self.log_temperature = nn.Parameter(torch.tensor(log(temperature)))

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns the actions of evaluations, tanh of the means: frame_dtype[B, S, *F] -> float32[B, K] in -1 ... 1."""
        return torch.tanh(self.distribution(self.prepare(observation))[0])

    def distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log standard deviation before tanh for prepared observations, float32[B, K] each."""
        return gaussian(self.policy(observation))

    def sample(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the actions tanh(mean + sigma * noise), float32[B, K], and their log pi(a|s), float32[B].

        `observation`: prepared. `noise`, float32[B, K]: standard normal. Gradients pass through the sample.
        """
        mean, log_deviation = self.distribution(observation)
        before_tanh = mean + log_deviation.exp() * noise
        return torch.tanh(before_tanh), log_density(before_tanh, log_deviation, noise.square())


def gaussian(output: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and log standard deviation before tanh of outputs of the policy, float32[B, K] each."""
    mean, log_deviation = output.chunk(2, 1)
    return mean, log_deviation.clamp(LEAST_LOG_DEVIATION, MOST_LOG_DEVIATION)


def log_density(before_tanh: Tensor, log_deviation: Tensor, squared_noise: Tensor | float) -> Tensor:
    """Returns log pi(a|s) of a = tanh(u), summed over the numbers of the action, float32[B] [appendix C].

    The density of u is normal. log(1 - tanh(u)^2) is computed as 2 (log 2 - u - softplus(-2 u)), which is finite where
    tanh(u) rounds to 1.
    """
    normal = -0.5 * (squared_noise + log(2 * pi)) - log_deviation
    slope = 2 * (log(2) - before_tanh - nn.functional.softplus(-2 * before_tanh))
    return (normal - slope).sum(1)


def make_network(config: DpgConfig, sac: SacConfig, factory: str, schema: Schema, *, seed: int) -> SoftActorCritic:
    """Returns the network with the layers that `dpg.*` describes, or that of `factory`."""
    parts = make_parts(replace(config, num_critics=NUM_CRITICS), factory, schema, GaussianPolicy, seed=seed)
    return SoftActorCritic(*parts, temperature=sac.initial_temperature)
