"""What the learner minimises: the importance-weighted n-step double-Q loss."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LossKind = Literal["squared", "huber"]


class Loss(NamedTuple):
    """One batch: what to differentiate, and the new priorities."""

    loss: Tensor  # float32[]  mean over the batch of importance weight times loss
    td_errors: Tensor  # float32[B]  |delta|, detached


def double_q_loss(
    q: Tensor,  # float32[B, A]  Q(s_t), online
    next_q: Tensor,  # float32[B, A]  Q(s_{t+m}), online: it chooses the action ...
    next_q_target: Tensor,  # float32[B, A]  ... and the target network judges it
    action: Tensor,  # int64[B]
    n_step_return: Tensor,  # float32[B]
    discount: Tensor,  # float32[B]
    importance_weights: Tensor,  # float32[B]
    *,
    kind: LossKind,
) -> Loss:
    """Loss of the TD errors delta = n_step_return + discount * Q(next) - Q(s_t, a_t), scaled by importance.

    squared is delta^2 / 2, as in the paper; huber equals it within |delta| <= 1 and is |delta| - 1/2 beyond. Only `q`
    receives a gradient.
    """
    delta = double_q_errors(q, next_q, next_q_target, action, n_step_return, discount)
    return Loss(_mean_loss(delta, importance_weights, kind), delta.detach().abs())


def double_q_errors(
    q: Tensor, next_q: Tensor, next_q_target: Tensor, action: Tensor, n_step_return: Tensor, discount: Tensor
) -> Tensor:
    """float32[B]: delta = n_step_return + discount * Q(next) - Q(s_t, a_t), of arguments as of `double_q_loss`."""
    for name, row in (("action", action), ("n_step_return", n_step_return), ("discount", discount)):
        if row.shape != q.shape[:1]:  # [B, 1] would broadcast to [B, B], and learn nonsense in silence.
            raise ValueError(_mismatch(name, row, len(q)))
    with torch.no_grad():
        next_action = next_q.argmax(1, keepdim=True)
        target = n_step_return + discount * next_q_target.gather(1, next_action).squeeze(1)
    return target - q.gather(1, action.unsqueeze(1)).squeeze(1)


def loss_and_gradients(delta: Tensor, importance_weights: Tensor, *, kind: LossKind) -> tuple[Tensor, Tensor]:
    """The loss, float32[], and its derivatives by each Q(s_t, a_t), float32[B], where autograd is not asked."""
    loss = _mean_loss(delta, importance_weights, kind)
    derivatives = delta if kind == "squared" else delta.clamp(-1.0, 1.0)
    return loss, derivatives * importance_weights / -len(delta)


def _mean_loss(delta: Tensor, importance_weights: Tensor, kind: LossKind) -> Tensor:
    if importance_weights.shape != delta.shape:
        raise ValueError(_mismatch("importance_weights", importance_weights, len(delta)))
    if kind == "squared":
        losses = 0.5 * delta.square()
    else:
        losses = nn.functional.huber_loss(delta, torch.zeros_like(delta), reduction="none")
    return (importance_weights * losses).mean()


def _mismatch(name: str, row: Tensor, num_values: int) -> str:
    return f"{name} has shape {list(row.shape)}, but there are {num_values} values"


def importance_weights(probability: NDArray[np.float64], num_transitions: int, exponent: float) -> NDArray[np.float32]:
    """(N P(i))^-exponent for each of a batch, scaled so that the largest is 1.

    P(i) is the chance of transition i among all that the replay memory holds. With R shards, each of which gives 1/R of
    every batch, that is 1/R * leaf / root of its shard, and N counts them all. Within one batch the scaling cancels N.

    An infinite probability marks a row that cannot be learned from: its weight is 0. Raises ValueError for one that is
    not positive.
    """
    if not (probability > 0).all():
        raise ValueError("probabilities must be positive: what was drawn was possible")
    usable = np.isfinite(probability)
    weights = np.zeros(len(probability), np.float32)
    if usable.any():
        raw = (num_transitions * probability[usable]) ** -exponent
        weights[usable] = raw / raw.max()
    return weights
