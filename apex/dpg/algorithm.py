"""The algorithm Ape-X DPG: a deterministic policy, actors that add noise to its actions, and one or more critics."""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.algorithms.exploration import add_noise, noise_ladder
from apex.algorithms.exported import Exported
from apex.algorithms.gradient_step import Update
from apex.algorithms.graph_update import GPU_SWITCHES, GraphUpdate
from apex.algorithms.interface import Decision, Mask
from apex.algorithms.optimizers import make_optimizer
from apex.config import Config
from apex.config.algorithm_choice import require_actions
from apex.dpg.exported import export
from apex.dpg.networks import ActorCritic, make_network
from apex.dpg.update import DpgUpdate
from apex.schema import Schema
from apex.types import Exploration
from apexreplay.item_kinds import Array


class DpgAgent:
    """Chooses the policy's action plus noise of the standard deviation `exploration`; the critics give the values."""

    def __init__(self, network: ActorCritic) -> None:
        self.network = network.eval()  # Custom networks may have layers, such as dropout, that act only in training.

    @torch.inference_mode()
    def decide(
        self, observation: Array, mask: Mask, exploration: NDArray[np.float64], rng: np.random.Generator
    ) -> Decision:
        """See `Agent.decide`."""
        seen = self.network.prepare(torch.from_numpy(observation))
        output = self.network.policy(seen)

        @torch.inference_mode()
        def value(action: Array) -> NDArray[np.float32]:
            q: NDArray[np.float32] = self.network.critics(seen, torch.from_numpy(action)).mean(0).numpy()
            return q

        return Decision(self._explore(output, exploration, rng), self._value(seen, output), value)

    @torch.inference_mode()
    def state_value(self, observation: Array, mask: Mask) -> NDArray[np.float32]:
        """See `Agent.state_value`."""
        seen = self.network.prepare(torch.from_numpy(observation))
        return self._value(seen, self.network.policy(seen))

    @torch.inference_mode()
    def act(self, observation: Array, mask: Mask, exploration: float, rng: np.random.Generator) -> NDArray[np.float32]:
        """Returns the actions, float32[E, K]; `exploration`: see the class."""
        output = self.network.policy(self.network.prepare(torch.from_numpy(observation)))
        return self._explore(output, np.full(len(output), exploration), rng)

    def _explore(self, output: Tensor, amounts: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float32]:
        """Returns actions for outputs of the policy, float32[E, K]. Draws E * K numbers."""
        return add_noise(output.numpy(), amounts, rng)

    def _value(self, seen: Tensor, output: Tensor) -> NDArray[np.float32]:
        """Returns the smallest Q(s, mu(s)) of all critics, float32[E]."""
        value: NDArray[np.float32] = self.network.critics(seen, output).amin(0).numpy()
        return value


class DpgAlgorithm:
    """See `Algorithm`."""

    name = "dpg"

    def __init__(self, config: Config, schema: Schema) -> None:
        require_actions(config, schema, config.algorithm or self.name, continuous=True)
        self.config = config
        self.schema = schema

    def exploration(self, num_actors: int) -> Exploration:
        """Returns the standard deviation of each actor's noise."""
        return Exploration("noise", noise_ladder(num_actors, self.config.dpg.noise, self.config.dpg.noise_ladder))

    def make_network(self) -> ActorCritic:
        """Returns the policy and the critics."""
        config = self.config
        return make_network(config.dpg, config.network.factory, self.schema, seed=config.seed)

    def make_agent(self, network: nn.Module, *, bfloat16: bool = False) -> DpgAgent:
        """See `Algorithm.make_agent`. Ignores `bfloat16`, which is slower than float32 for such small networks."""
        return DpgAgent(cast(ActorCritic, network))

    def make_exported(self, network: nn.Module) -> Exported:
        """Returns the network and its description for `apex export`; the file also contains the critics."""
        return export(self.config, self.schema, cast(ActorCritic, network))

    def make_optimizer(self, online: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer that `learner.optimizer` names; the policy has its own learning rate."""
        network = cast(ActorCritic, online)
        share = self.config.dpg.policy_learning_rate_share
        return make_optimizer(
            self.config.learner, network.trained_by_critics(), list(network.policy.parameters()), share
        )

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step: on a GPU as CUDA graphs, see `GpuSwitches.delayed_graphs`."""
        config, period = self.config, self.config.dpg.policy_period
        update = DpgUpdate(
            config.learner,
            config.dpg,
            cast(ActorCritic, online),
            cast(ActorCritic, target),
            optimizer,
            # The modules of a custom network may not be made for two threads.
            in_background=device.type == "cpu" and config.learner.num_threads > 1 and not config.network.factory,
        )
        is_graph = device.type == "cuda" and (period == 1 or GPU_SWITCHES.delayed_graphs)
        return GraphUpdate(update, cycle=period) if is_graph else update
