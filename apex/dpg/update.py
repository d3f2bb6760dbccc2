"""One gradient step of Ape-X DPG: moves the critics towards the n-step target and the policy along dQ/da.

See Horgan et al. 2018, section 3.2 and appendix D. The optional `dpg.*` extensions are those of TD3 (Fujimoto et al.
2018).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.losses import check_rows, mean_loss
from apex.algorithms.n_step import n_step_target
from apex.algorithms.optimizers import clip_gradients, step_where_finite
from apex.config import DpgConfig, LearnerConfig
from apex.dpg.networks import ActorCritic

Result = TypeVar("Result")

SATURATED = 0.97  # Actions with a larger absolute value count as saturated: the gradient of tanh is near 0 there.


class DpgUpdate(Update):
    """The gradient step, executed operation by operation.

    The gradients of policy and critics are computed at the same parameters; both are applied, or neither is. Only every
    `policy_period`th step, beginning with the first, changes the policy. A second thread, if any, computes the target
    values and the gradient of the policy, which do not depend on the critics' gradient.
    """

    def __init__(
        self,
        learner: LearnerConfig,
        config: DpgConfig,
        online: ActorCritic,
        target: ActorCritic,
        optimizer: torch.optim.Optimizer,
        *,
        in_background: bool = False,
    ) -> None:
        """`in_background`: target values and the gradient of the policy are computed on a second thread."""
        self.torch_threads = max(1, learner.num_threads // 2 if in_background else learner.num_threads)
        threads = (self.torch_threads,)
        self._thread = ThreadPoolExecutor(1, "policy", torch.set_num_threads, threads) if in_background else None
        self._learner = learner
        self._config = config
        self._online = online
        self._target = target
        self._optimizer = optimizer
        self._policy_parameters = [parameter for parameter in online.policy.parameters() if parameter.requires_grad]
        self._critic_parameters = [parameter for parameter in online.trained_by_critics() if parameter.requires_grad]
        self._num_steps = 0
        self._policy_figures: dict[str, Tensor] = {}  # metrics of the last step that changed the policy

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if losses and gradients are finite."""
        for parameter in self._policy_parameters:
            parameter.grad = None  # The optimizer skips parameters without gradient.
        target = self._begin(partial(self._target_values, batch, self._draw_noise(batch.action)))
        observation = self._online.prepare(batch.stacks[0])
        policy = None
        if self._num_steps % self._config.policy_period == 0:
            policy = self._begin(partial(self._differentiate_policy, observation.detach(), batch.weights))
        q = self._online.critics(observation, batch.action)
        delta = target() - q
        loss, norm = self._differentiate_critics(delta, batch.weights)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if policy is not None:
            policy_loss, policy_norm = policy()
            finite &= torch.isfinite(policy_loss) & torch.isfinite(policy_norm)
        self._num_steps += 1
        step_where_finite(finite, self._optimizer)
        if self._online.normalizer is not None:
            self._online.normalizer.update(batch.stacks[0], batch.weights > 0, finite)
        td_errors = delta.detach().mean(0).abs()  # of the mean Q-value of all critics
        figures = {
            "loss": loss,
            "mean_q": q.detach().mean(),
            "td_error": td_errors.mean(),
            "gradient_norm": norm,
            **self._policy_figures,
        }
        return Updated(td_errors, finite, figures)

    def _begin(self, compute: Callable[[], Result]) -> Callable[[], Result]:
        """Returns a function that returns the result. Without a second thread, that function computes it."""
        return compute if self._thread is None else self._thread.submit(compute).result

    def _draw_noise(self, action: Tensor) -> Tensor:
        """Returns the noise of the target policy's actions, here and not on the second thread, for the same order."""
        config = self._config
        noise = torch.randn_like(action).mul_(config.target_noise) if config.target_noise else torch.zeros_like(action)
        return noise.clamp_(-config.target_noise_clip, config.target_noise_clip)

    @torch.no_grad()  # here, because a second thread does not inherit this mode
    def _target_values(self, batch: DeviceBatch, noise: Tensor) -> Tensor:
        """Returns n_step_return + discount * min_c Q-_c(s', mu-(s') + noise), float32[B]; "-": target network."""
        check_rows(len(batch.action), n_step_return=batch.n_step_return, discount=batch.discount)
        target = self._target
        observation = target.prepare(batch.stacks[1])
        action = (target.policy(observation) + noise).clamp_(-1.0, 1.0)
        bootstrap = target.critics(observation, action).amin(0)
        value: Tensor = n_step_target(batch.n_step_return, batch.discount, bootstrap)
        return value

    def _differentiate_critics(self, delta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the gradients of the critics; returns the sum of all critics' losses, and the gradient's norm."""
        loss = torch.stack([mean_loss(row, weights, self._learner.loss) for row in delta]).sum()
        return loss.detach(), differentiate(loss, self._critic_parameters, self._learner.max_gradient_norm)

    def _differentiate_policy(self, observation: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the gradients of the policy, with clipped dQ/da; returns the loss and the gradient's norm.

        The loss is -Q(s, mu(s)) of the first critic.
        """
        action = self._online.policy(observation)
        played = action.detach().requires_grad_()
        value = self._online.first_value(observation, played)
        (slope,) = torch.autograd.grad(value.sum(), played)
        if bound := self._config.action_gradient_clip:
            slope = slope.clamp(-bound, bound)
        gradient = slope * weights[:, None] / -len(weights)
        norm = differentiate(action, self._policy_parameters, self._learner.max_gradient_norm, gradient)
        loss = -(weights * value.detach()).mean()
        figures = {
            "policy_loss": loss,
            "policy_gradient_norm": norm,
            "action_saturation": (played.detach().abs() > SATURATED).float().mean(),
        }
        for name, figure in figures.items():  # In place, because the graph of a step without the policy reads them too.
            self._policy_figures.setdefault(name, torch.empty_like(figure)).copy_(figure)
        return loss, norm


def differentiate(
    outputs: Tensor, parameters: Sequence[nn.Parameter], max_norm: float, gradient: Tensor | None = None
) -> Tensor:
    """Stores the parameters' gradients, clipped by their joint norm; returns the norm before clipping, float32[].

    gradient: of the loss with respect to the outputs; None: the output is the loss. Parameters that the outputs do not
    depend on get no gradient.
    """
    if not parameters:  # all frozen
        return outputs.new_zeros(())
    gradients = torch.autograd.grad(outputs, parameters, gradient, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return clip_gradients(parameters, max_norm)
