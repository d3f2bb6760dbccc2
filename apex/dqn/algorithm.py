"""The algorithm Ape-X DQN: a Q-network, epsilon-greedy actors, and double-Q or Munchausen updates."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from apex.algorithms.exploration import allowed, epsilon_greedy, epsilon_ladder
from apex.algorithms.exported import Exported
from apex.algorithms.gradient_step import Update
from apex.algorithms.interface import Decision, Mask
from apex.algorithms.optimizers import make_optimizer
from apex.config import Config
from apex.config.algorithm_choice import require_actions
from apex.dqn.autograd_update import make_update
from apex.dqn.exported import export
from apex.dqn.manual_backward.update import make_forward
from apex.dqn.networks import make_network, q_values
from apex.schema import Schema
from apex.types import Exploration
from apexreplay.item_kinds import Array


class DqnAgent:
    """Chooses actions epsilon-greedily from a Q-network; epsilon is the probability of a random action."""

    def __init__(self, network: nn.Module, *, bfloat16: bool = False) -> None:
        self.network = network.eval()  # Custom networks may have layers, such as dropout, that act only in training.
        self._bfloat16 = bfloat16
        self._forward = make_forward(network, bfloat16=bfloat16)

    def q_values(self, observation: Array) -> NDArray[np.float32]:
        """Returns the Q-values of all actions, float32[E, A]."""
        if self._forward is None or torch.get_num_threads() > 1:
            return q_values(self.network, observation, bfloat16=self._bfloat16)
        with torch.inference_mode():
            values: NDArray[np.float32] = self._forward(torch.from_numpy(observation)).numpy()
        return values

    def see(self, observation: Array) -> NDArray[np.float32]:
        """Returns the Q-values of an observation in which the agent acts; an agent with memory then remembers it."""
        return self.q_values(observation)

    def decide(
        self, observation: Array, mask: Mask, exploration: NDArray[np.float64], rng: np.random.Generator
    ) -> Decision:
        """See `Agent.decide`."""
        q = self.see(observation)
        rows = np.arange(len(q))
        action = epsilon_greedy(q, exploration, rng, mask)
        return Decision(action, allowed(q, mask).max(1), lambda action: q[rows, action])

    def state_value(self, observation: Array, mask: Mask) -> NDArray[np.float32]:
        """Returns max_a Q(s, a) over the allowed actions, float32[E]."""
        value: NDArray[np.float32] = allowed(self.q_values(observation), mask).max(1)
        return value

    def act(self, observation: Array, mask: Mask, exploration: float, rng: np.random.Generator) -> NDArray[np.int64]:
        """Returns the actions, int64[E]."""
        q = self.see(observation)
        return epsilon_greedy(q, np.full(len(q), exploration), rng, mask)


class DqnAlgorithm:
    """See `Algorithm`."""

    name = "dqn"

    def __init__(self, config: Config, schema: Schema) -> None:
        require_actions(config, schema, config.algorithm or self.name, continuous=False)
        self.config = config
        self.schema = schema

    def exploration(self, num_actors: int) -> Exploration:
        """Returns one epsilon for each actor [section 4.1]."""
        actor = self.config.actor
        return Exploration("epsilon", epsilon_ladder(num_actors, actor.epsilon_base, actor.epsilon_exponent))

    def make_network(self) -> nn.Module:
        """Returns a Q-network: frame_dtype[B, S, *F] -> float32[B, A]."""
        return make_network(self.config.network, self.schema, seed=self.config.seed)

    def make_agent(self, network: nn.Module, *, bfloat16: bool = False) -> DqnAgent:
        """See `Algorithm.make_agent`."""
        return DqnAgent(network, bfloat16=bfloat16)

    def make_exported(self, network: nn.Module) -> Exported:
        """Returns the Q-network and its description for `apex export`."""
        return export(self.config, self.schema, network)

    def make_optimizer(self, online: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer that `learner.optimizer` names."""
        return make_optimizer(self.config.learner, online.parameters())

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step."""
        rescaled = self.config.network.value_rescaling
        return make_update(self.config.learner, online, target, optimizer, device, rescaled=rescaled)
