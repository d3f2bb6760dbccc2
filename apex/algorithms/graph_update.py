"""Runs any gradient step as a CUDA graph, and moves networks to their device."""

import logging

import torch
from torch import nn

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated

log = logging.getLogger("apex")

WARM_UP_STEPS = 3  # normal steps before the capture, during which libraries choose algorithms and allocate memory


class GraphUpdate(Update):
    """Runs a step as a CUDA graph: the first steps run normally, one step is captured, later steps replay the graph.

    If the step cannot be captured, for example because a custom network waits for the GPU, all steps run normally.
    The current stream must be the same for all calls and must not be the default stream. Networks and optimizer must
    not be replaced after the first step.
    """

    def __init__(self, update: Update) -> None:
        self.torch_threads = update.torch_threads
        self.ready = False  # Until the graph has been captured, no other thread may free pinned memory.
        self._update = update
        self._num_steps = 0
        self._inputs: DeviceBatch | None = None
        self._graph: torch.cuda.CUDAGraph | None = None  # kept after a failed capture: torch's allocator uses it
        self._updated: Updated | None = None  # tensors that each replay of the graph overwrites

    @property
    def recorded(self) -> bool:
        """Whether the step was captured as a graph."""
        return self._updated is not None

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network. The batch may be overwritten once the stream has copied it."""
        if self._inputs is None:
            self._inputs = DeviceBatch(*map(torch.empty_like, batch.tensors))
        for own, given in zip(self._inputs.tensors, batch.tensors, strict=True):
            own.copy_(given, non_blocking=True)
        self._num_steps += 1
        if self._num_steps == WARM_UP_STEPS + 1:
            self._graph = torch.cuda.CUDAGraph()
            self._updated = self._record(self._graph, self._inputs)
            self.ready = True
        if self._graph is None or self._updated is None:
            return self._update(self._inputs)
        self._graph.replay()
        return self._updated

    def _record(self, graph: torch.cuda.CUDAGraph, inputs: DeviceBatch) -> Updated | None:
        """Captures the step. Returns the tensors that each replay overwrites, or None if the capture fails."""
        try:
            # "thread_local" permits other threads, such as that of checkpoints, to copy during the capture.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                return self._update(inputs)
        except RuntimeError as error:
            remedy = "Check whether the network waits for the GPU, for example by .item(), or uses CPU tensors."
            message = "Cannot capture the update as a CUDA graph (%s). Updates will be slower. %s"
            log.warning(message, str(error).strip().partition("\n")[0], remedy)
            return None


def place(network: nn.Module, device: torch.device) -> nn.Module:
    """Moves a network to the device, in the memory format in which its convolutions are fastest."""
    network = network.to(device)
    if device.type == "cuda":  # On CPUs, channels-last is not faster, and slower in bfloat16.
        for parameter in network.parameters():
            if parameter.dim() == 4:  # `Module.to(memory_format=...)` fails for five-dimensional parameters.
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network
