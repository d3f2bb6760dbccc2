"""One gradient step of IQN: quantile regression towards double-Q or Munchausen targets, by autograd.

[IQN]: Dabney et al. 2018, arXiv 1806.06923. [M-IQN]: Vieillard et al. 2020, arXiv 2007.14430.
Axes: B batch, N and M fractions of predictions and targets, A actions.
"""

import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch
from apex.algorithms.losses import check_rows
from apex.algorithms.n_step import n_step_target, rescale, restore
from apex.config import LearnerConfig
from apex.dqn.autograd_update import EagerUpdate, PartResult
from apex.dqn.losses import TEMPERATURE, munchausen
from apex.iqn.networks import QuantileNetwork


class IqnUpdate(EagerUpdate):
    """The gradient step of DQN with the loss of IQN, executed operation by operation."""

    def __init__(
        self,
        config: LearnerConfig,
        online: QuantileNetwork,
        target: QuantileNetwork,
        optimizer: torch.optim.Optimizer,
        *,
        num_fractions: int,
        rescaled: bool,
    ) -> None:
        """`num_fractions`: N and M. `rescaled`: the networks output quantiles of h(return), see `rescale`."""
        super().__init__(config, online, target, optimizer)
        self._online = online
        self._target_quantiles = target.quantiles
        self._num_fractions = num_fractions
        self._rescaled = rescaled

    def _differentiate(self, index: int, batch: DeviceBatch, share: float) -> PartResult:
        """Computes the loss of the batch, and stores the gradients in the online network."""
        size, device = len(batch.action), batch.stacks.device
        check_rows(size, n_step_return=batch.n_step_return, discount=batch.discount, weights=batch.weights)
        own, others = random_fractions((2, size, self._num_fractions), device)
        with self._precision(device.type):
            goal = self._targets(batch, others)
        with self._precision(device.type):  # anew, because torch may keep weights converted without gradients
            quantiles = self._online.quantiles(batch.stacks[0], own)
        chosen = _of_action(quantiles, batch.action)
        loss = (batch.weights * quantile_huber(goal[:, None] - chosen[:, :, None], own)).mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        td_errors = (goal.mean(1) - chosen.detach().mean(1)).abs()
        return PartResult(loss.detach(), td_errors, quantiles.detach().mean(1))

    @torch.no_grad()
    def _targets(self, batch: DeviceBatch, fractions: Tensor) -> Tensor:
        """Returns samples of the target of each row, float32[B, M]."""
        state, next_state = batch.stacks
        quantiles = self._restore(self._target_quantiles(next_state, fractions))
        if self._config.target == "munchausen":
            q = self._restore(self._target_quantiles(state, fractions)).mean(1)
            bonus, bootstrap = munchausen_quantiles(q, quantiles, batch.action)
        else:
            next_q = self._online.quantiles(next_state, fractions).mean(1)
            if batch.next_mask is not None:
                next_q = next_q.masked_fill(~batch.next_mask, -torch.inf)
            bonus, bootstrap = torch.zeros_like(batch.discount), _of_action(quantiles, next_q.argmax(1))
        goal: Tensor = n_step_target((batch.n_step_return + bonus)[:, None], batch.discount[:, None], bootstrap)
        return rescale(goal) if self._rescaled else goal

    def _restore(self, quantiles: Tensor) -> Tensor:
        return restore(quantiles) if self._rescaled else quantiles


def random_fractions(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns fractions, float32[..., N]: the i-th is uniform in the i-th of N equal intervals of 0 ... 1.

    Sums over N have the same expectation as with independent fractions, but a smaller variance: the mean of N
    independent quantiles has so much noise that it hides the TD errors.
    """
    return (torch.arange(shape[-1], device=device) + torch.rand(shape, device=device)) / shape[-1]


def quantile_huber(delta: Tensor, fractions: Tensor) -> Tensor:
    """Returns the loss of each row, float32[B]: sum over N, mean over M, of |tau - (delta < 0)| * Huber(delta).

    [IQN, equations 2 and 3] with kappa = 1. delta: targets minus predictions, float32[B, N, M]. fractions: tau of the
    predictions, float32[B, N].
    """
    huber = nn.functional.huber_loss(delta, torch.zeros_like(delta), reduction="none")
    return ((fractions[:, :, None] - (delta < 0).float()).abs() * huber).mean(2).sum(1)


def munchausen_quantiles(q: Tensor, next_quantiles: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bonus of the reward, float32[B], and samples of the soft value of s_{t+m}, float32[B, M] [M-IQN].

    A sample is the sum over a of pi(a) * (z(a) - tau * log pi(a)); pi is the softmax policy of the mean quantiles.
    It is computed as the soft value of `munchausen`, the mean of the samples, plus the sum of pi(a) * (z(a) - mean(a)).

    q: Q(s_t) of the target network, float32[B, A]. next_quantiles: its z(s_{t+m}), float32[B, M, A]. action: int64[B].
    """
    next_q = next_quantiles.mean(1)
    bonus, soft_value = munchausen(q, next_q, action)
    policy = torch.softmax(next_q / TEMPERATURE, 1)[:, None]
    return bonus, soft_value[:, None] + (policy * (next_quantiles - next_q[:, None])).sum(2)


def _of_action(quantiles: Tensor, action: Tensor) -> Tensor:
    """Returns the quantiles of one action of each row: float32[B, N, A] -> float32[B, N]."""
    return quantiles[torch.arange(len(action), device=action.device), :, action]
