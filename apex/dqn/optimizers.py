"""Gradient steps: the paper's RMSProp, and Adam; and how long they are, update after update."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from apex.config import LearnerConfig


def make_optimizer(config: LearnerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names, over `parameters`, which lie on their device already."""
    parameters = list(parameters)
    rate: float | Tensor = config.learning_rate
    if config.learning_rate_updates and parameters[0].is_cuda:
        rate = torch.tensor(rate, device=parameters[0].device)  # A captured step would keep a number for ever.
    if config.optimizer == "adam":
        return Adam(
            parameters,
            lr=rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.optimizer_epsilon,
            fused=True,  # One pass over memory
            capturable=parameters[0].is_cuda,  # Its count of steps lies on the GPU too: see update.GraphUpdate.
        )
    return CenteredRMSProp(parameters, lr=rate, decay=config.rmsprop_decay, epsilon=config.optimizer_epsilon)


def learning_rate_at(config: LearnerConfig, num_updates: int) -> float:
    """That of the update which follows on `num_updates` others."""
    if not config.learning_rate_updates:
        return config.learning_rate
    done = min(1.0, num_updates / config.learning_rate_updates)
    return config.learning_rate * (1 - done * (1 - config.final_learning_rate_share))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Takes steps of this length from now on; on a GPU, in the order of the current stream, which must be its."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Goes on from the averages and counts of a `state_dict`; how it steps stays as this configuration and device say.

    Tensors get this device's order of memory: a fused step walks through parameter and averages side by side.
    """
    own = optimizer.state_dict()["param_groups"]
    groups = [{**mine, "params": saved["params"]} for mine, saved in zip(own, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                values[name] = torch.empty_like(parameter).copy_(value)


class _NotCompiled(torch.optim.Optimizer):
    """Without what torch.compile is told about an optimizer: to tell it anything, torch loads a second of modules."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class Adam(_NotCompiled, torch.optim.Adam):
    """torch's own; on a CPU without the way to its fused kernel, which takes longer than that for a small network."""

    _step_on_gpu = torch.no_grad()(unwrap(torch.optim.Adam.step))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # The loss is never evaluated anew.
        """Takes one step along the gradients that are there; a parameter without one stays as it is."""
        for group in self.param_groups:
            if group["capturable"]:
                self._step_on_gpu()
                return
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self.state[parameter] or self._begin(parameter) for parameter in parameters]
            for state in states:
                state["step"] += 1
            beta1, beta2 = group["betas"]
            torch._fused_adam_(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state that torch's own makes at a parameter's first step."""
        averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **averages}
        state: dict[str, Tensor] = self.state[parameter]
        return state


class CenteredRMSProp(_NotCompiled):
    """x <- x - lr * g / sqrt(E[g^2] - E[g]^2 + epsilon), with epsilon inside the root, as DQN has it.

    torch.optim.RMSprop adds epsilon after the root: with 1.5e-7 a quiet gradient is then divided by no less than
    1.5e-7, here by no less than sqrt(1.5e-7) = 3.9e-4. Both averages start at 0 and forget by `decay` a step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float | Tensor, decay: float, epsilon: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # The loss is never evaluated anew.
        """Takes one step along the gradients that are there; a parameter without one stays as it is."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue  # torch's list operations refuse an empty list.
            gradients = [parameter.grad for parameter in parameters]
            means = [self._average(parameter, "mean") for parameter in parameters]
            mean_squares = [self._average(parameter, "mean_square") for parameter in parameters]
            fresh = 1 - group["decay"]
            torch._foreach_lerp_(means, gradients, fresh)
            torch._foreach_mul_(mean_squares, group["decay"])
            torch._foreach_addcmul_(mean_squares, gradients, gradients, fresh)
            roots = torch._foreach_addcmul(mean_squares, means, means, -1.0)
            torch._foreach_clamp_min_(roots, 0.0)  # A variance of 0 is rounded to below 0 now and then.
            torch._foreach_add_(roots, group["epsilon"])
            torch._foreach_sqrt_(roots)
            if isinstance(group["lr"], Tensor):
                steps = torch._foreach_div(gradients, roots)
                torch._foreach_mul_(steps, -group["lr"])
                torch._foreach_add_(parameters, steps)
            else:
                torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])

    def _average(self, parameter: nn.Parameter, name: str) -> Tensor:
        """A running average that `state_dict` carries; it begins at 0."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        average: Tensor = state[name]
        return average
