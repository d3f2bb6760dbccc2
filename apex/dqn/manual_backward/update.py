"""The gradient step of the built-in networks on a CPU, with hand-written gradients.

With double Q-learning, s_t and s_{t+m} pass through the online network together, but only s_t is differentiated. One
tensor stores all gradients. For such small networks autograd takes several times as long.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from apex.algorithms.encoders import Encoder
from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.optimizers import center_gradients
from apex.config import LearnerConfig
from apex.dqn.losses import TargetRule, describe, loss_and_gradients, td_errors
from apex.dqn.manual_backward import pixel_torso
from apex.dqn.manual_backward.bfloat16_layers import Bfloat16Linear, Bfloat16Torso
from apex.dqn.manual_backward.grid_torso import GridTorso, supports_grid
from apex.dqn.manual_backward.layers import HeadOutputs, Heads, VectorTorso
from apex.dqn.manual_backward.pixel_torso import PixelTorso
from apex.dqn.networks import GridQNetwork, PixelQNetwork, QNetwork, VectorQNetwork
from apex.dqn.target_forward import TargetForward


class _Outputs(NamedTuple):
    """The outputs of a network's layers for a batch."""

    body: tuple[Tensor, ...]
    heads: HeadOutputs


class _Network:
    """A built-in network, split into its layers. `bfloat16`: only for images."""

    def __init__(self, network: nn.Module, *, bfloat16: bool = False) -> None:
        network = cast(QNetwork, network)
        self._body: Bfloat16Torso | PixelTorso | GridTorso | VectorTorso
        if isinstance(network, GridQNetwork):
            self._body = GridTorso(cast(Encoder, network.body))
        else:
            torso = Bfloat16Torso if bfloat16 else PixelTorso if isinstance(network, PixelQNetwork) else VectorTorso
            self._body = torso(cast(nn.Sequential, network.body))
        self._heads = Heads(network, Bfloat16Linear if bfloat16 else None)

    def forward(self, stacks: Tensor) -> _Outputs:
        """frame_dtype[N, B, S, *F] -> Q-values of N * B rows and the outputs that `backward` needs."""
        body = self._body.forward(stacks)
        return _Outputs(body, self._heads.forward(body[-1]))

    def backward(self, stacks: Tensor, outputs: _Outputs, action: Tensor, q_gradient: Tensor) -> None:
        """Stores the gradients of all parameters.

        q_gradient: gradient of the loss with respect to Q(s_t, a_t), float32[B].
        """
        feature_gradient = self._heads.backward(outputs.body[-1], outputs.heads, action, q_gradient)
        self._body.backward(stacks, outputs.body, feature_gradient)


class ManualUpdate(Update):
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
        target_in_background: bool = False,
    ) -> None:
        """Prepares the step. From then on, the networks' parameters must not move to other memory.

        rescaled: the networks output rescaled values, see `TargetRule`.
        target_in_background: the target network runs on a second thread.
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
        self._online, layers = _Network(online, bfloat16=bfloat16), _Network(target, bfloat16=bfloat16)
        self._target = TargetForward(
            self._rule, lambda stacks: layers.forward(stacks).heads.q, in_background=target_in_background
        )

    @torch.no_grad()
    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network if loss and gradient are finite."""
        target = self._target.start(batch.stacks)
        outputs = self._online.forward(batch.stacks[self._rule.seen_online])
        rows = batch.action, batch.n_step_return, batch.discount, batch.next_mask
        errors = td_errors(self._rule, outputs.heads.q, target(), *rows)
        loss, q_gradient = loss_and_gradients(errors, batch.weights, kind=self._config.loss)
        self._online.backward(batch.stacks, outputs, batch.action, q_gradient)
        if self._config.centered_gradients:
            center_gradients(self._parameters)
        norm = torch.linalg.vector_norm(self._gradient)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if finite:
            if norm > self._config.max_gradient_norm:
                self._gradient.mul_(self._config.max_gradient_norm / (norm + 1e-6))
            self._optimizer.step()
        q, priorities = outputs.heads.q[: len(errors)], errors.abs()
        return Updated(priorities, finite, describe(loss, q, priorities, norm))


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
        body = cast(nn.Sequential, network.body)
        is_pooled = any(isinstance(layer, nn.AdaptiveMaxPool2d) for layer in body)
        known = not is_pooled and (bfloat16 or pixel_torso.supports(body))
    elif type(network) is GridQNetwork:
        known = not bfloat16 and supports_grid(cast(Encoder, network.body))
    else:
        known = type(network) is VectorQNetwork and not bfloat16
    return known and all(parameter.requires_grad for parameter in network.parameters())
