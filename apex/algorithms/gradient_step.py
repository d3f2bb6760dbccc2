"""The input and the result of a gradient step."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class DeviceBatch(NamedTuple):
    """A batch of transitions on the device."""

    stacks: Tensor  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    action: Tensor  # int64[B] or float32[B, K]
    n_step_return: Tensor  # float32[B]
    discount: Tensor  # float32[B]
    weights: Tensor  # float32[B]  importance weights
    next_mask: Tensor | None = None  # bool[B, A]  actions allowed in s_{t+m}; None: the environment has no masks

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not None, in order: `DeviceBatch(*batch.tensors)` equals the batch."""
        return [tensor for tensor in self if tensor is not None]


class SequenceBatch(NamedTuple):
    """A batch of sequences of L steps on the device, for recurrent algorithms; see `apex.schema.sequences`."""

    stacks: Tensor  # frame_dtype[1, B, L, *F]
    action: Tensor  # int64[B, L]
    n_step_return: Tensor  # float32[B, L]
    discount: Tensor  # float32[B, L]
    weights: Tensor  # float32[B]  importance weights
    span: Tensor  # uint8[B, L]  m; 0: the step is not trained
    state: Tensor  # float32[B, D]  state of the agent before the first step
    next_mask: Tensor | None = None  # bool[B, L, A]  actions allowed in s_{t+m}; None: the environment has no masks


class Updated(NamedTuple):
    """The result of a step, on the device. The next step of a `GraphUpdate` overwrites these tensors."""

    td_errors: Tensor  # float32[B]  |delta|
    finite: Tensor  # bool[]  whether loss and gradient were finite; if not, parameters and optimizer did not change
    figures: Mapping[str, Tensor]  # metrics, each []: loss, mean_q, td_error, gradient_norm and others of the algorithm


class Update(Protocol):
    """One gradient step. `ready` is optional in an algorithm of your own; without it, the step is always ready."""

    torch_threads: int  # threads of one torch operation (torch.set_num_threads) in the process that runs this step
    ready: bool = True  # whether the online network may be published, saved and examined

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network. On CUDA, returns without waiting for the GPU, if that is possible.

        A recurrent algorithm gets a `SequenceBatch`.
        """
