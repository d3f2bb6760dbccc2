"""One gradient step on a batch in device memory: Q-learning with importance weights and clipped gradients.

A step never waits for the device, so CUDA can capture it as a graph. If loss or gradient is not finite, the parameters
do not change: a CPU skips the optimizer's step, and CUDA undoes it, because its host does not wait for the check.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.graph_update import GPU_SWITCHES, GpuSwitches, GraphUpdate
from apex.algorithms.losses import mean_loss
from apex.algorithms.optimizers import center_gradients, clip_gradients, step_where_finite
from apex.config import LearnerConfig
from apex.dqn.losses import TargetRule, describe, td_errors
from apex.dqn.manual_backward.update import ManualUpdate, has_manual_backward
from apex.dqn.target_forward import TargetForward

# If each thread processes its own part of the batch, the threads synchronize once per update. If all threads share each
# operation, they synchronize about 50 times, which takes more than twice as long when actors use the same cores. With
# only the target network on the second thread, updates take 1.5 times as long (the paper's network, batches of 512).
# More than two parts have not been measured.
MOST_PARTS = 2
# Minimum rows per part. With smaller batches, one thread processes the whole batch while another one computes the
# values of the target network.
SMALLEST_PART = 64


class PartResult(NamedTuple):
    """The result for one part of a batch. The gradients are stored in the network that processed the part."""

    loss: Tensor  # float32[]  contribution of this part to the mean loss of the batch, detached
    td_errors: Tensor  # float32[part]
    q: Tensor  # float32[part, A], detached


class EagerUpdate(Update):
    """The gradient step, executed operation by operation (Horgan et al. 2018, section 3.2 and algorithm 2)."""

    def __init__(
        self,
        config: LearnerConfig,
        online: nn.Module,
        target: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rescaled: bool = False,
        one_pass: bool = False,
        num_parts: int = 1,
        target_in_background: bool = False,
    ) -> None:
        """Prepares the step.

        rescaled: the networks output rescaled values, see `TargetRule`.
        one_pass: s_t and s_{t+m} pass through the online network together, which is slower on a CPU.
        num_parts: number of parts of the batch. Each part runs on its own thread; their gradients are added. The result
            differs from that of one part only by rounding.
        target_in_background: the target network runs on a second thread; only with `num_parts` 1.
        """
        self._rule = TargetRule(config.target, rescaled)
        self._one_pass = one_pass
        self._config = config
        self._networks = [online, *(make_twin(online) for _ in range(num_parts - 1))]
        self._parameters = [list(network.parameters()) for network in self._networks]
        # A custom module may not be made for two threads.
        targets = [target, *(make_twin(target) for _ in range(num_parts - 1))]
        self._target_forwards = [
            TargetForward(self._rule, partial(self._target_q, network), in_background=target_in_background)
            for network in targets
        ]
        self._optimizer = optimizer
        self.torch_threads = 1 if target_in_background or num_parts > 1 else max(1, config.num_threads)
        self._others = ThreadPoolExecutor(max(1, num_parts - 1), "part", torch.set_num_threads, (1,))

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if loss and gradient are finite."""
        own = self._parameters[0]
        part = self._differentiate_in_parts(batch) if len(self._networks) > 1 else self._differentiate(0, batch, 1.0)
        if self._config.centered_gradients:
            center_gradients(own)
        norm = clip_gradients(own, self._config.max_gradient_norm)
        finite = torch.isfinite(part.loss) & torch.isfinite(norm)
        step_where_finite(finite, self._optimizer)
        figures = describe(part.loss, part.q, part.td_errors, norm.detach())
        return Updated(part.td_errors, finite, figures)

    def _differentiate_in_parts(self, batch: DeviceBatch) -> PartResult:
        num_parts = min(len(self._networks), len(batch.action))
        stacks = batch.stacks.tensor_split(num_parts, 1)
        rows = zip(*(row.tensor_split(num_parts) for row in batch.tensors[1:]), strict=True)
        parts = [DeviceBatch(pixels, *row) for pixels, row in zip(stacks, rows, strict=True)]
        shares = [len(part.action) / len(batch.action) for part in parts]
        work = list(zip(range(num_parts), parts, shares, strict=True))
        others = [self._others.submit(self._differentiate, *part) for part in work[1:]]
        done = [self._differentiate(*work[0]), *(other.result() for other in others)]
        for twins in zip(*self._parameters[:num_parts], strict=True):
            gradients = [twin.grad for twin in twins if twin.grad is not None]
            twins[0].grad = sum(gradients[1:], gradients[0]) if gradients else None
        losses, td_errors, q = zip(*done, strict=True)
        return PartResult(torch.stack(losses).sum(), torch.cat(td_errors), torch.cat(q))

    def _differentiate(self, index: int, batch: DeviceBatch, share: float) -> PartResult:
        """Computes `share` times the loss of a part of the batch, and stores the gradients in network `index`."""
        target = self._target_forwards[index].start(batch.stacks)
        with self._precision(batch.stacks.device.type):
            q = self._online_q(self._networks[index], batch.stacks).float()
        rows = batch.action, batch.n_step_return, batch.discount, batch.next_mask
        errors = td_errors(self._rule, q, target().float(), *rows)
        loss = mean_loss(errors, batch.weights, self._config.loss)
        if share < 1.0:
            loss = loss * share
        for parameter in self._parameters[index]:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return PartResult(loss.detach(), errors.detach().abs(), q[: len(batch.action)].detach())

    def _precision(self, device: str) -> AbstractContextManager[Any]:
        if self._config.bfloat16 != "on":
            return nullcontext()
        # No cache on CUDA, because its converted weights would outlive the memory of a captured graph.
        return torch.autocast(device, torch.bfloat16, cache_enabled=device == "cpu")

    def _target_q(self, network: nn.Module, stacks: Tensor) -> Tensor:
        with self._precision(stacks.device.type):
            q: Tensor = network(stacks.flatten(0, 1))
        return q

    def _online_q(self, online: nn.Module, stacks: Tensor) -> Tensor:
        """Returns the online network's values of these observations. The loss differentiates only those of s_t."""
        seen = stacks[self._rule.seen_online]
        if self._one_pass or len(seen) == 1:
            both: Tensor = online(seen.flatten(0, 1))
            return both
        q = online(seen[0])
        with torch.no_grad():
            next_q = online(seen[1])
        return torch.cat([q, next_q])


def make_twin(network: nn.Module) -> nn.Module:
    """Returns a copy of the network that shares its parameters' memory but has separate gradients."""
    twin = copy.deepcopy(network)
    for own, shared in zip(twin.parameters(), network.parameters(), strict=True):
        own.data = shared.data
    return twin


def make_update(
    config: LearnerConfig,
    online: nn.Module,
    target: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    *,
    rescaled: bool = False,
    switches: GpuSwitches = GPU_SWITCHES,
) -> Update:
    """Returns the step for this device. The process that runs it must call torch.set_num_threads(torch_threads).

    rescaled: the networks output rescaled values, see `TargetRule`.
    """
    make_eager = partial(EagerUpdate, config, online, target, optimizer, rescaled=rescaled)
    if device.type == "cuda":
        return GraphUpdate(make_eager(one_pass=not switches.two_passes), per_buffer=switches.graph_per_buffer)
    threads = max(1, config.num_threads)
    small = config.batch_size < MOST_PARTS * SMALLEST_PART
    if has_manual_backward(online, bfloat16=config.bfloat16 == "on") and (threads == 1 or small):
        return ManualUpdate(config, online, target, optimizer, rescaled=rescaled, target_in_background=threads > 1)
    # A network with buffers is not split, because each part would change its own copy of the buffers.
    if not 2 <= threads <= MOST_PARTS or any(True for _ in online.buffers()):
        return make_eager()
    return make_eager(target_in_background=True) if small else make_eager(num_parts=threads)
