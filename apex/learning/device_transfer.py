"""From a slot of the ring to the device, and the way back of priorities and of the slot.

Without CUDA a batch is a view of the slot. With CUDA copies run on a stream of their own, from memory that is locked,
into one of two buffers, while the update before still computes; and nothing here waits for the device as long as it is
no more than `MAX_BEHIND` steps behind. A slot stays as it is until what was made of it is known: a batch that no update
could be made with is looked at then. So the ring needs `MAX_BEHIND` slots more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from apex.dqn.gradient_step import DeviceBatch
from apex.learning.batch_ring import MAX_BEHIND, Batch
from apex.types import Array

log = logging.getLogger("apex")


Return = Callable[[Batch, NDArray[Any]], None]  # takes a batch, and what the update made of it
Release = Callable[[int], None]  # takes a slot that may be filled again


class HostTransfer:
    """The device is this processor."""

    def __init__(self, send: Return, release: Release) -> None:
        self._send = send
        self._release = release

    def load(self, batch: Batch, weights: Array) -> DeviceBatch:
        """Views of the batch's memory; `weights`: float32[B]."""
        return DeviceBatch(*map(torch.from_numpy, _arrays(batch, weights)))

    def give_back(self, batch: Batch, result: Tensor) -> None:
        """Sends what the update made of the batch, and releases its slot."""
        self._send(batch, result.numpy())
        self._release(batch.slot)

    def collect(self) -> bool:
        """Whether a result is on its way: never."""
        return False

    def flush(self) -> None:
        """Every result has left already."""


class _Returning(NamedTuple):
    """What an update made of a batch, on its way to the host."""

    batch: Batch
    result: Tensor
    done: torch.cuda.Event


class CudaTransfer:
    """The device is a GPU."""

    def __init__(self, device: torch.device, send: Return, release: Release) -> None:
        self._device = device
        self._send = send
        self._release = release
        self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: list[DeviceBatch] = []
        self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._num_loaded = 0
        self._returning: deque[_Returning] = deque()

    def load(self, batch: Batch, weights: Array) -> DeviceBatch:
        """Starts the copy, which the current stream waits for, not this thread. `weights`: float32[B]."""
        arrays = [torch.from_numpy(array) for array in _arrays(batch, weights)]
        while len(self._buffers) < 2:
            self._buffers.append(DeviceBatch(*(torch.empty_like(array, device=self._device) for array in arrays)))
        which = self._num_loaded % 2
        self._num_loaded += 1
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._free[which])
            for target, source in zip(self._buffers[which], arrays, strict=True):
                target.copy_(source, non_blocking=True)
            done = self._note()
        torch.cuda.current_stream(self._device).wait_event(done)
        return self._buffers[which]

    def give_back(self, batch: Batch, result: Tensor) -> None:
        """Starts the result's way back; hands on those that have arrived, and releases their slots."""
        self._free[(self._num_loaded - 1) % 2].record(torch.cuda.current_stream(self._device))
        self._returning.append(_Returning(batch, result.to("cpu", non_blocking=True), self._note()))
        self._collect(MAX_BEHIND)

    def collect(self) -> bool:
        """Hands on what has arrived, without waiting; tells whether more is on its way."""
        self._collect(MAX_BEHIND)
        return bool(self._returning)

    def flush(self) -> None:
        """Waits until all results and slots have left."""
        self._collect(0)

    def _collect(self, most: int) -> None:
        """Hands on what is done; waits until no more than `most` are under way."""
        while self._returning and (len(self._returning) > most or _is_done(self._returning[0].done)):
            returning = self._returning.popleft()
            returning.done.synchronize()
            self._send(returning.batch, returning.result.numpy())
            self._release(returning.batch.slot)

    def _note(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


def lock_memory(memory: Array) -> None:
    """Has CUDA lock the pages of an array, so that copies from it are not staged; raises RuntimeError."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(
            f"CUDA cannot lock {memory.nbytes:,} bytes of the learner's memory (error {int(status)}): "
            "raise the limit of locked memory, `ulimit -l unlimited`"
        )


def make_transfer(
    device: torch.device,
    memory: Array,
    send: Return,
    release: Release,
    lock: Callable[[Array], None] = lock_memory,
) -> HostTransfer | CudaTransfer:
    """The way to `device`; `memory` is what all slots lie in, and is locked for copies where a GPU can have it so."""
    if device.type == "cpu":
        return HostTransfer(send, release)
    try:
        lock(memory)
    except RuntimeError as error:
        log.warning("%s; until then batches are copied by way of CUDA's own buffers, which takes longer", error)
    return CudaTransfer(device, send, release)


def _is_done(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _arrays(batch: Batch, weights: Array) -> Sequence[Array]:
    return batch.stacks, batch.action, batch.n_step_return, batch.discount, weights
