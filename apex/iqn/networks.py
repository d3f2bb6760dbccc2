"""The network of IQN: quantiles of the return for given fractions (Dabney et al. 2018, arXiv 1806.06923).

Axes: B batch, N fractions, A actions, S stacked frames, *F one frame.
"""

from collections.abc import Mapping
from math import pi

import torch
from torch import Tensor, nn

from apex.algorithms.custom_network import seeded
from apex.config import IqnConfig, NetworkConfig
from apex.dqn.networks import Head, QNetwork, hidden_units, make_body, make_custom
from apex.schema import Schema

COSINES = 64  # n of equation 4


class QuantileNetwork(QNetwork):
    """Dueling heads, or one, of features that are multiplied by an embedding of the fraction.

    Its output, the Q-values, are the means of quantiles at fixed fractions, so that equal observations give equal
    values and no random numbers are drawn.
    """

    fractions: Tensor  # float32[1, K]  midpoints of K equal intervals of 0 ... 1
    frequencies: Tensor  # float32[COSINES]

    def __init__(self, config: NetworkConfig, iqn: IqnConfig, schema: Schema) -> None:
        body, size = make_custom(config.factory, schema, None) if config.factory else make_body(config, schema)
        super().__init__(config, body, size, schema.num_actions, hidden_units(config, schema))
        self.embedding = nn.Sequential(nn.Linear(COSINES, size), nn.ReLU())
        for head in self.children() if iqn.layer_norm else ():
            if isinstance(head, Head):
                head.activation = nn.Sequential(nn.LayerNorm(head.hidden.out_features), nn.ReLU())
        num = iqn.num_policy_fractions
        self.register_buffer("fractions", ((torch.arange(num) + 0.5) / num)[None], persistent=False)
        self.register_buffer("frequencies", pi * torch.arange(COSINES), persistent=False)

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        """frame_dtype[B, S, *F], or its parts -> Q-values, float32[B, A]."""
        return self.quantiles(observation, self.fractions).mean(1)

    def quantiles(self, observation: Tensor | Mapping[str, Tensor], fractions: Tensor) -> Tensor:
        """Returns the returns at the fractions, float32[B, N] or [1, N], as float32[B, N, A] [equation 4]."""
        each = -1, fractions.shape[1]  # `DormantUnits` expects layers to return [rows, units].
        embedding = self.embedding(torch.cos(fractions.flatten()[:, None] * self.frequencies))
        features = self.body(observation)[:, None] * torch.unflatten(embedding, 0, each)
        return torch.unflatten(self.values(features.flatten(0, 1)), 0, each)


def make_network(config: NetworkConfig, iqn: IqnConfig, schema: Schema, *, seed: int) -> QuantileNetwork:
    """Returns the network that `network.*` describes; the body may be a custom network with any number of features.

    Equal seeds give equal parameters.
    """
    with seeded(seed):
        return QuantileNetwork(config, iqn, schema)
