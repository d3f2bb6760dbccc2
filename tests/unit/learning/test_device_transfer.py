"""Transfers to and from a simulated GPU, whose delay the test sets."""

import ctypes
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.trainers import SCHEMA, B, make_batch

from apex.config import LearnerConfig
from apex.learning.batch_ring import MAX_BEHIND, BatchRing
from apex.learning.device_transfer import CudaTransfer, HostTransfer, copy_to_host, lock_memory, make_transfer


class Device:
    """Replaces CUDA's streams, whose work finishes when the test calls `finish`; records all calls."""

    def __init__(self):
        self.pending = deque()  # events in the order of recording
        self.num_recorded = 0
        self.current = Stream(self, "compute")

    def finish(self, count=10**6):
        """Completes this number of events."""
        for _ in range(min(count, len(self.pending))):
            self.pending.popleft().done = True


class Stream:
    def __init__(self, device, name="copies"):
        self.device, self.name, self.waited_for = device, name, []
        self.ordered_after = ""

    def wait_event(self, event):
        self.waited_for.append(event)

    def wait_stream(self, stream):
        self.ordered_after = stream.name


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
        self.calls, self.sent = [], []

    def send(self, batch, priorities):
        self.calls.append(f"priorities {batch.parts[0].number}")
        self.sent.append((batch, priorities.copy()))

    def release(self, slot):
        self.calls.append(f"release {slot}")


def make_cuda_feed():
    tape = Tape()
    return CudaTransfer(torch.device("cpu"), tape.send, tape.release), tape


def weights():
    return np.ones(B, np.float32)


def test_host_transfer_copies_nothing_and_sends_at_once():
    tape, batch = Tape(), make_batch(1)
    host = make_transfer(torch.device("cpu"), np.zeros(0, np.uint8), tape.send, tape.release)
    assert type(host) is HostTransfer
    loaded = host.load(batch, weights())
    assert loaded.stacks.data_ptr() == batch.stacks.ctypes.data
    host.give_back(batch, torch.arange(B, dtype=torch.float32))
    host.flush()
    assert tape.calls == ["priorities 1", "release 1"]
    np.testing.assert_array_equal(tape.sent[0][1], np.arange(B))


def test_the_mask_travels_where_there_is_one(device):
    cuda, tape = make_cuda_feed()
    mask = np.arange(3 * B).reshape(B, 3) % 2 == 0
    for transfer in (cuda, make_transfer(torch.device("cpu"), np.zeros(0, np.uint8), tape.send, tape.release)):
        assert transfer.load(make_batch(0), weights()).next_mask is None
    for transfer in (make_cuda_feed()[0], HostTransfer(tape.send, tape.release)):
        loaded = transfer.load(make_batch(0)._replace(next_mask=mask), weights())
        np.testing.assert_array_equal(loaded.next_mask, mask)
        assert len(loaded.tensors) == 6


def test_two_batches_on_the_device_equal_those_on_the_host(device):
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


def test_device_buffer_is_reused_only_after_its_update(device):
    cuda, _ = make_cuda_feed()
    copies = cuda._copy_stream
    for number in range(3):
        batch = make_batch(number)
        cuda.load(batch, weights())
        cuda.give_back(batch, torch.zeros(B))
        (freed,) = [event for event in cuda._free if event in device.pending and event.order == device.num_recorded - 2]
        assert freed is copies.waited_for[number]  # A buffer is free after the update that has read it.
    assert copies.waited_for[2] is copies.waited_for[0]  # the third copy waits for the first buffer
    assert copies.waited_for[1] is not copies.waited_for[0]


def test_only_the_update_waits_for_the_copy_to_the_device(device):
    cuda, tape = make_cuda_feed()
    compute = device.current
    batch = make_batch(0)
    cuda.load(batch, weights())
    (copied,) = compute.waited_for
    assert copied.recorded_on == "copies"
    cuda.give_back(batch, torch.zeros(B))
    assert tape.calls == []  # Neither copy is complete, and nothing waits for them.
    assert not copied.synchronized


def test_a_slot_leaves_after_what_was_made_of_it(device):
    cuda, tape = make_cuda_feed()
    first, second = make_batch(0), make_batch(1)
    cuda.load(first, weights())
    device.finish()
    cuda.give_back(first, torch.zeros(B))
    assert tape.calls == []
    device.finish()
    cuda.load(second, weights())
    cuda.give_back(second, torch.zeros(B))
    assert tape.calls == ["priorities 0", "release 0"]
    cuda.flush()
    assert tape.calls == ["priorities 0", "release 0", "priorities 1", "release 1"]


@pytest.mark.parametrize(("cuda", "slots"), [(False, 5), (True, 5 + MAX_BEHIND)])
def test_ring_has_slots_for_all_loaders_and_a_gpu(cuda, slots):
    config = LearnerConfig(batch_size=8, num_loaders=3)
    ring = BatchRing.configured(config, 2, SCHEMA, cuda=cuda)
    assert (ring.num_slots, ring.num_shards, ring.part_size) == (slots, 2, 4)


def test_results_are_sent_while_no_batch_arrives(device):
    cuda, tape = make_cuda_feed()
    batch = make_batch(0)
    cuda.load(batch, weights())
    cuda.give_back(batch, torch.zeros(B))
    assert cuda.collect()
    assert tape.calls == []  # `collect` does not wait.
    device.finish()
    assert not cuda.collect()
    assert tape.calls == ["priorities 0", "release 0"]


def test_the_host_is_never_far_ahead(device):
    cuda, tape = make_cuda_feed()
    for number in range(10):
        batch = make_batch(number)
        cuda.load(batch, weights())
        cuda.give_back(batch, torch.zeros(B))
        assert sum(call.startswith("priorities") for call in tape.calls) == max(0, number + 1 - MAX_BEHIND)
        assert sum(call.startswith("release") for call in tape.calls) >= max(0, number + 1 - MAX_BEHIND)


def test_new_buffers_are_filled_after_earlier_uses_of_their_memory(device):
    cuda, _ = make_cuda_feed()
    cuda.load(make_batch(0), weights())
    assert cuda._copy_stream.ordered_after == "compute"


def test_fetched_tensor_arrives_later_without_a_wait(device):
    cuda, tape = make_cuda_feed()
    arrived, batch = [], make_batch(0)
    cuda.load(batch, weights())
    cuda.give_back(batch, torch.zeros(B))
    cuda.fetch(torch.arange(3), lambda values: arrived.append(values.tolist()))
    assert cuda.collect()
    assert (tape.calls, arrived) == ([], [])
    device.finish()
    assert not cuda.collect()
    assert (tape.calls, arrived) == (["priorities 0", "release 0"], [[0, 1, 2]])


def test_the_first_parameters_arrive_although_no_batch_comes(device):
    cuda, _ = make_cuda_feed()
    arrived = []
    cuda.fetch(torch.arange(3), lambda values: arrived.append(values.tolist()))
    assert cuda.collect()
    device.finish()
    assert not cuda.collect()
    assert arrived == [[0, 1, 2]]


def test_fetched_tensor_delays_no_batch_and_arrives_at_the_end(device):
    cuda, tape = make_cuda_feed()
    arrived = []
    for number in range(MAX_BEHIND):
        cuda.load(make_batch(number), weights())
        cuda.give_back(make_batch(number), torch.zeros(B))
        cuda.fetch(torch.tensor([number]), lambda values: arrived.extend(values.tolist()))
    assert (tape.calls, arrived) == ([], [])
    cuda.flush()
    assert arrived == [0, 1]
    assert tape.calls == ["priorities 0", "release 0", "priorities 1", "release 1"]


def test_a_mark_waits_for_the_copies_before_it(device):
    cuda, _ = make_cuda_feed()
    wait = cuda.mark()
    (event,) = device.pending
    wait()
    assert event.synchronized


def test_copy_on_the_host_does_not_change_with_its_source():
    weight, rate = torch.ones(2, 3).T, torch.tensor(0.5)
    tree = {"state": {0: {"mean": weight}}, "groups": [{"lr": rate, "betas": (0.9, 0.99), "name": None}]}
    copy = copy_to_host(tree)
    weight.zero_()
    rate.zero_()
    assert copy["groups"] == [{"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "name": None}]
    assert torch.equal(copy["state"][0]["mean"], torch.ones(3, 2))


class Driver:
    """NVIDIA's library: every call returns `status`."""

    def __init__(self, status):
        self.status, self.asked = status, []

    def cuMemHostRegister_v2(self, *arguments):  # noqa: N802
        self.asked.append([argument.value for argument in arguments])
        return self.status


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_locked_by_the_driver_or_an_error_names_the_limit(monkeypatch, status):
    """CUDA's runtime must not be used: the next kernel would raise its last error."""
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.setattr(torch.cuda, "cudart", None)
    memory = np.zeros(100, np.uint8)
    if status:
        with pytest.raises(RuntimeError, match=r"100 bytes.*CUresult 2.*ulimit -l"):
            lock_memory(memory)
    else:
        lock_memory(memory)
    assert driver.asked == [[memory.ctypes.data, 100, 0]]


def test_memory_is_not_locked_without_the_cuda_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"cannot lock the learner's memory: libcuda\.so\.1"):
        lock_memory(np.zeros(100, np.uint8))


def test_unlockable_memory_is_a_warning_and_batches_are_copied(device, caplog):
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
