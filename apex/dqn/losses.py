"""The learner's loss: importance-weighted n-step TD errors, with double Q-learning or Munchausen targets."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from apex.algorithms.losses import LossKind, check_rows, mean_loss
from apex.algorithms.n_step import n_step_target, rescale, restore

TargetKind = Literal["double_q", "munchausen"]

# Of Munchausen targets (Vieillard, Pietquin and Geist 2020, Munchausen Reinforcement Learning, appendix B.1).
TEMPERATURE = 0.03  # tau
SHARE = 0.9  # alpha
LOWEST_LOG = -1.0  # l_0: bound of the scaled log-probability


class TargetRule(NamedTuple):
    """How the target of an update follows from the Q-values of both networks.

    double_q: R + discount * Q(s_{t+m}, a) of the target network, for the online network's greedy action a.
    munchausen: see `munchausen`. rescaled: the networks output h(Q), see `rescale`.
    """

    kind: TargetKind = "double_q"
    rescaled: bool = False

    @property
    def seen_online(self) -> slice:
        """The observations, of s_t and s_{t+m}, that the online network evaluates."""
        return slice(0, 2) if self.kind == "double_q" else slice(0, 1)

    @property
    def seen_by_target(self) -> slice:
        """The observations, of s_t and s_{t+m}, that the target network evaluates."""
        return slice(1, 2) if self.kind == "double_q" else slice(0, 2)


def td_errors(
    rule: TargetRule,
    online: Tensor,  # float32[N * B, A]  output of the online network for `rule.seen_online`
    target: Tensor,  # float32[N * B, A]  output of the target network for `rule.seen_by_target`
    action: Tensor,  # int64[B]
    n_step_return: Tensor,  # float32[B]
    discount: Tensor,  # float32[B]
    next_mask: Tensor | None = None,  # bool[B, A]  actions allowed in s_{t+m}; None: all
) -> Tensor:
    """Returns delta = target - Q(s_t, a_t), float32[B]. Only Q(s_t) of the online network receives a gradient."""
    size = len(action)
    q = online[:size]
    check_rows(len(target[:size]), action=action, n_step_return=n_step_return, discount=discount)
    with torch.no_grad():
        values = restore(target) if rule.rescaled else target
        if rule.kind == "munchausen":
            bonus, next_value = munchausen(values[:size], values[size:], action)
            goal: Tensor = n_step_target(n_step_return + bonus, discount, next_value)
        else:
            next_q = online[size:] if next_mask is None else online[size:].masked_fill(~next_mask, -torch.inf)
            next_action = next_q.argmax(1, keepdim=True)
            goal = n_step_target(n_step_return, discount, values.gather(1, next_action).squeeze(1))
        goal = rescale(goal) if rule.rescaled else goal
    return goal - q.gather(1, action.unsqueeze(1)).squeeze(1)


def munchausen(q: Tensor, next_q: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two parts of a Munchausen target (equation 2), float32[B] each. All actions are allowed.

    The bonus of the reward, alpha * max(l_0, tau * log pi(a_t | s_t)), is at most 0. The value of the next state is
    the sum over a of pi(a | s_{t+m}) * (Q(s_{t+m}, a) - tau * log pi(a | s_{t+m})). pi is the softmax policy of the
    target network, so that an update needs as many forward passes as double Q-learning. Of an n-step return, only the
    first step gets the bonus.

    q, next_q: float32[B, A], Q(s_t) and Q(s_{t+m}) of the target network. action: int64[B].
    """
    log_policy = TEMPERATURE * torch.log_softmax(q / TEMPERATURE, 1).gather(1, action.unsqueeze(1)).squeeze(1)
    # The sum over actions equals tau * log(sum of exp(Q / tau)), because tau * log pi is Q minus this value.
    return SHARE * log_policy.clamp(min=LOWEST_LOG), TEMPERATURE * torch.logsumexp(next_q / TEMPERATURE, 1)


def loss_and_gradients(delta: Tensor, importance_weights: Tensor, *, kind: LossKind) -> tuple[Tensor, Tensor]:
    """Returns the loss, float32[], and its derivatives with respect to Q(s_t, a_t), float32[B], without autograd."""
    loss = mean_loss(delta, importance_weights, kind)
    derivatives = delta if kind == "squared" else delta.clamp(-1.0, 1.0)
    return loss, derivatives * importance_weights / -len(delta)


def describe(loss: Tensor, q: Tensor, td_errors: Tensor, gradient_norm: Tensor) -> dict[str, Tensor]:
    """Returns the metrics of one update, each a scalar tensor; `q`: float32[B, A]."""
    return {"loss": loss, "mean_q": q.amax(1).mean(), "td_error": td_errors.mean(), "gradient_norm": gradient_norm}
