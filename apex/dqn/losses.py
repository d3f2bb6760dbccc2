"""The learner's loss: importance-weighted, n-step, double Q-learning."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from apex.algorithms.losses import LossKind, check_rows, mean_loss
from apex.algorithms.n_step import n_step_target


class Loss(NamedTuple):
    """The loss of one batch, and the TD errors, which become the new priorities of its transitions."""

    loss: Tensor  # float32[]  mean over the batch of importance weight times loss; to be differentiated
    td_errors: Tensor  # float32[B]  |delta|, detached


def double_q_loss(
    q: Tensor,  # float32[B, A]  Q(s_t), online
    next_q: Tensor,  # float32[B, A]  Q(s_{t+m}) of the online network, which chooses the action
    next_q_target: Tensor,  # float32[B, A]  Q(s_{t+m}) of the target network, which gives its value
    action: Tensor,  # int64[B]
    n_step_return: Tensor,  # float32[B]
    discount: Tensor,  # float32[B]
    importance_weights: Tensor,  # float32[B]
    next_mask: Tensor | None = None,  # bool[B, A]  actions allowed in s_{t+m}; None: all
    *,
    kind: LossKind,
) -> Loss:
    """Returns the importance-weighted loss of delta = n_step_return + discount * Q(next) - Q(s_t, a_t).

    Q(next) is the target network's value of the online network's greedy action. kind "squared": delta^2 / 2, as in the
    paper. "huber": the same for |delta| <= 1, and |delta| - 1/2 beyond. Only `q` receives a gradient.
    """
    delta = double_q_errors(q, next_q, next_q_target, action, n_step_return, discount, next_mask)
    return Loss(mean_loss(delta, importance_weights, kind), delta.detach().abs())


def double_q_errors(
    q: Tensor,
    next_q: Tensor,
    next_q_target: Tensor,
    action: Tensor,
    n_step_return: Tensor,
    discount: Tensor,
    next_mask: Tensor | None = None,
) -> Tensor:
    """Returns delta = n_step_return + discount * Q(next) - Q(s_t, a_t), float32[B]; arguments as in `double_q_loss`."""
    check_rows(len(q), action=action, n_step_return=n_step_return, discount=discount)
    with torch.no_grad():
        if next_mask is not None:
            next_q = next_q.masked_fill(~next_mask, -torch.inf)
        next_action = next_q.argmax(1, keepdim=True)
        target: Tensor = n_step_target(n_step_return, discount, next_q_target.gather(1, next_action).squeeze(1))
    return target - q.gather(1, action.unsqueeze(1)).squeeze(1)


def loss_and_gradients(delta: Tensor, importance_weights: Tensor, *, kind: LossKind) -> tuple[Tensor, Tensor]:
    """Returns the loss, float32[], and its derivatives with respect to Q(s_t, a_t), float32[B], without autograd."""
    loss = mean_loss(delta, importance_weights, kind)
    derivatives = delta if kind == "squared" else delta.clamp(-1.0, 1.0)
    return loss, derivatives * importance_weights / -len(delta)


def describe(loss: Tensor, q: Tensor, td_errors: Tensor, gradient_norm: Tensor) -> dict[str, Tensor]:
    """Returns the metrics of one update, each a scalar tensor; `q`: float32[B, A]."""
    return {"loss": loss, "mean_q": q.amax(1).mean(), "td_error": td_errors.mean(), "gradient_norm": gradient_norm}
