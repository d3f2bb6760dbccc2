"""The algorithm SAC (soft actor-critic): a policy that is rewarded for its entropy, and that explores by itself."""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from apex.algorithms.exploration import noise_ladder
from apex.algorithms.exported import Exported
from apex.algorithms.gradient_step import Update
from apex.algorithms.graph_update import GraphUpdate
from apex.algorithms.optimizers import make_optimizer
from apex.dpg.algorithm import DpgAgent, DpgAlgorithm
from apex.dpg.exported import export
from apex.sac.networks import SoftActorCritic, gaussian, log_density, make_network
from apex.sac.update import SacUpdate
from apex.types import Exploration


class SacAgent(DpgAgent):
    """Samples the policy. `exploration` is a factor on its standard deviation; 0: tanh of the mean."""

    network: SoftActorCritic

    def _explore(self, output: Tensor, amounts: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float32]:
        """Returns tanh(mean + amount * sigma * noise), float32[E, K]. Draws E * K numbers."""
        mean, log_deviation = gaussian(output)
        factor = amounts[:, None].astype(np.float32)
        noise = torch.from_numpy(factor * rng.standard_normal(mean.shape, np.float32))
        action: NDArray[np.float32] = torch.tanh(mean + log_deviation.exp() * noise).numpy()
        return action

    def _value(self, seen: Tensor, output: Tensor) -> NDArray[np.float32]:
        """Returns min_c Q_c(s, a) + alpha * entropy, float32[E], where a = tanh(mean).

        The entropy is exact before tanh; the change by tanh is that at the mean. No random numbers are drawn, so the
        value is an approximation of the learner's, which samples. It only determines the first priorities.
        """
        mean, log_deviation = gaussian(output)
        entropy = -log_density(mean, log_deviation, 1.0)  # The mean of squared standard normal noise is 1.
        q = self.network.critics(seen, torch.tanh(mean)).amin(0)
        value: NDArray[np.float32] = (q + self.network.log_temperature.exp() * entropy).numpy()
        return value


class SacAlgorithm(DpgAlgorithm):
    """See `Algorithm`."""

    name = "sac"

    def exploration(self, num_actors: int) -> Exploration:
        """Returns the factor of each actor on the policy's standard deviation."""
        return Exploration("noise", noise_ladder(num_actors, self.config.sac.noise, self.config.sac.noise_ladder))

    def make_network(self) -> SoftActorCritic:
        """Returns the policy, the critics and the temperature."""
        config = self.config
        return make_network(config.dpg, config.sac, config.network.factory, self.schema, seed=config.seed)

    def make_agent(self, network: nn.Module, *, bfloat16: bool = False) -> SacAgent:
        """See `Algorithm.make_agent`. Ignores `bfloat16`, which is slower than float32 for such small networks."""
        return SacAgent(cast(SoftActorCritic, network))

    def make_exported(self, network: nn.Module) -> Exported:
        """Returns the network and its description for `apex export`; its action is tanh of the mean."""
        return export(self.config, self.schema, cast(SoftActorCritic, network), gaussian=True)

    def make_optimizer(self, online: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer that `learner.optimizer` names; the policy has its own learning rate."""
        network, share = cast(SoftActorCritic, online), self.config.dpg.policy_learning_rate_share
        others = [*network.trained_by_critics(), network.log_temperature]
        return make_optimizer(self.config.learner, others, list(network.policy.parameters()), share)

    def make_update(
        self, online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Update:
        """Returns the gradient step: on a GPU a CUDA graph."""
        networks = cast(SoftActorCritic, online), cast(SoftActorCritic, target)
        size = self.schema.action_size
        update = SacUpdate(self.config.learner, self.config.sac, *networks, optimizer, action_size=size)
        return GraphUpdate(update) if device.type == "cuda" else update
