"""Copies batches from a slot of the ring to the device, and priorities back to the host; then releases the slot.

Without CUDA, a batch is a view of the slot. With CUDA, batches are copied on a separate stream, from page-locked memory
into one of two buffers, while the GPU still computes the previous update. Nothing here waits for the GPU unless the GPU
is more than `MAX_BEHIND` updates behind. A slot is released only when the result of its update is known, because the
batch of a skipped update is then saved. Therefore the ring needs `MAX_BEHIND` more slots.
"""

import ctypes
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from apex.algorithms.gradient_step import DeviceBatch, SequenceBatch
from apex.learning.batch_ring import MAX_BEHIND, Batch
from apexreplay.item_kinds import Array

log = logging.getLogger("apex")


Return = Callable[[Batch, NDArray[Any]], None]  # takes a batch and the result of its update
Release = Callable[[int], None]  # takes a slot that may be filled again
Receive = Callable[[NDArray[Any]], None]  # takes the values of a tensor, on the host


class HostTransfer:
    """The transfer for training on the CPU."""

    def __init__(self, send: Return, release: Release) -> None:
        self._send = send
        self._release = release

    def load(self, batch: Batch, weights: Array) -> DeviceBatch | SequenceBatch:
        """Returns views of the batch's memory; `weights`: float32[B]."""
        return _kind(batch)(**_tensors(batch, weights))

    def give_back(self, batch: Batch, result: Tensor) -> None:
        """Sends the result of the batch's update, and releases its slot."""
        self._send(batch, result.numpy())
        self._release(batch.slot)

    def fetch(self, tensor: Tensor, receive: Receive) -> None:
        """Calls `receive` with the values of `tensor`, which must not change later."""
        receive(tensor.numpy())

    def mark(self) -> Callable[[], None]:
        """Returns a function that does nothing: on the CPU, there are no copies to wait for."""
        return lambda: None

    def collect(self) -> bool:
        """Returns False: on the CPU, no result is ever in transit."""
        return False

    def flush(self) -> None:
        """Does nothing: no result is in transit."""


class _Copy(NamedTuple):
    """A tensor that is being copied to the host."""

    tensor: Tensor
    done: torch.cuda.Event
    receive: Receive

    def finish(self) -> None:
        """Waits for the end of the copy, and passes the values on."""
        self.done.synchronize()
        self.receive(self.tensor.numpy())


class CudaTransfer:
    """The transfer for training on a GPU."""

    def __init__(self, device: torch.device, send: Return, release: Release) -> None:
        self._device = device
        self._send = send
        self._release = release
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[dict[str, Tensor]] = []
        self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._num_loaded = 0
        self._returning: deque[_Copy] = deque()  # results of updates
        self._fetching: deque[_Copy] = deque()

    def load(self, batch: Batch, weights: Array) -> DeviceBatch | SequenceBatch:
        """Starts a copy to the GPU. The current stream waits for it; this thread does not. `weights`: float32[B]."""
        tensors = _tensors(batch, weights)
        if not self._buffers:
            for _ in range(2):
                buffer = {name: torch.empty_like(source, device=self._device) for name, source in tensors.items()}
                self._buffers.append(buffer)
            # Earlier uses of this memory were ordered on the current stream, where the buffers were allocated.
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        which = self._num_loaded % 2
        self._num_loaded += 1
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._free[which])
            for name, source in tensors.items():
                self._buffers[which][name].copy_(source, non_blocking=True)
            done = self._note()
        torch.cuda.current_stream(self._device).wait_event(done)
        return _kind(batch)(**self._buffers[which])

    def give_back(self, batch: Batch, result: Tensor) -> None:
        """Starts to copy the result to the host. Sends the results that have arrived, and releases their slots."""
        self._free[(self._num_loaded - 1) % 2].record(torch.cuda.current_stream(self._device))
        self._returning.append(self._copy(result, partial(self._return, batch)))
        self._collect(MAX_BEHIND)

    def fetch(self, tensor: Tensor, receive: Receive) -> None:
        """Starts to copy a tensor to the host. `collect`, `give_back` or `flush` calls `receive` after its arrival."""
        self._fetching.append(self._copy(tensor, receive))

    def mark(self) -> Callable[[], None]:
        """Returns a function that waits, on any thread, for the copies to the host that were started before."""
        done = self._note()
        return lambda: done.synchronize()

    def collect(self) -> bool:
        """Sends the results that have arrived, without waiting. Returns whether others are still in transit."""
        self._collect(MAX_BEHIND)
        return bool(self._returning or self._fetching)

    def flush(self) -> None:
        """Waits until all results and fetched tensors have been sent, and all slots released."""
        self._collect(0)

    def _collect(self, most: int) -> None:
        """Sends the results that have arrived. Waits until at most `most` results of batches are in transit."""
        while self._fetching and (not most or _is_done(self._fetching[0].done)):
            self._fetching.popleft().finish()
        while self._returning and (len(self._returning) > most or _is_done(self._returning[0].done)):
            self._returning.popleft().finish()

    def _copy(self, tensor: Tensor, receive: Receive) -> _Copy:
        return _Copy(tensor.to("cpu", non_blocking=True), self._note(), receive)

    def _return(self, batch: Batch, result: NDArray[Any]) -> None:
        self._send(batch, result)
        self._release(batch.slot)

    def _note(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def lock_memory(memory: Array) -> None:
    """Locks the pages of an array, so that copies to the GPU need no staging buffer; raises RuntimeError on failure.

    Needs a CUDA context on this thread. Calls the driver, because a failure of the runtime's `cudaHostRegister` would
    remain the runtime's last error, which torch would report for the next kernel.
    """
    try:
        register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"CUDA cannot lock the learner's memory: {error}") from error
    status = register(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), ctypes.c_uint(0))
    if status != 0:
        raise RuntimeError(
            f"CUDA cannot lock {memory.nbytes:,} bytes of the learner's memory (CUresult {status}): "
            "the container, or the limit of locked memory (ulimit -l), may forbid it"
        )


def copy_to_host(tree: Any) -> Any:
    """Returns a copy of a tree of dictionaries, lists and tuples. Call `mark` next to wait until it is complete."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", non_blocking=True, copy=True)
    if isinstance(tree, dict):
        return {key: copy_to_host(value) for key, value in tree.items()}
    return type(tree)(map(copy_to_host, tree)) if isinstance(tree, list | tuple) else tree


def make_transfer(
    device: torch.device, memory: Array, send: Return, release: Release, lock: Callable[[Array], None] = lock_memory
) -> HostTransfer | CudaTransfer:
    """Returns the transfer for `device`. `memory` contains all slots; for a GPU, it is page-locked if possible."""
    if device.type == "cpu":
        return HostTransfer(send, release)
    try:
        lock(memory)
    except RuntimeError as error:
        log.warning("%s. Batches are copied through CUDA's staging buffers instead, which is slower", error)
    return CudaTransfer(device, send, release)


def _is_done(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _kind(batch: Batch) -> type[DeviceBatch] | type[SequenceBatch]:
    return DeviceBatch if batch.span is None else SequenceBatch


def _tensors(batch: Batch, weights: Array) -> dict[str, Tensor]:
    """Returns views of the fields that the batch has."""
    arrays = {name: getattr(batch, name) for name in _kind(batch)._fields if name != "weights"} | {"weights": weights}
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
