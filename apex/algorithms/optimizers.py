"""Optimizers: the paper's RMSProp, and Adam; gradient clipping and the schedule of the learning rate."""

from collections.abc import Iterable, Iterator, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from apex.config import LearnerConfig


def make_optimizer(
    config: LearnerConfig, parameters: Iterable[nn.Parameter], others: Sequence[nn.Parameter] = (), share: float = 1.0
) -> torch.optim.Optimizer:
    """Returns the optimizer that the configuration names, for parameters that are already on their device.

    The learning rate of `others` is `share` times that of `parameters`.
    """
    parameters = list(parameters)
    on_gpu, rate = parameters[0].is_cuda, config.learning_rate
    groups: list[dict[str, Any]] = [{"params": parameters, "lr": rate}]
    if others:
        groups.append({"params": list(others), "lr": share * rate, "share": share})
    if has_schedule(config) and on_gpu:
        for group in groups:  # A captured graph reads a tensor again at each replay; a number would never change.
            group["lr"] = torch.tensor(group["lr"], device=parameters[0].device)
    if config.optimizer == "adam":
        return Adam(
            groups,
            lr=rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.optimizer_epsilon,
            fused=True,  # one pass over memory
            capturable=on_gpu,  # keeps the step count on the GPU, as GraphUpdate requires
        )
    return CenteredRMSProp(groups, lr=rate, decay=config.rmsprop_decay, epsilon=config.optimizer_epsilon)


def learning_rate_at(config: LearnerConfig, num_updates: int, run_share: float | None = None) -> float:
    """Returns the learning rate of the next update after `num_updates` updates.

    run_share: how much of the run is over, 0 ... 1, measured by its nearest limit; None: the run has no limit.
    """
    rate = config.learning_rate
    if config.learning_rate_warmup:
        rate *= min(1.0, (num_updates + 1) / config.learning_rate_warmup)
    if config.learning_rate_until_limit and run_share is not None:
        done = run_share
    elif config.learning_rate_updates:
        done = min(1.0, num_updates / config.learning_rate_updates)
    else:
        done = 0.0
    return rate * (1 - done * (1 - config.final_learning_rate_share))


def has_schedule(config: LearnerConfig) -> bool:
    """Whether the learning rate changes during a run."""
    return bool(config.learning_rate_warmup or config.learning_rate_updates or config.learning_rate_until_limit)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate. On a GPU, the current stream must be the one that runs the updates."""
    for group in optimizer.param_groups:
        own = rate * group.get("share", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


@torch.no_grad()
def center_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Subtracts from the gradient of each unit's weights their mean (Yong et al. 2020, Gradient Centralization, eq. 1).

    Inputs that are never negative give all weights of a unit gradients of the same sign. Adam would then change all of
    them by about the learning rate, and such steps can make a whole layer inactive.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dim() > 1:
            gradient -= gradient.mean(tuple(range(1, gradient.dim())), keepdim=True)


@torch.no_grad()
def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scales all gradients so that their joint norm is at most `max_norm`; returns the norm before scaling, float32[].

    Computes the same as `nn.utils.clip_grad_norm_` in a fourth of the time, because it does not sort gradients by
    device and dtype.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads averages and step counts from a `state_dict`; learning rate and other options stay as they are.

    Copies tensors into the memory format of the parameters, because a fused step requires equal formats.
    """
    own = optimizer.state_dict()["param_groups"]
    groups = [{**mine, "params": saved["params"]} for mine, saved in zip(own, state["param_groups"], strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                values[name] = torch.empty_like(parameter).copy_(value)


def step_where_finite(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Takes the optimizer's step if `finite`, bool[], is True. On a GPU the host does not wait for this value."""
    if finite.is_cuda:
        step_if(finite, optimizer)
    elif finite:
        optimizer.step()


@torch.no_grad()
def step_if(finite: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Runs the optimizer's step only if `finite`, bool[], is True; does not wait for the GPU."""
    if isinstance(optimizer, Adam):
        optimizer.step_if(finite)
        return
    if not isinstance(optimizer, CenteredRMSProp):  # Others may keep numbers on the CPU, so this waits for the GPU.
        if finite:
            optimizer.step()
        return
    # Computes step * after + (1 - step) * before on the bits as integers, because NaN times 0 is not 0. Each line runs
    # one or two kernels for all tensors together; `torch.where` would run three for each tensor.
    step = finite.int()
    before = list(_bits(optimizer))
    kept = torch._foreach_mul(before, 1 - step)
    optimizer.step()
    after = list(_bits(optimizer))  # An undone first step leaves the averages that it created at 0.
    torch._foreach_mul_(after, step)
    torch._foreach_add_(after[: len(kept)], kept)


def _bits(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields int32 views of all tensors that a step changes; those that the first step creates come last."""
    for group in optimizer.param_groups:
        yield from (parameter.view(torch.int32) for parameter in group["params"])
    for state in optimizer.state.values():
        yield from (value.view(torch.int32) for value in state.values() if isinstance(value, Tensor))


class _NotCompiled(torch.optim.Optimizer):
    """An optimizer without torch.compile's wrappers, which would spend one second on importing modules."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class Adam(_NotCompiled, torch.optim.Adam):
    """torch's Adam. On a CPU it calls the fused kernel directly: for small networks, torch's wrapper takes longer."""

    _step_on_gpu = torch.no_grad()(unwrap(torch.optim.Adam.step))

    def step_if(self, finite: Tensor) -> None:
        """See the function `step_if`. torch's fused kernel changes nothing if `found_inf` is 1."""
        self.found_inf = (~finite).float()
        self._step_on_gpu()
        del self.found_inf

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
            increment_version(parameters)  # The fused kernel does not, and bfloat16 copies would become outdated.

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Creates the state of a parameter before its first step, as torch's Adam does."""
        averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **averages}
        state: dict[str, Tensor] = self.state[parameter]
        return state


class CenteredRMSProp(_NotCompiled):
    """Steps x <- x - lr * g / sqrt(E[g^2] - E[g]^2 + epsilon), with epsilon inside the root, as in DQN.

    torch.optim.RMSprop adds epsilon after the root. With epsilon 1.5e-7 its divisor can be as small as 1.5e-7, but the
    divisor here is at least sqrt(1.5e-7) = 3.9e-4. Both averages start at 0; `decay` is the weight of old values.
    """

    def __init__(self, parameters: ParamsT, *, lr: float | Tensor, decay: float, epsilon: float) -> None:
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
            torch._foreach_clamp_min_(roots, 0.0)  # Rounding may make a variance of 0 negative.
            torch._foreach_add_(roots, group["epsilon"])
            torch._foreach_sqrt_(roots)
            if isinstance(group["lr"], Tensor):
                steps = torch._foreach_div(gradients, roots)
                torch._foreach_mul_(steps, -group["lr"])
                torch._foreach_add_(parameters, steps)
            else:
                torch._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])

    def _average(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Returns a running average of the parameter; creates it with value 0 at the first call."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        average: Tensor = state[name]
        return average
