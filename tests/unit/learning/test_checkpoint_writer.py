"""Checkpoints are written during training. Each is a complete state of one moment or absent; errors are reported."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from support.trainers import NETWORK, SCHEMA, Tape, make_batch, make_trainer
from support.waiting import until

from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, RunConfig
from apex.dqn.networks import make_network
from apex.errors import DivergedError
from apex.learning.checkpoint_writer import CheckpointWriter
from apex.learning.run_save import save_run
from apex.runs.checkpoints.checkpoint import load_checkpoint
from apex.runs.checkpoints.folder import find_latest
from apex.runs.folder import RunFolder
from apex.types import Progress

DEADLINE = 30.0  # seconds; the awaited events take milliseconds


class Disk:
    """Writes when the test says so."""

    def __init__(self, error=None):
        self.written, self.go, self.error = [], threading.Event(), error

    def write(self, state, progress):
        assert self.go.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        self.written.append((state["num_updates"], progress, threading.get_ident()))


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.go.set()


def at(num_updates):
    return lambda: ({"num_updates": num_updates}, lambda: None)


def test_only_one_checkpoint_is_written_at_a_time(disk):
    writer = CheckpointWriter(disk.write)
    assert writer.begin(at(1), Progress(10))
    assert not writer.begin(at(2), Progress(20))
    writer.check()
    assert disk.written == []
    disk.go.set()
    writer.wait()
    assert writer.begin(at(3), Progress(30))
    writer.close()
    assert [(number, progress) for number, progress, _ in disk.written] == [(1, Progress(10)), (3, Progress(30))]
    assert threading.get_ident() not in [thread for *_, thread in disk.written]


@pytest.mark.parametrize("look", ["begin", "check", "wait"])
def test_error_of_a_write_is_raised_once(disk, look):
    disk.error = DivergedError("the network is not finite")
    disk.go.set()
    writer = CheckpointWriter(disk.write)
    writer.begin(at(1), Progress())
    until(lambda: writer._writing.done(), "end of the write")
    with pytest.raises(DivergedError, match="not finite"):
        writer.begin(at(2), Progress()) if look == "begin" else getattr(writer, look)()
    writer.check()
    writer.close()


def test_close_waits_for_the_write_and_raises_nothing(disk):
    disk.error = DivergedError("the network is not finite")
    writer = CheckpointWriter(disk.write)
    writer.begin(at(1), Progress())
    threading.Timer(0.1, disk.go.set).start()
    writer.close()
    assert writer._writing.done()


def test_only_the_writer_thread_waits_for_a_copy_from_the_device(disk):
    copied = threading.Event()
    disk.go.set()
    writer = CheckpointWriter(disk.write)
    writer.begin(lambda: ({"num_updates": 1}, lambda: copied.wait(DEADLINE)), Progress())
    assert disk.written == []
    copied.set()
    writer.wait()
    assert len(disk.written) == 1


def test_heartbeats_continue_while_the_last_checkpoint_is_written(disk):
    ticks = []

    def tick():
        ticks.append(len(disk.written))
        if len(ticks) == 3:
            disk.go.set()

    writer = CheckpointWriter(disk.write)
    writer.begin(at(1), Progress())
    writer.wait(tick)
    assert ticks[:3] == [0, 0, 0]
    assert len(disk.written) == 1


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_checkpoint_has_the_state_at_its_beginning(tmp_path, optimizer):
    """Updates change parameters and averages in place while an earlier state is being written."""
    trainer = make_trainer(Tape(*map(make_batch, range(9))), optimizer=optimizer, target_period=2)
    folder = RunFolder.create(Config(run=RunConfig(folder=str(tmp_path), name="one")), SCHEMA, argv=[])
    go = threading.Event()

    def write(state, progress):
        assert go.wait(DEADLINE)
        save_run(folder, state, progress)

    writer = CheckpointWriter(write)
    for _ in range(3):
        trainer.step(0.0)
    twin = make_trainer(Tape(*map(make_batch, range(3, 9))), optimizer=optimizer, target_period=2)
    expected = flatten_parameters(trainer.online)
    writer.begin(trainer.snapshot, Progress(5))
    for _ in range(6):
        trainer.step(0.0)
    go.set()
    writer.wait()
    state = load_checkpoint(folder.checkpoints / "000000003")
    twin.restore(state._asdict())
    np.testing.assert_array_equal(flatten_parameters(twin.online), expected)
    for _ in range(6):
        twin.step(0.0)
    np.testing.assert_array_equal(flatten_parameters(twin.online), flatten_parameters(trainer.online))
    writer.close()


KILLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
sys.path[:0] = sys.argv[2:]
import torch
from support.trainers import SCHEMA, Tape, make_batch, make_trainer
from apex.config import CheckpointConfig, Config, RunConfig
from apex.learning.checkpoint_writer import CheckpointWriter
from apex.learning.run_save import save_run
from apex.runs.folder import RunFolder
from apex.types import Progress

def train(folder, fatal_step):
    config, step = Config(checkpoint=CheckpointConfig(keep=2), run=RunConfig(folder=str(folder), name="one")), 0

    def count(name):
        nonlocal step
        step += 1
        if step == fatal_step:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = make_trainer(Tape(*map(make_batch, range(24))))
    run = RunFolder.create(config, SCHEMA, argv=[])
    writer = CheckpointWriter(partial(save_run, run, steps=count))
    while trainer.step(0.0):
        if trainer.num_updates % 8 == 0:
            writer.wait()
            writer.begin(trainer.snapshot, Progress(trainer.num_updates))
    writer.close()

torch.set_num_threads(1)
status, fatal_step = None, 0
while status != 0:
    fatal_step += 1
    child = os.fork()
    if child == 0:
        train(Path(sys.argv[1]) / str(fatal_step), fatal_step)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
"""


def test_kill_at_any_step_of_a_write_leaves_the_new_or_the_old_checkpoint(tmp_path):
    """The training thread makes updates during all writes except the last."""
    naive = make_trainer(Tape(*map(make_batch, range(24))))
    parameters = {}
    while naive.step(0.0):
        parameters[naive.num_updates] = flatten_parameters(naive.online)
    command = [sys.executable, "-c", KILLED, str(tmp_path), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    newest = [0]
    for folder in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        found = find_latest(folder / "one" / "checkpoints").state  # raises CheckpointError for a damaged one
        if found is not None:
            network = make_network(NETWORK, SCHEMA, seed=0)
            network.load_state_dict(found.online)
            np.testing.assert_array_equal(flatten_parameters(network), parameters[found.num_updates])
            newest.append(found.num_updates)
    assert len(list(tmp_path.iterdir())) >= 3 * 6  # steps of each write
    assert newest == sorted(newest)
    assert set(newest) == {0, 8, 16, 24}
