"""One gradient step on a batch that lies on the device: double Q, importance weights, clipped gradients.

A step is a function of device tensors that waits for nothing. So on CUDA it is captured as a graph, and costs one
launch instead of hundreds. An update whose loss or gradient is not finite is not made; on CUDA it is made and taken
back, because to look would be to wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from apex.config import LearnerConfig
from apex.losses import double_q_loss

WARM_UP_STEPS = 3  # before the capture: libraries choose their algorithms and allocate in the first ones


class DeviceBatch(NamedTuple):
    """A batch on the device."""

    stacks: Tensor  # frame_dtype[2, B, S, *F]: s_t, s_{t+m}
    action: Tensor  # int64[B]
    n_step_return: Tensor  # float32[B]
    discount: Tensor  # float32[B]
    weights: Tensor  # float32[B]  importance weights


class Figures(NamedTuple):
    """What one update tells, still on its device."""

    loss: Tensor
    mean_q: Tensor
    td_error: Tensor
    gradient_norm: Tensor


class Updated(NamedTuple):
    """What comes of a step, on the device. The next step of a `GraphUpdate` overwrites it."""

    td_errors: Tensor  # float32[B]  |delta|
    finite: Tensor  # bool[]  loss and gradient were; else parameters and optimizer are as they were before
    figures: Figures


class Update(Protocol):
    """One gradient step."""

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network; waits for nothing on CUDA."""


class EagerUpdate:
    """The step, operation by operation (Horgan et al. 2018, section 3.2 and algorithm 2)."""

    def __init__(
        self,
        config: LearnerConfig,
        online: nn.Module,
        target: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        one_pass: bool = False,
    ) -> None:
        """`one_pass`: s_t and s_{t+m} go through the online network together; else one after the other.

        Together they are half as many and twice as wide operations, but the backward pass runs through s_{t+m} as well,
        for gradients of zero: on a CPU a step takes 1.4 times as long.
        """
        self._one_pass = one_pass
        self._config = config
        self._online = online
        self._parameters = list(online.parameters())
        self._target = target
        self._optimizer = optimizer

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network, if loss and gradient are finite."""
        device, fast = batch.stacks.device.type, self._config.bfloat16 == "on"
        # A cache of converted weights would outlive a captured graph's memory.
        autocast = torch.autocast(device, torch.bfloat16, cache_enabled=device == "cpu") if fast else nullcontext()
        with autocast:
            q, next_q = self._online_q(batch.stacks)
            with torch.no_grad():
                next_q_target = self._target(batch.stacks[1])
        loss = double_q_loss(
            q.float(),
            next_q.float(),
            next_q_target.float(),
            batch.action,
            batch.n_step_return,
            batch.discount,
            batch.weights,
            kind=self._config.loss,
        )
        for parameter in self._parameters:
            parameter.grad = None
        loss.loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_gradients(self._parameters, self._config.max_gradient_norm)
        finite = torch.isfinite(loss.loss.detach()) & torch.isfinite(norm)
        if device == "cpu":
            if finite:
                self._optimizer.step()
        else:
            step_or_undo(self._optimizer, finite)
        figures = Figures(loss.loss.detach(), q.detach().amax(1).mean(), loss.td_errors.mean(), norm.detach())
        return Updated(loss.td_errors, finite, figures)

    def _online_q(self, stacks: Tensor) -> tuple[Tensor, Tensor]:
        """Q(s_t), and Q(s_{t+m}), from which the loss takes no gradient."""
        if self._one_pass:
            q, next_q = self._online(stacks.flatten(0, 1)).chunk(2)
            return q, next_q
        q = self._online(stacks[0])
        with torch.no_grad():
            return q, self._online(stacks[1])


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their joint norm is `max_norm` at most; returns what it was, float32[].

    What `nn.utils.clip_grad_norm_` computes, without its sorting by device and type, which takes four times as long.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def step_or_undo(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Makes the optimizer's step, and takes it back where `finite`, bool[], is False; the host never looks at it.

    What the optimizer first keeps with this very step began at 0, as all averages and counts do.
    """
    before = {id(tensor): tensor.clone() for tensor in _changed_by(optimizer)}
    optimizer.step()
    for tensor in _changed_by(optimizer):
        known = before.get(id(tensor))
        tensor.copy_(torch.where(finite, tensor, torch.zeros_like(tensor) if known is None else known))


def _changed_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


class GraphUpdate:
    """The same step as a CUDA graph: the first few are made one by one, then one is recorded, and all others replayed.

    All of it happens on the stream that is current; it must not be the default one, and always the same. Whatever the
    step reads and writes stays where it is: networks and optimizer must not be replaced after the first step.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self._num_steps = 0
        self._inputs: DeviceBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._updated: Updated | None = None

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network. The batch may be overwritten when the stream has got here."""
        if self._inputs is None:
            self._inputs = DeviceBatch(*(torch.empty_like(tensor) for tensor in batch))
        for own, given in zip(self._inputs, batch, strict=True):
            own.copy_(given, non_blocking=True)
        if self._num_steps < WARM_UP_STEPS:
            self._num_steps += 1
            return self._update(self._inputs)
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._updated = self._update(self._inputs)  # Recorded, not made.
            self._graph = graph
        self._graph.replay()
        assert self._updated is not None
        return self._updated


def place(network: nn.Module, device: torch.device) -> nn.Module:
    """Moves a network to the device, in the order of memory that its convolutions are fastest in."""
    if device.type == "cuda":
        return network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
    return network.to(device)  # Where there is no bfloat16, the order makes no difference to a CPU; with it, it costs.


def make_update(
    config: LearnerConfig,
    online: nn.Module,
    target: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Update:
    """The step for this device."""
    cuda = device.type == "cuda"
    update = EagerUpdate(config, online, target, optimizer, one_pass=cuda)
    return GraphUpdate(update) if cuda else update
