"""One gradient step of R2D2 on a batch of sequences (Kapturowski et al. 2019, section 3)."""

import torch
from torch import Tensor

from apex.algorithms.gradient_step import SequenceBatch, Update, Updated
from apex.algorithms.losses import mean_loss
from apex.algorithms.optimizers import center_gradients, clip_gradients, step_where_finite
from apex.config import LearnerConfig
from apex.dqn.losses import TargetRule, describe, td_errors
from apex.r2d2.networks import RecurrentQNetwork


class R2d2Update(Update):
    """The gradient step, executed operation by operation. On CUDA, it waits for the device to find the trained steps.

    Both networks run over each sequence from its stored state. Steps before the first trained one only bring the state
    up to date with the present parameters (burn-in). Axes: B sequences, T steps, M trained steps of all sequences.
    """

    def __init__(
        self,
        config: LearnerConfig,
        online: RecurrentQNetwork,
        target: RecurrentQNetwork,
        optimizer: torch.optim.Optimizer,
        *,
        burn_in: int,
        max_share: float,
        rescaled: bool,
    ) -> None:
        """`burn_in`: steps before the first trained one of a sequence that does not begin its episode.

        max_share: eta of the priorities. rescaled: the networks output rescaled values, see `TargetRule`.
        """
        self.torch_threads = max(1, config.num_threads)
        self._rule = TargetRule(config.target, rescaled)
        self._config = config
        self._online = online
        self._target = target
        self._optimizer = optimizer
        self._burn_in = burn_in
        self._max_share = max_share
        self._parameters = [parameter for parameter in online.parameters() if parameter.requires_grad]

    def __call__(self, batch: SequenceBatch) -> Updated:  # type: ignore[override]
        """Updates the online network if loss and gradient are finite."""
        span = batch.span.long()
        rows, steps = span.nonzero(as_tuple=True)  # [M] each
        later = steps + span[rows, steps]  # step of s_{t+m}
        frames = batch.stacks[0][:, : int(later.max()) + 1]  # What follows is not needed, such as after short episodes.
        q = self._unroll(frames, batch.state, is_first=span[:, 0] > 0)
        with torch.no_grad():
            target, _ = self._target(frames, batch.state, bfloat16=self._config.bfloat16 == "on")
        goal = torch.stack([target[rows, steps], target[rows, later]])[self._rule.seen_by_target].flatten(0, 1)
        now = q[rows, steps]
        errors = td_errors(
            self._rule,
            torch.cat([now, q[rows, later].detach()]),
            goal,
            batch.action[rows, steps],
            batch.n_step_return[rows, steps],
            batch.discount[rows, steps],
            None if batch.next_mask is None else batch.next_mask[rows, steps],
        )
        loss = mean_loss(errors, batch.weights[rows], self._config.loss)
        for parameter in self._parameters:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        if self._config.centered_gradients:
            center_gradients(self._parameters)
        norm = clip_gradients(self._parameters, self._config.max_gradient_norm).detach()
        finite = torch.isfinite(loss.detach()) & torch.isfinite(norm)
        step_where_finite(finite, self._optimizer)
        sizes = errors.detach().abs()
        figures = describe(loss.detach(), now.detach(), sizes, norm)
        return Updated(mix(sizes, rows, len(span), self._max_share), finite, figures)

    def _unroll(self, frames: Tensor, state: Tensor, is_first: Tensor) -> Tensor:
        """Returns the Q-values of the online network, float32[B, T, A].

        Those of the burn-in are 0, except of sequences that begin their episode: `is_first`, bool[B]. They have none.
        """
        bfloat16, warm = self._config.bfloat16 == "on", min(self._burn_in, frames.shape[1])
        if not warm:
            values: Tensor = self._online(frames, state, bfloat16=bfloat16)[0]
            return values
        began = is_first.nonzero().flatten()
        with torch.no_grad():
            _, state = self._online(frames[:, :warm], state, bfloat16=bfloat16)
        head = state.new_zeros(*frames.shape[:1], warm, self._online.num_actions)
        if len(began):  # The state before them is exact: gradients flow through all of their steps.
            q, exact = self._online(
                frames[began, :warm], state.new_zeros(len(began), state.shape[1]), bfloat16=bfloat16
            )
            head, state = head.index_copy(0, began, q), state.index_copy(0, began, exact)
        if warm == frames.shape[1]:
            return head
        rest, _ = self._online(frames[:, warm:], state, bfloat16=bfloat16)
        return torch.cat([head, rest], 1)


def mix(td_errors: Tensor, rows: Tensor, size: int, max_share: float) -> Tensor:
    """Returns the priorities of `size` sequences, float32[size]: max_share * max + (1 - max_share) * mean.

    td_errors, rows: |TD error| and sequence of each of M trained steps. The priority of a sequence without any is 0.
    """
    zeros = td_errors.new_zeros(size)
    largest = zeros.scatter_reduce(0, rows, td_errors, "amax")
    counts = zeros.index_add(0, rows, torch.ones_like(td_errors))
    mean: Tensor = zeros.index_add(0, rows, td_errors) / counts.clamp(min=1)
    mixed: Tensor = max_share * largest + (1 - max_share) * mean
    return mixed
