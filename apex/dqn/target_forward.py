"""Computes the target network's values, on a second thread if asked, while the caller runs the online network."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from apex.dqn.losses import TargetRule


class TargetForward:
    """The forward pass of the target network, for the observations that the target rule asks for."""

    def __init__(self, rule: TargetRule, compute: Callable[[Tensor], Tensor], *, in_background: bool) -> None:
        """`compute`: frame_dtype[N, B, S, *F] -> float32[N * B, A]. `in_background`: on a second thread."""
        self.in_background = in_background
        self._rule = rule
        self._compute = compute
        self._thread = ThreadPoolExecutor(1, "target", torch.set_num_threads, (1,)) if in_background else None

    def start(self, stacks: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the values. Without a second thread, that function computes them."""
        return partial(self._run, stacks) if self._thread is None else self._thread.submit(self._run, stacks).result

    @torch.no_grad()  # here, because a second thread does not inherit this mode
    def _run(self, stacks: Tensor) -> Tensor:
        return self._compute(stacks[self._rule.seen_by_target])
