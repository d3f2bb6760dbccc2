"""The algorithm R2D2: a recurrent Q-network that learns from sequences; actors, targets and heads are those of DQN."""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apex.algorithms.exported import Exported
from apex.algorithms.gradient_step import Update
from apex.dqn.algorithm import DqnAgent, DqnAlgorithm
from apex.r2d2.exported import export
from apex.r2d2.networks import RecurrentQNetwork, make_network
from apex.r2d2.update import R2d2Update
from apexreplay.item_kinds import Array


class R2d2Agent(DqnAgent):
    """Chooses actions epsilon-greedily from a recurrent Q-network; see also `RecurrentAgent`."""

    def __init__(self, network: RecurrentQNetwork, *, bfloat16: bool = False) -> None:
        super().__init__(network, bfloat16=bfloat16)
        self.state: NDArray[np.float32] | None = None

    def forget(self, ended: NDArray[np.bool_] | None = None) -> None:
        """See `RecurrentAgent.forget`."""
        if ended is None:
            self.state = None
        elif self.state is not None:
            self.state = np.where(ended[:, None], np.float32(0), self.state)

    def q_values(self, observation: Array) -> NDArray[np.float32]:
        """Returns the Q-values of all actions in the state after this observation, float32[E, A]; keeps the state."""
        return self._look(observation)[0]

    def see(self, observation: Array) -> NDArray[np.float32]:
        """See `DqnAgent.see`."""
        q, self.state = self._look(observation)
        return q

    @torch.inference_mode()
    def _look(self, observation: Array) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the Q-values after the next observation of each environment, and the state after it."""
        state = None if self.state is None else torch.from_numpy(self.state)
        q, after = self.network(torch.from_numpy(observation), state, bfloat16=self._bfloat16)
        return q[:, -1].numpy(), after.numpy()


class R2d2Algorithm(DqnAlgorithm):
    """See `Algorithm`."""

    name = "r2d2"

    def make_network(self) -> RecurrentQNetwork:
        """Returns a recurrent Q-network: frame_dtype[B, T, *F], float32[B, D] -> float32[B, T, A], float32[B, D]."""
        return make_network(self.config.network, self.schema, seed=self.config.seed)

    def make_agent(self, network: nn.Module, *, bfloat16: bool = False) -> R2d2Agent:
        """See `Algorithm.make_agent`."""
        return R2d2Agent(cast(RecurrentQNetwork, network), bfloat16=bfloat16)

    def make_exported(self, network: nn.Module) -> Exported:
        """Returns the Q-network and its description for `apex export`."""
        return export(self.config, self.schema, cast(RecurrentQNetwork, network))

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step."""
        return R2d2Update(
            self.config.learner,
            cast(RecurrentQNetwork, online),
            cast(RecurrentQNetwork, target),
            optimizer,
            burn_in=self.config.r2d2.burn_in,
            max_share=self.config.r2d2.priority_max_share,
            rescaled=self.config.network.value_rescaling,
        )
