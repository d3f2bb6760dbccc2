"""The value rescaling h (Pohlen et al. 2018, Observe and Look Further, section 3.2), for unclipped rewards.

A network that outputs h(Q) instead of Q learns from large and small returns alike. Formulas take arrays and tensors.
"""

from __future__ import annotations

from typing import Any

EPSILON = 1e-3  # makes h invertible with bounded slope; the value of R2D2 (Kapturowski et al. 2019)


def rescale(value: Any) -> Any:
    """Returns h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x for each x.

    The first term is computed as x / (sqrt(|x| + 1) + 1), which does not subtract nearly equal numbers.
    """
    return value / ((abs(value) + 1) ** 0.5 + 1) + EPSILON * value


def restore(rescaled: Any) -> Any:
    """Returns x for each h(x).

    v = sqrt(|x| + 1) - 1 is the positive root of epsilon v^2 + (1 + 2 epsilon) v = |h(x)|, and |x| = v (v + 2). It is
    computed as 2 |h| / (b + sqrt(b^2 + 4 epsilon |h|)) with b = 1 + 2 epsilon.
    """
    b = 1 + 2 * EPSILON
    factor = 2 / (b + (b * b + 4 * EPSILON * abs(rescaled)) ** 0.5)
    return rescaled * factor * (abs(rescaled) * factor + 2)
