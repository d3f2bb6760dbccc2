"""Munchausen targets (Vieillard, Pietquin and Geist 2020, Munchausen Reinforcement Learning, equation 2).

The reward grows by a share of the scaled log-probability of the played action under a softmax policy, and the next
state has the soft value of that policy. The policy is that of the target network, so that an update needs as many
forward passes as double Q-learning. Of an n-step return, only the first step gets the bonus.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURE = 0.03  # tau [appendix B.1]
SHARE = 0.9  # alpha [appendix B.1]
LOWEST_LOG = -1.0  # l_0: bound of the scaled log-probability [appendix B.1]


class Munchausen(NamedTuple):
    """The two parts of a Munchausen target."""

    bonus: Tensor  # float32[B]  alpha * max(l_0, tau * log pi(a_t | s_t)); at most 0
    next_value: Tensor  # float32[B]  sum over a of pi(a | s_{t+m}) * (Q(s_{t+m}, a) - tau * log pi(a | s_{t+m}))


def munchausen(q: Tensor, next_q: Tensor, action: Tensor) -> Munchausen:
    """Returns the parts of the targets. All actions are allowed in all states.

    q, next_q: float32[B, A], Q(s_t) and Q(s_{t+m}) of the target network. action: int64[B].
    """
    log_policy = TEMPERATURE * torch.log_softmax(q / TEMPERATURE, 1).gather(1, action.unsqueeze(1)).squeeze(1)
    # The sum over actions equals tau * log(sum of exp(Q / tau)), because tau * log pi is Q minus this value.
    return Munchausen(SHARE * log_policy.clamp(min=LOWEST_LOG), TEMPERATURE * torch.logsumexp(next_q / TEMPERATURE, 1))
