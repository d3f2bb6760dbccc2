"""A small run that saves its whole state, and reads it as a resume does, for tests that damage saves."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from apex.algorithms.optimizers import make_optimizer
from apex.algorithms.parameters import flatten_parameters
from apex.config import CheckpointConfig, Config, EnvironmentConfig, NetworkConfig, RunConfig
from apex.dqn.networks import make_network
from apex.learning.run_save import save_run, snapshot_folder
from apex.runs.checkpoints.folder import find_latest, set_aside
from apex.runs.checkpoints.policy_file import PolicyInfo, find_best, read_policy, save_best
from apex.runs.folder import RunFolder
from apex.schema import Schema
from apex.types import Progress, RunTime
from apexreplay.errors import UsageError
from apexreplay.files.atomic_files import Steps, uninterrupted
from apexreplay.frame_blob import make_blob
from apexreplay.item_kinds import Array
from apexreplay.snapshots.folder import SnapshotFolder
from apexreplay.snapshots.restore import restore
from apexreplay.snapshots.writer import SnapshotWriter
from apexreplay.store.layout import StoreSettings
from apexreplay.store.writer import StoreWriter
from apexreplay.types import Segment, Stream

SCHEMA = Schema(frame_shape=(16,), frame_dtype="uint8", stack=4, num_actions=3, n_step=3, codec="lz4")
SETTINGS = StoreSettings(capacity=4_000, max_bytes=400_000, num_streams=2, priority_exponent=0.6, min_priority=1e-6)
SEGMENT = 50  # transitions in the store
FILE_BYTES = 12_000  # bytes of blobs in a file of a snapshot, which therefore has several files


class Read(NamedTuple):
    """The state from which a resume continues."""

    num_updates: int
    parameters: str  # SHA-256 of the online network
    num_steps: int
    end_key: int  # inserted transitions of the snapshot
    size: int
    score: float | None  # updates of the best policy
    seconds: float  # seconds by the run's clock


class Saver:
    """A small run that saves everything that a run saves."""

    def __init__(self, folder: RunFolder, memory: Path, steps: Steps = uninterrupted) -> None:
        """Continues from the saves that exist, as a run does."""
        self._folder = folder
        self._steps = steps
        self.epoch = folder.next_epoch()
        found = find_latest(folder.checkpoints)
        set_aside(folder.checkpoints, found)
        self.network = make_network(folder.config.network, SCHEMA, seed=1)
        self._target = make_network(folder.config.network, SCHEMA, seed=2)
        self._optimizer = make_optimizer(folder.config.learner, self.network.parameters())
        self.num_updates = 0
        if found.state is not None:
            self.num_updates = found.state.num_updates
            self.network.load_state_dict(found.state.online)
        self.snapshots = snapshot_folder(folder.checkpoints, 1, 0)
        self.store = open_memory(memory, self.snapshots, folder.run_id, self.epoch)
        self._source = SnapshotWriter(
            memory,
            SCHEMA.table,
            SnapshotFolder(self.snapshots.path, steps=steps),
            run_id=folder.run_id,
            num_drawn=lambda: 7,
            file_bytes=FILE_BYTES,
            steps=steps,
        )
        self._number = self.store.receipt(0).contiguous

    def save(self) -> None:
        """Inserts some experience, makes an update, and saves every part."""
        for _ in range(3):
            self.store.insert(make_segment(self._number))
            self._number += 1
        self._source.take()
        self.num_updates += 10
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(0.001)
        save_run(
            self._folder,
            {
                "num_updates": self.num_updates,
                "online": self.network.state_dict(),
                "target": self._target.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "rng": {"torch": torch.get_rng_state()},
            },
            Progress(self.store.num_inserted, self.num_updates // 10, float(self.num_updates)),
            steps=self._steps,
        )
        info = PolicyInfo(
            schema=SCHEMA,
            config=self._folder.config,
            num_updates=self.num_updates,
            score=float(self.num_updates),
        )
        save_best(self._folder.checkpoints, flatten_parameters(self.network), info)
        self._folder.run_time = RunTime(float(self.num_updates))
        if self.num_updates % 50 == 0:
            self._folder.record_resume(self._folder.config, argv=["chaos"])


def make_run(folder: Path) -> RunFolder:
    """Creates a run below `folder`."""
    config = Config(
        environment=EnvironmentConfig(id="CartPole-v1"),
        network=NetworkConfig(hidden=8, body_hidden=8),
        checkpoint=CheckpointConfig(keep=2),
        run=RunConfig(folder=str(folder), name="chaos"),
    )
    return RunFolder.create(dataclasses.replace(config, seed=3), SCHEMA, argv=["python", "-m", "chaos", "saves"])


def make_segment(number: int) -> Segment:
    """Returns a segment of stream 0 with recognizable contents."""
    rng = np.random.default_rng(number)
    records: Array = np.zeros(SEGMENT, SCHEMA.table.record)
    records["n_step_return"] = number
    records["priority"] = rng.uniform(0.1, 1, SEGMENT)
    records["frame"] = np.arange(SEGMENT)
    records["next_frame"] = np.arange(SEGMENT) + 3
    records["depth"] = np.minimum(np.arange(SEGMENT) + 1, 4)
    records["next_depth"] = 4
    blob = make_blob([rng.bytes(16) for _ in range(SEGMENT + 3)])
    return Segment(Stream(0, 1), number, 0, records, blob)


def open_memory(path: Path, snapshots: SnapshotFolder, run_id: int, incarnation: int) -> StoreWriter:
    """Returns the existing memory, or else that of the newest snapshot, or else a new one, like a replay server."""
    if path.exists():
        return StoreWriter.attach(path, SCHEMA.table, SETTINGS)
    store = restore(snapshots, path, SCHEMA.table, SETTINGS, run_id=run_id, store_incarnation=incarnation)
    return store or StoreWriter.create(path, SCHEMA.table, SETTINGS, store_incarnation=incarnation)


def read_run(path: Path) -> Read:
    """Reads a run as a resume does; raises UsageError if it is refused."""
    folder = RunFolder.open(path)
    folder.restore_config_file()
    found = find_latest(folder.checkpoints)
    snapshot = snapshot_folder(folder.checkpoints, 1, 0).load_latest()
    best = find_best(folder.checkpoints)
    state = found.state
    if state is None or snapshot is None or best is None:
        raise UsageError(f"{path}: started from nothing: {state is None}, {snapshot is None}, {best is None}")
    if not all(isinstance(value, torch.Tensor) for value in state.online.values()):
        raise UsageError(f"{path}: the network has no tensors")
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.online.values())).hexdigest()
    return Read(
        state.num_updates,
        digest,
        state.progress.num_steps,
        snapshot.end_key,
        snapshot.size,
        read_policy(best)[0].score,
        folder.elapsed_seconds,
    )
