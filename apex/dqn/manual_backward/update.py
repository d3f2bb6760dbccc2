"""The gradient step of the built-in networks on a CPU, with hand-written gradients.

s_t and s_{t+m} pass through the online network together, but only s_t is differentiated. One tensor stores all
gradients. For such small networks autograd takes several times as long.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch, Updated
from apex.config import LearnerConfig
from apex.dqn.losses import describe, double_q_errors, loss_and_gradients
from apex.dqn.manual_backward import pixel_torso
from apex.dqn.manual_backward.layers import Heads, PassedHeads, VectorTorso
from apex.dqn.manual_backward.pixel_torso import PixelTorso
from apex.dqn.networks import PixelQNetwork, QNetwork, VectorQNetwork


class _Passed(NamedTuple):
    """The outputs of a network's layers for a batch."""

    body: tuple[Tensor, ...]
    heads: PassedHeads


class _Network:
    """A built-in network, split into its layers."""

    def __init__(self, network: nn.Module) -> None:
        network = cast(QNetwork, network)
        torso = PixelTorso if isinstance(network, PixelQNetwork) else VectorTorso
        self._body: PixelTorso | VectorTorso = torso(cast(nn.Sequential, network.body))
        self._heads = Heads(network)

    def forward(self, stacks: Tensor) -> _Passed:
        """frame_dtype[N, B, S, *F] -> Q-values of N * B rows and the outputs that `backward` needs."""
        body = self._body.forward(stacks)
        return _Passed(body, self._heads.forward(body[-1]))

    def backward(self, stacks: Tensor, passed: _Passed, action: Tensor, q_gradient: Tensor) -> None:
        """Stores the gradients of all parameters.

        q_gradient: gradient of the loss with respect to Q(s_t, a_t), float32[B].
        """
        by_features = self._heads.backward(passed.body[-1], passed.heads, action, q_gradient)
        self._body.backward(stacks, passed.body, by_features)


class ManualUpdate:
    """The step of `autograd_update.EagerUpdate` for networks that `has_manual_backward` accepts.

    The results of both differ only by rounding.
    """

    def __init__(
        self,
        config: LearnerConfig,
        online: nn.Module,
        target: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        judge_aside: bool = False,
    ) -> None:
        """Prepares the step. From then on, the networks' parameters must not move to other memory.

        judge_aside: the target network runs on a second thread.
        """
        self.torch_threads = 1  # threads per operation; a second thread, if any, runs the target network
        self._config = config
        self._optimizer = optimizer
        parameters = list(online.parameters())
        assert all(parameter.is_contiguous() for parameter in parameters)  # because gradients are contiguous views
        sizes = [parameter.numel() for parameter in parameters]
        self._gradient = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self._online, self._target = _Network(online), _Network(target)
        self._aside = ThreadPoolExecutor(1, "target", torch.set_num_threads, (1,)) if judge_aside else None

    @torch.no_grad()
    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if loss and gradient are finite."""
        judged = self._aside.submit(self._judge, batch.stacks[1:]) if self._aside else None
        passed = self._online.forward(batch.stacks)
        q, next_q = passed.heads.q.chunk(2)
        next_q_target = self._judge(batch.stacks[1:]) if judged is None else judged.result()
        rows = batch.action, batch.n_step_return, batch.discount, batch.next_mask
        errors = double_q_errors(q, next_q, next_q_target, *rows)
        loss, q_gradient = loss_and_gradients(errors, batch.weights, kind=self._config.loss)
        self._online.backward(batch.stacks, passed, batch.action, q_gradient)
        norm = torch.linalg.vector_norm(self._gradient)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if finite:
            if norm > self._config.max_gradient_norm:
                self._gradient.mul_(self._config.max_gradient_norm / (norm + 1e-6))
            self._optimizer.step()
        td_errors = errors.abs()
        return Updated(td_errors, finite, describe(loss, q, td_errors, norm))

    @torch.no_grad()  # again, because a second thread does not inherit this mode
    def _judge(self, stacks: Tensor) -> Tensor:
        """Returns Q(s_{t+m}) of the target network."""
        return self._target.forward(stacks).heads.q


def has_manual_backward(network: nn.Module) -> bool:
    """Whether `ManualUpdate` supports the network: built-in, with supported layers and no frozen parameters."""
    if type(network) is PixelQNetwork:
        known = pixel_torso.suits(cast(nn.Sequential, network.body))
    else:
        known = type(network) is VectorQNetwork
    return known and all(parameter.requires_grad for parameter in network.parameters())
