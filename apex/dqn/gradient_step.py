"""What goes into a gradient step, and what comes of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class DeviceBatch(NamedTuple):
    """A batch on the device."""

    stacks: Tensor  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    action: Tensor  # int64[B]
    n_step_return: Tensor  # float32[B]
    discount: Tensor  # float32[B]
    weights: Tensor  # float32[B]  importance weights


class UpdateFigures(NamedTuple):
    """What one update tells, still on its device."""

    loss: Tensor
    mean_q: Tensor
    td_error: Tensor
    gradient_norm: Tensor


class Updated(NamedTuple):
    """What comes of a step, on the device. The next step of a `GraphUpdate` overwrites it."""

    td_errors: Tensor  # float32[B]  |delta|
    finite: Tensor  # bool[]  loss and gradient were; else parameters and optimizer are as they were before
    figures: UpdateFigures


class Update(Protocol):
    """One gradient step."""

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network; waits for nothing on CUDA."""
