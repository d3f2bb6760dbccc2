"""One gradient step on a batch that lies on the device: double Q, importance weights, clipped gradients.

A step is a function of device tensors that waits for nothing, so on CUDA it is captured as a graph. An update whose
loss or gradient is not finite is not made; on CUDA it is made and taken back, because to look would be to wait.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex.config import LearnerConfig
from apex.dqn.gradient_step import DeviceBatch, Update, Updated, UpdateFigures
from apex.dqn.losses import double_q_loss
from apex.dqn.manual_backward.update import ManualUpdate, has_manual_backward

# Threads with a part of the batch each wait for each other once an update; threads that share every operation wait
# fifty times, which costs updates where actors use the same cores. More parts were not measured.
MOST_PARTS = 2
# With less for each thread one takes the whole batch and the other computes the target network's values meanwhile.
SMALLEST_PART = 64

WARM_UP_STEPS = 3  # before the capture: libraries choose their algorithms and allocate in the first ones


class _Part(NamedTuple):
    """What came of a part of a batch; its gradients are in its network."""

    loss: Tensor  # float32[]  its part of the batch's mean, detached
    td_errors: Tensor  # float32[part]
    q: Tensor  # float32[part, A], detached


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
        num_parts: int = 1,
        judge_aside: bool = False,
    ) -> None:
        """`one_pass`: s_t and s_{t+m} go through the online network together, which is slower on a CPU.

        `num_parts` parts of the batch are differentiated on a thread each, and their gradients added: the same step,
        but for the last bits of sums. `judge_aside`, for one part: the target network computes on another thread.
        """
        self._one_pass = one_pass
        self._config = config
        self._networks = [online, *(_twin(online) for _ in range(num_parts - 1))]
        self._parameters = [list(network.parameters()) for network in self._networks]
        self._target = target
        self._optimizer = optimizer
        self._judge_aside = judge_aside
        self._others = ThreadPoolExecutor(max(1, num_parts - 1), "part", torch.set_num_threads, (1,))

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Changes the online network, if loss and gradient are finite."""
        own = self._parameters[0]
        part = self._differentiate_in_parts(batch) if len(self._networks) > 1 else self._differentiate(0, batch, 1.0)
        norm = clip_gradients(own, self._config.max_gradient_norm)
        finite = torch.isfinite(part.loss) & torch.isfinite(norm)
        if batch.stacks.device.type == "cpu":
            if finite:
                self._optimizer.step()
        else:
            step_or_undo(self._optimizer, finite)
        figures = UpdateFigures(part.loss, part.q.amax(1).mean(), part.td_errors.mean(), norm.detach())
        return Updated(part.td_errors, finite, figures)

    def _differentiate_in_parts(self, batch: DeviceBatch) -> _Part:
        num_parts = min(len(self._networks), len(batch.action))
        stacks = batch.stacks.tensor_split(num_parts, 1)
        rows = zip(*(row.tensor_split(num_parts) for row in batch[1:]), strict=True)
        parts = [DeviceBatch(pixels, *row) for pixels, row in zip(stacks, rows, strict=True)]
        shares = [len(part.action) / len(batch.action) for part in parts]
        work = list(zip(range(num_parts), parts, shares, strict=True))
        others = [self._others.submit(self._differentiate, *part) for part in work[1:]]
        done = [self._differentiate(*work[0]), *(other.result() for other in others)]
        for twins in zip(*self._parameters[:num_parts], strict=True):
            gradients = [twin.grad for twin in twins if twin.grad is not None]
            twins[0].grad = sum(gradients[1:], gradients[0]) if gradients else None
        losses, td_errors, q = zip(*done, strict=True)
        return _Part(torch.stack(losses).sum(), torch.cat(td_errors), torch.cat(q))

    def _differentiate(self, index: int, batch: DeviceBatch, share: float) -> _Part:
        """Leaves the gradients of `share` of the batch's mean loss in one of the networks."""
        judged = self._others.submit(self._judge, batch.stacks[1]) if self._judge_aside else None
        with self._precision(batch.stacks.device.type):
            q, next_q = self._online_q(self._networks[index], batch.stacks)
        next_q_target = self._judge(batch.stacks[1]) if judged is None else judged.result()
        loss, td_errors = double_q_loss(
            q.float(),
            next_q.float(),
            next_q_target.float(),
            batch.action,
            batch.n_step_return,
            batch.discount,
            batch.weights,
            kind=self._config.loss,
        )
        if share < 1.0:
            loss = loss * share
        for parameter in self._parameters[index]:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return _Part(loss.detach(), td_errors, q.detach())

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        if self._config.bfloat16 != "on":
            return nullcontext()
        # A cache of converted weights would outlive a captured graph's memory.
        return torch.autocast(device, torch.bfloat16, cache_enabled=device == "cpu")

    @torch.no_grad()
    def _judge(self, observation: Tensor) -> Tensor:
        """Q(s_{t+m}) of the target network."""
        with self._precision(observation.device.type):
            q: Tensor = self._target(observation)
        return q

    def _online_q(self, online: nn.Module, stacks: Tensor) -> tuple[Tensor, Tensor]:
        """Q(s_t), and Q(s_{t+m}), from which the loss takes no gradient."""
        if self._one_pass:
            q, next_q = online(stacks.flatten(0, 1)).chunk(2)
            return q, next_q
        q = online(stacks[0])
        with torch.no_grad():
            return q, online(stacks[1])


def _twin(network: nn.Module) -> nn.Module:
    """The same network, parameters in the same memory, whose gradients are its own."""
    twin = copy.deepcopy(network)
    for own, shared in zip(twin.parameters(), network.parameters(), strict=True):
        own.data = shared.data
    return twin


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
    """Makes the optimizer's step, and takes it back where `finite`, bool[], is False; the host never looks at it."""
    before = {id(tensor): tensor.clone() for tensor in _changed_by(optimizer)}
    optimizer.step()
    for tensor in _changed_by(optimizer):
        known = before.get(id(tensor))  # None: made by this very step, from 0
        tensor.copy_(torch.where(finite, tensor, torch.zeros_like(tensor) if known is None else known))


def _changed_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


class GraphUpdate:
    """The same step as a CUDA graph: the first few are made one by one, then one is recorded, and all others replayed.

    The current stream must always be the same one, and not the default one. Networks and optimizer must not be replaced
    after the first step.
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
    """The step for this device; on a CPU it says how many threads share an operation."""
    if device.type == "cuda":
        return GraphUpdate(EagerUpdate(config, online, target, optimizer, one_pass=True))
    threads = max(1, config.num_threads)
    small = config.batch_size < MOST_PARTS * SMALLEST_PART
    if has_manual_backward(online) and config.bfloat16 != "on" and (threads == 1 or small):
        torch.set_num_threads(1)  # More than two threads would have nothing to do.
        return ManualUpdate(config, online, target, optimizer, judge_aside=threads > 1)
    # Buffers are a state beside the parameters, of which every part would have its own.
    if not 2 <= threads <= MOST_PARTS or any(True for _ in online.buffers()):
        torch.set_num_threads(threads)
        return EagerUpdate(config, online, target, optimizer)
    torch.set_num_threads(1)
    if small:
        return EagerUpdate(config, online, target, optimizer, judge_aside=True)
    return EagerUpdate(config, online, target, optimizer, num_parts=threads)
