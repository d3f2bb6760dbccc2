"""The loss of TD errors, and the importance weights that correct for prioritized sampling."""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

LossKind = Literal["squared", "huber"]


def mean_loss(delta: Tensor, importance_weights: Tensor, kind: LossKind) -> Tensor:
    """Returns the mean of importance weight times loss, float32[].

    The squared loss is delta^2 / 2; the huber loss equals it up to |delta| = 1 and is |delta| - 1/2 beyond.
    """
    check_rows(len(delta), importance_weights=importance_weights)
    if kind == "squared":
        losses = 0.5 * delta.square()
    else:
        losses = nn.functional.huber_loss(delta, torch.zeros_like(delta), reduction="none")
    return (importance_weights * losses).mean()


def check_rows(size: int, **rows: Tensor) -> None:
    """Raises ValueError unless each tensor has shape [size]; shape [B, 1] would silently broadcast to [B, B]."""
    for name, row in rows.items():
        if row.shape != (size,):
            raise ValueError(f"{name} has shape {list(row.shape)}, expected [{size}]")


def importance_weights(probability: NDArray[np.float64], num_transitions: int, exponent: float) -> NDArray[np.float32]:
    """Returns (N * P(i))^-exponent for each row of a batch, scaled so that the largest weight is 1.

    P(i) is the probability of drawing transition i from the whole replay memory of N transitions. The scaling cancels N
    within one batch.

    An infinite probability marks an unusable row, which gets weight 0. Raises ValueError for a probability that is not
    positive.
    """
    if not (probability > 0).all():
        raise ValueError("the probability of a drawn transition must be positive")
    usable = np.isfinite(probability)
    weights = np.zeros(len(probability), np.float32)
    if usable.any():
        raw = (num_transitions * probability[usable]) ** -exponent
        weights[usable] = raw / raw.max()
    return weights
