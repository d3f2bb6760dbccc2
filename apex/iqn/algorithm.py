"""The algorithm IQN (implicit quantile networks): Ape-X DQN that learns quantiles of the return instead of its mean."""

from typing import cast

import torch
from torch import nn

from apex.algorithms.exported import Exported
from apex.algorithms.gradient_step import Update
from apex.algorithms.graph_update import GraphUpdate
from apex.dqn.algorithm import DqnAlgorithm
from apex.iqn.exported import export
from apex.iqn.networks import QuantileNetwork, make_network
from apex.iqn.update import IqnUpdate


class IqnAlgorithm(DqnAlgorithm):
    """See `Algorithm`. The agent is that of DQN, with the mean quantiles as Q-values."""

    name = "iqn"

    def make_network(self) -> QuantileNetwork:
        """Returns a network of quantiles; called, it returns Q-values: frame_dtype[B, S, *F] -> float32[B, A]."""
        return make_network(self.config.network, self.config.iqn, self.schema, seed=self.config.seed)

    def make_exported(self, network: nn.Module) -> Exported:
        """Returns the network and its description for `apex export`; its output is the Q-values."""
        return export(self.config, self.schema, cast(QuantileNetwork, network))

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step: on a GPU a CUDA graph."""
        networks = cast(QuantileNetwork, online), cast(QuantileNetwork, target)
        rescaled, number = self.config.network.value_rescaling, self.config.iqn.num_fractions
        update = IqnUpdate(self.config.learner, *networks, optimizer, num_fractions=number, rescaled=rescaled)
        return GraphUpdate(update) if device.type == "cuda" else update
