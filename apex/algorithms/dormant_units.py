"""Finds dormant units (Sokar et al. 2023, The dormant neuron phenomenon in deep reinforcement learning).

The score of a unit is its mean activation over states, divided by the mean over the units of its layer (equation 1).
A unit whose score is at most `THRESHOLD` hardly contributes to the output, and hardly learns.
"""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

THRESHOLD = 0.025
NUM_STATES = 1_000  # Activations are averaged over at least this many of the newest states.


class DormantUnits:
    """Averages the activations of every layer that ends with an `nn.ReLU` module, over the newest states.

    Modules that a forward pass may skip are left out, and of one that runs several times, only the last run counts.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.ReLU)}
        self._batches: deque[tuple[int, dict[str, Tensor]]] = deque()  # size; sum of each unit's activations by layer

    @torch.no_grad()
    def add(self, states: Tensor) -> None:
        """Adds a batch of states, frame_dtype[B, S, *F], and forgets the oldest batches that are not needed."""
        if not self._layers:
            return
        sums: dict[str, Tensor] = {}
        hooks = [layer.register_forward_hook(partial(_add_up, sums, name)) for name, layer in self._layers.items()]
        try:
            self._network(states)
        finally:
            for hook in hooks:
                hook.remove()
        self._batches.append((len(states), sums))
        while sum(size for size, _ in self._batches) - self._batches[0][0] >= NUM_STATES:
            self._batches.popleft()

    def shares(self) -> dict[str, float]:
        """Returns the share of dormant units by name of the ReLU module; empty before `NUM_STATES` states."""
        if sum(size for size, _ in self._batches) < NUM_STATES:
            return {}
        names = [name for name in self._layers if all(name in sums for _, sums in self._batches)]
        totals = {name: torch.stack([sums[name] for _, sums in self._batches]).sum(0) for name in names}
        return {name: float((total <= THRESHOLD * total.mean()).float().mean()) for name, total in totals.items()}


def _add_up(sums: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Stores the sum over rows of each unit's activation; the activation of a channel is its mean over the image."""
    activation = output.float()
    sums[name] = (activation.flatten(2).mean(2) if activation.dim() > 2 else activation).sum(0)
