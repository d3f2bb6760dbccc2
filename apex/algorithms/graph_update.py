"""Runs any gradient step as CUDA graphs, and moves networks to their device."""

import logging
from typing import NamedTuple

import torch
from torch import nn

from apex.algorithms.gradient_step import DeviceBatch, Update, Updated
from apex.algorithms.kernels.pixel_convolution import PixelConvolution

log = logging.getLogger("apex")

WARM_UP_STEPS = 3  # normal steps before the capture, during which libraries choose algorithms and allocate memory


class GpuSwitches(NamedTuple):
    """Ways to compute the same step on a GPU. `python -m bench device` compares each with its opposite."""

    two_passes: bool = False  # DQN: s_t and s_{t+m} pass through the online network one after the other
    scaled_weights: bool = False  # images: the first layer scales its weights instead of the pixels
    graph_per_buffer: bool = False  # DQN: a graph reads each buffer of batches in place; False: batches are copied
    delayed_graphs: bool = False  # DPG, if only some updates change the policy: graphs; False: no graphs


GPU_SWITCHES = GpuSwitches()  # None has been measured on a GPU yet.


class GraphUpdate(Update):
    """Runs a step as a CUDA graph: the first steps run normally, one step is captured, later steps replay the graph.

    Steps that differ get a graph each. If a step cannot be captured, for example because a custom network waits for the
    GPU, all steps run normally.
    The current stream must be the same for all calls and must not be the default stream. Networks and optimizer must
    not be replaced after the first step.
    """

    def __init__(self, update: Update, *, cycle: int = 1, per_buffer: bool = False) -> None:
        """Prepares the step.

        cycle: a step does the same as the step `cycle` steps before it.
        per_buffer: batches come from two buffers by turns, which graphs read in place; otherwise they are copied.
        """
        self.torch_threads = update.torch_threads
        self.ready = False  # Until all graphs have been captured, no other thread may free pinned memory.
        self._update = update
        self._cycle = cycle
        self._per_buffer = per_buffer
        self._num_steps = 0
        self._inputs: DeviceBatch | None = None
        # By position in the cycle and addresses of the batch: a graph, and the tensors that its replays overwrite.
        # A graph is kept after a failed capture, because torch's allocator uses it.
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Updated | None]] = {}

    @property
    def recorded(self) -> bool:
        """Whether every captured step has become a graph."""
        return bool(self._graphs) and all(updated is not None for _, updated in self._graphs.values())

    def __call__(self, batch: DeviceBatch) -> Updated:
        """Updates the online network. The batch may be overwritten once the stream has copied or used it."""
        if not self._per_buffer:
            batch = self._copy(batch)
        key = self._num_steps % self._cycle, *(tensor.data_ptr() for tensor in batch.tensors)
        self._num_steps += 1
        failed = bool(self._graphs) and not self.recorded
        if self._num_steps > WARM_UP_STEPS and key not in self._graphs and not failed:
            graph = torch.cuda.CUDAGraph()
            self._graphs[key] = graph, self._record(graph, batch)
        self.ready = self._num_steps >= WARM_UP_STEPS + self._cycle * (2 if self._per_buffer else 1)
        if not self.recorded:  # A step that sometimes runs normally would lose count of its cycle.
            return self._update(batch)
        graph, updated = self._graphs[key]
        graph.replay()
        assert updated is not None
        return updated

    def _copy(self, batch: DeviceBatch) -> DeviceBatch:
        if self._inputs is None:
            self._inputs = DeviceBatch(*map(torch.empty_like, batch.tensors))
        for own, given in zip(self._inputs.tensors, batch.tensors, strict=True):
            own.copy_(given, non_blocking=True)
        return self._inputs

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


def place(network: nn.Module, device: torch.device, switches: GpuSwitches = GPU_SWITCHES) -> nn.Module:
    """Moves a network to the device, in the form in which its convolutions are fastest."""
    network = network.to(device)
    if device.type == "cuda":  # On CPUs, channels-last is not faster, and slower in bfloat16.
        for module in network.modules():
            if isinstance(module, PixelConvolution):
                module.scales_weights = switches.scaled_weights
        for parameter in network.parameters():
            if parameter.dim() == 4:  # `Module.to(memory_format=...)` fails for five-dimensional parameters.
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network
