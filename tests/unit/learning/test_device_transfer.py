"""The way to a GPU and back, played on a device that is as far behind as the test says."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.trainers import SCHEMA, B, make_batch

from apex.config import LearnerConfig
from apex.learning.batch_ring import MAX_BEHIND, BatchRing
from apex.learning.device_transfer import CudaTransfer, HostTransfer, lock_memory, make_transfer


class Device:
    """Streams whose work is done when the test says so; what was called is noted."""

    def __init__(self):
        self.pending = deque()  # events in the order of recording
        self.num_recorded = 0
        self.current = Stream(self, "compute")

    def finish(self, count=10**6):
        """Gets so many events done."""
        for _ in range(min(count, len(self.pending))):
            self.pending.popleft().done = True


class Stream:
    def __init__(self, device, name="copies"):
        self.device, self.name, self.waited_for = device, name, []

    def wait_event(self, event):
        self.waited_for.append(event)


class Event:
    def __init__(self, device):
        self.device, self.done, self.recorded_on, self.synchronized = device, True, None, False

    def record(self, stream=None):
        self.done, self.recorded_on = False, (stream or self.device.current).name
        self.order = self.device.num_recorded
        self.device.num_recorded += 1
        self.device.pending.append(self)

    def query(self):
        return self.done

    def synchronize(self):
        while not self.done:
            self.device.finish(1)
        self.synchronized = True


@pytest.fixture
def device(monkeypatch):
    device = Device()

    @contextmanager
    def stream(chosen):
        before, device.current = device.current, chosen
        yield
        device.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Stream(device))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(device))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: device.current)
    return device


class Tape:
    def __init__(self):
        self.words, self.sent = [], []

    def send(self, batch, priorities):
        self.words.append(f"priorities {batch.parts[0].number}")
        self.sent.append((batch, priorities.copy()))

    def release(self, slot):
        self.words.append(f"release {slot}")


def make_cuda_feed():
    tape = Tape()
    return CudaTransfer(torch.device("cpu"), tape.send, tape.release), tape


def weights():
    return np.ones(B, np.float32)


def test_on_the_host_nothing_is_copied_and_all_leaves_at_once():
    tape, batch = Tape(), make_batch(1)
    host = make_transfer(torch.device("cpu"), np.zeros(0, np.uint8), tape.send, tape.release)
    assert type(host) is HostTransfer
    loaded = host.load(batch, weights())
    assert loaded.stacks.data_ptr() == batch.stacks.ctypes.data
    host.give_back(batch, torch.arange(B, dtype=torch.float32))
    host.flush()
    assert tape.words == ["priorities 1", "release 1"]
    np.testing.assert_array_equal(tape.sent[0][1], np.arange(B))


def test_two_batches_are_on_the_device_and_equal_those_on_the_host(device):
    cuda, _ = make_cuda_feed()
    batches = [make_batch(number) for number in range(3)]
    loaded = [cuda.load(batch, weights() * batch.parts[0].number) for batch in batches[:2]]
    for batch, on_device in zip(batches, loaded, strict=False):
        np.testing.assert_array_equal(on_device.stacks, batch.stacks)
        np.testing.assert_array_equal(on_device.action, batch.action)
        np.testing.assert_array_equal(on_device.n_step_return, batch.n_step_return)
        np.testing.assert_array_equal(on_device.discount, batch.discount)
        np.testing.assert_array_equal(on_device.weights, weights() * batch.parts[0].number)
    assert cuda.load(batches[2], weights()).stacks is loaded[0].stacks


def test_a_buffer_is_filled_again_only_after_the_update_that_read_it(device):
    cuda, _ = make_cuda_feed()
    copies = cuda._copy_stream
    for number in range(3):
        batch = make_batch(number)
        cuda.load(batch, weights())
        cuda.give_back(batch, torch.zeros(B))
        (freed,) = [event for event in cuda._free if event in device.pending and event.order == device.num_recorded - 2]
        assert freed is copies.waited_for[number]  # It is free after the update that read this very buffer.
    assert copies.waited_for[2] is copies.waited_for[0]  # the third copy waits for the first buffer
    assert copies.waited_for[1] is not copies.waited_for[0]


def test_the_update_waits_for_its_own_copy_and_this_thread_for_nothing(device):
    cuda, tape = make_cuda_feed()
    compute = device.current
    batch = make_batch(0)
    cuda.load(batch, weights())
    (copied,) = compute.waited_for
    assert copied.recorded_on == "copies"
    cuda.give_back(batch, torch.zeros(B))
    assert tape.words == []  # Neither is done, and nobody waits.
    assert not copied.synchronized


def test_a_slot_leaves_after_what_was_made_of_it(device):
    cuda, tape = make_cuda_feed()
    first, second = make_batch(0), make_batch(1)
    cuda.load(first, weights())
    device.finish()
    cuda.give_back(first, torch.zeros(B))
    assert tape.words == []
    device.finish()
    cuda.load(second, weights())
    cuda.give_back(second, torch.zeros(B))
    assert tape.words == ["priorities 0", "release 0"]
    cuda.flush()
    assert tape.words == ["priorities 0", "release 0", "priorities 1", "release 1"]


@pytest.mark.parametrize(("cuda", "slots"), [(False, 5), (True, 5 + MAX_BEHIND)])
def test_the_ring_has_slots_for_every_loader_and_for_what_a_gpu_keeps(cuda, slots):
    config = LearnerConfig(batch_size=8, num_loaders=3)
    ring = BatchRing.configured(config, 2, SCHEMA, cuda=cuda)
    assert (ring.num_slots, ring.num_shards, ring.part_size) == (slots, 2, 4)


def test_what_has_arrived_leaves_also_while_no_batch_comes(device):
    cuda, tape = make_cuda_feed()
    batch = make_batch(0)
    cuda.load(batch, weights())
    cuda.give_back(batch, torch.zeros(B))
    assert cuda.collect()
    assert tape.words == []  # It waited for nothing.
    device.finish()
    assert not cuda.collect()
    assert tape.words == ["priorities 0", "release 0"]


def test_the_host_is_never_far_ahead(device):
    cuda, tape = make_cuda_feed()
    for number in range(10):
        batch = make_batch(number)
        cuda.load(batch, weights())
        cuda.give_back(batch, torch.zeros(B))
        assert sum(word.startswith("priorities") for word in tape.words) == max(0, number + 1 - MAX_BEHIND)
        assert sum(word.startswith("release") for word in tape.words) >= max(0, number + 1 - MAX_BEHIND)


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_locked_or_it_says_what_to_do(monkeypatch, status):
    asked = []

    class Runtime:
        def cudaHostRegister(self, address, size, flags):  # noqa: N802
            asked.append((address, size, flags))
            return status

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = np.zeros(100, np.uint8)
    if status:
        with pytest.raises(RuntimeError, match=r"100 bytes.*ulimit -l"):
            lock_memory(memory)
    else:
        lock_memory(memory)
    assert asked == [(memory.ctypes.data, 100, 0)]


def test_memory_that_cannot_be_locked_is_a_warning_and_copied_all_the_same(device, caplog):
    def refuse(memory):
        raise RuntimeError("CUDA cannot lock it: ulimit -l unlimited")

    tape, batch = Tape(), make_batch(0)
    made = make_transfer(torch.device("cuda"), np.zeros(8, np.uint8), tape.send, tape.release, refuse)
    made._device = torch.device("cpu")
    np.testing.assert_array_equal(made.load(batch, weights()).stacks, batch.stacks)
    assert "ulimit -l unlimited" in caplog.text


def test_with_cuda_the_memory_is_locked_first(device):
    locked = []
    memory, tape = np.zeros(8, np.uint8), Tape()
    made = make_transfer(torch.device("cuda"), memory, tape.send, tape.release, locked.append)
    assert type(made) is CudaTransfer
    assert locked[0] is memory
