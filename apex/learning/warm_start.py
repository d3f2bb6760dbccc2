"""A warm start: a new run copies the parameters of a trained policy that fit its network; see `learner.init_from`."""

import torch
from torch import Tensor, nn

from apex.facts import WarmStart
from apex.runs.checkpoints.policy_file import read_tensors
from apex.runs.find_policy import find_policy
from apexreplay.errors import UsageError, require


def start_warm(network: nn.Module, init_from: str) -> WarmStart:
    """Copies into `network` each tensor of the policy `init_from` that has the same name and shape.

    `init_from`: as the argument `run` of `apex.load_policy`. Executes no code of the policy's run. Raises UsageError if
    the policy is missing or damaged, or if no tensor fits.
    """
    try:
        path = find_policy(init_from)
        num_updates, tensors = read_tensors(path)
    except UsageError as error:
        raise UsageError(f"learner.init_from {init_from!r}: {error.problem}", error.remedy) from error
    state = network.state_dict()
    fitting = {name: tensor for name, tensor in state.items() if _fits(tensors.get(name), tensor)}
    others = tuple(name for name in state if name not in fitting)
    require(
        bool(fitting),
        f"learner.init_from {init_from!r}: no tensor of {path} fits the network of this run",
        remedy="use the policy of a run with the same kind of observations, algorithm and network",
    )
    with torch.no_grad():
        for name, tensor in fitting.items():
            tensor.copy_(tensors[name])
    return WarmStart(path=str(path), updates=num_updates, copied=len(fitting), others=others)


def _fits(source: Tensor | None, tensor: Tensor) -> bool:
    return source is not None and source.shape == tensor.shape
