"""The gradient step of the built-in networks on a CPU, with hand-written gradients.

With double Q-learning, s_t and s_{t+m} pass through the online network together, but only s_t is differentiated. One
tensor stores all gradients. For such small networks autograd takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.algorithms.gradient_step import DeviceBatch, Updated
from apex.algorithms.optimizers import center_gradients
from apex.config import LearnerConfig
from apex.dqn.losses import TargetRule, describe, loss_and_gradients, td_errors
from apex.dqn.manual_backward import pixel_torso
from apex.dqn.manual_backward.bfloat16_layers import Bfloat16Linear, Bfloat16Torso
from apex.dqn.manual_backward.layers import Heads, PassedHeads, VectorTorso
from apex.dqn.manual_backward.pixel_torso import PixelTorso
from apex.dqn.networks import PixelQNetwork, QNetwork, VectorQNetwork


class _Passed(NamedTuple):
    """The outputs of a network's layers for a batch."""

    body: tuple[Tensor, ...]
    heads: PassedHeads


class _Network:
    """A built-in network, split into its layers. `bfloat16`: only for images."""

    def __init__(self, network: nn.Module, *, bfloat16: bool = False) -> None:
        network = cast(QNetwork, network)
        torso = Bfloat16Torso if bfloat16 else PixelTorso if isinstance(network, PixelQNetwork) else VectorTorso
        self._body: Bfloat16Torso | PixelTorso | VectorTorso = torso(cast(nn.Sequential, network.body))
        self._heads = Heads(network, Bfloat16Linear if bfloat16 else None)

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
        rescaled: bool = False,
        judge_aside: bool = False,
    ) -> None:
        """Prepares the step. From then on, the networks' parameters must not move to other memory.

        rescaled: the networks output rescaled values, see `TargetRule`.
        judge_aside: the target network runs on a second thread.
        """
        self.torch_threads = 1  # threads per operation; a second thread, if any, runs the target network
        self._config = config
        self._rule = TargetRule(config.target, rescaled)
        self._optimizer = optimizer
        self._parameters = parameters = list(online.parameters())
        assert all(parameter.is_contiguous() for parameter in parameters)  # because gradients are contiguous views
        sizes = [parameter.numel() for parameter in parameters]
        self._gradient = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self._gradient, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        bfloat16 = config.bfloat16 == "on"
        self._online, self._target = _Network(online, bfloat16=bfloat16), _Network(target, bfloat16=bfloat16)
        self._aside = ThreadPoolExecutor(1, "target", torch.set_num_threads, (1,)) if judge_aside else None

    @torch.no_grad()
    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if loss and gradient are finite."""
        judged = self._aside.submit(self._judge, batch.stacks) if self._aside else None
        passed = self._online.forward(batch.stacks[self._rule.seen_online])
        target = self._judge(batch.stacks) if judged is None else judged.result()
        rows = batch.action, batch.n_step_return, batch.discount, batch.next_mask
        errors = td_errors(self._rule, passed.heads.q, target, *rows)
        loss, q_gradient = loss_and_gradients(errors, batch.weights, kind=self._config.loss)
        self._online.backward(batch.stacks, passed, batch.action, q_gradient)
        if self._config.centered_gradients:
            center_gradients(self._parameters)
        norm = torch.linalg.vector_norm(self._gradient)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if finite:
            if norm > self._config.max_gradient_norm:
                self._gradient.mul_(self._config.max_gradient_norm / (norm + 1e-6))
            self._optimizer.step()
        q, priorities = passed.heads.q[: len(errors)], errors.abs()
        return Updated(priorities, finite, describe(loss, q, priorities, norm))

    @torch.no_grad()  # again, because a second thread does not inherit this mode
    def _judge(self, stacks: Tensor) -> Tensor:
        """Returns the target network's values of the observations that the target rule asks for."""
        return self._target.forward(stacks[self._rule.seen_by_target]).heads.q


def make_forward(network: nn.Module, *, bfloat16: bool) -> Callable[[Tensor], Tensor] | None:
    """Returns a function frame_dtype[B, S, *F] -> float32[B, A] that computes what `network` does, on one thread.

    It is faster than the network's modules, but supports neither gradients nor autocast. It reads the parameters where
    they are now, so they must not move to other memory. None if `ManualUpdate` does not support the network.
    """
    if not has_manual_backward(network, bfloat16=bfloat16):
        return None
    layers = _Network(network, bfloat16=bfloat16)
    return lambda observation: layers.forward(observation.unsqueeze(0)).heads.q


def has_manual_backward(network: nn.Module, *, bfloat16: bool) -> bool:
    """Whether `ManualUpdate` supports the network: built-in, with supported layers and no frozen parameters."""
    if type(network) is PixelQNetwork:
        known = bfloat16 or pixel_torso.suits(cast(nn.Sequential, network.body))
    else:
        known = type(network) is VectorQNetwork and not bfloat16
    return known and all(parameter.requires_grad for parameter in network.parameters())
