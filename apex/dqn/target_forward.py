"""The forward pass of the target network, which can run on a second thread beside the online network."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from apex.dqn.losses import TargetRule


class TargetForward:
    """Computes the target network's values of the observations that the target rule needs."""

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
