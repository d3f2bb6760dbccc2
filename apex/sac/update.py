"""One gradient step of SAC: critics, policy and temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

import torch
from torch import Tensor

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.losses import check_rows, mean_loss
from apex.algorithms.n_step import n_step_target
from apex.algorithms.optimizers import step_where_finite
from apex.config import LearnerConfig, SacConfig
from apex.dpg.update import SATURATED, differentiate
from apex.sac.networks import SoftActorCritic


class SacUpdate(Update):
    """The gradient step, executed operation by operation.

    All gradients are computed at the same parameters; all are applied, or none is. "-" marks the target network.
    """

    def __init__(
        self,
        learner: LearnerConfig,
        config: SacConfig,
        online: SoftActorCritic,
        target: SoftActorCritic,
        optimizer: torch.optim.Optimizer,
        *,
        action_size: int,
    ) -> None:
        """`action_size`: K, of which the target entropy is a multiple."""
        self.torch_threads = max(1, learner.num_threads)
        self._learner = learner
        self._target_entropy = -config.target_entropy_scale * action_size
        self._online = online
        self._target = target
        self._optimizer = optimizer
        self._policy_parameters = [parameter for parameter in online.policy.parameters() if parameter.requires_grad]
        self._critic_parameters = [parameter for parameter in online.trained_by_critics() if parameter.requires_grad]

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if losses and gradients are finite."""
        size, most = len(batch.action), self._learner.max_gradient_norm
        check_rows(size, n_step_return=batch.n_step_return, discount=batch.discount, weights=batch.weights)
        noise, next_noise = torch.randn_like(batch.action), torch.randn_like(batch.action)
        temperature = self._online.log_temperature.detach().exp()
        observation = self._online.prepare(batch.stacks[0])
        q = self._online.critics(observation, batch.action)
        delta = self._target_values(batch, next_noise, temperature) - q
        loss = torch.stack([mean_loss(row, batch.weights, self._learner.loss) for row in delta]).sum()
        norm = differentiate(loss, self._critic_parameters, most)
        policy_loss, action, log_pi = self._policy_loss(observation.detach(), noise, batch.weights, temperature)
        policy_norm = differentiate(policy_loss, self._policy_parameters, most)
        if self._online.log_temperature.requires_grad:
            self._online.log_temperature.grad = self._temperature_gradient(log_pi, batch.weights, temperature)
        finite = torch.isfinite(torch.stack([loss, norm, policy_loss, policy_norm]).detach()).all()
        step_where_finite(finite, self._optimizer)
        if self._online.normalizer is not None:
            self._online.normalizer.update(batch.stacks[0], batch.weights > 0, finite)
        td_errors = delta.detach().mean(0).abs()  # of the mean Q-value of both critics
        figures = {
            "loss": loss.detach(),
            "mean_q": q.detach().mean(),
            "td_error": td_errors.mean(),
            "gradient_norm": norm,
            "policy_loss": policy_loss.detach(),
            "policy_gradient_norm": policy_norm,
            "action_saturation": (action.abs() > SATURATED).float().mean(),
            "temperature": temperature,
            "entropy": -log_pi.mean(),
        }
        return Updated(td_errors, finite, figures)

    @torch.no_grad()
    def _target_values(self, batch: DeviceBatch, noise: Tensor, temperature: Tensor) -> Tensor:
        """Returns n_step_return + discount * (min_c Q-_c(s', a') - alpha log pi(a'|s')), float32[B] [eq. 3 and 5].

        The online policy draws a'. With n > 1, the entropies of the states between s and s' are left out.
        """
        action, log_pi = self._online.sample(self._online.prepare(batch.stacks[1]), noise)
        q = self._target.critics(self._target.prepare(batch.stacks[1]), action).amin(0)
        value: Tensor = n_step_target(batch.n_step_return, batch.discount, q - temperature * log_pi)
        return value

    def _policy_loss(
        self, observation: Tensor, noise: Tensor, weights: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weighted mean of alpha log pi(a|s) - min_c Q_c(s, a) [eq. 9], and without gradient a and log pi.

        The gradient of the loss passes through the sampled action a.
        """
        action, log_pi = self._online.sample(observation, noise)
        value = self._online.critics(observation, action).amin(0)
        return (weights * (temperature * log_pi - value)).mean(), action.detach(), log_pi.detach()

    def _temperature_gradient(self, log_pi: Tensor, weights: Tensor, temperature: Tensor) -> Tensor:
        """Returns the derivative of -alpha * (log pi + target entropy) [eq. 18], by log alpha, float32[]."""
        return -temperature * (weights * (log_pi + self._target_entropy)).mean()
