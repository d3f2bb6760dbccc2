"""After a power loss at any moment, the newest save that can be seen is whole, and a finished save is there."""

import logging
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from support.checkpoints import NETWORK, SCHEMA, make_state
from support.power_loss import Disk, write
from support.store_builders import SCHEMA as STORE_SCHEMA
from support.store_builders import create, make_segment

from apex.algorithms.parameters import flatten_parameters
from apex.cloud.host.key_exchange import make_pairs
from apex.config import Config, EnvironmentConfig
from apex.dqn.networks import make_network
from apex.runs.checkpoints.checkpoint import save_checkpoint, sealed_folder
from apex.runs.checkpoints.folder import find_latest, prune
from apex.runs.checkpoints.paths import MANIFEST, NEWEST
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, find_best, read_policy, save_best
from apex.transport.curve.key_store import public_digits
from apex.types import Role
from apexreplay.errors import ApexError
from apexreplay.files.atomic_files import replace_file
from apexreplay.snapshots.folder import SnapshotFolder, shard_folder
from apexreplay.snapshots.writer import SnapshotWriter

NUM_SAVES = 3


class Files:
    """A file that is replaced, in a folder that does not exist yet."""

    def save(self, root, number):
        replace_file(root / "run" / "file", bytes([number]) * 100)

    def find(self, root):
        path = root / "run" / "file"
        data = path.read_bytes() if path.exists() else bytes(100)
        assert data == data[:1] * 100
        return [data[0]]


class Snapshots:
    """Snapshots of one of two shards."""

    def __init__(self, path):
        self.store = create(path)
        self.path = path

    def folder(self, root):
        return SnapshotFolder(shard_folder(root / "replay", 2, 1))

    def save(self, root, number):
        for segment in range(4 * number - 4, 4 * number):
            self.store.insert(make_segment(segment))
        folder = self.folder(root)
        options = {"run_id": 1, "num_drawn": lambda: 0, "file_bytes": 300}
        assert SnapshotWriter(self.path, STORE_SCHEMA.table, folder, **options).take().number == number

    def find(self, root):
        folder = self.folder(root)
        found = folder.load_latest()
        assert found == folder.newest()
        return [0 if found is None else found.number]


class Checkpoints:
    """The two newest checkpoints, and the file that names the newest one."""

    def save(self, root, number):
        save_checkpoint(root / "checkpoints", make_state(number))
        prune(root / "checkpoints", 2)

    def find(self, root):
        folder = root / "checkpoints"
        found = find_latest(folder)
        assert not any((path / MANIFEST).exists() for path in found.bad)
        is_unnamed = found.state is not None and not (folder / NEWEST).exists()
        assert len(found.passed_over) == len(found.bad) + is_unnamed
        named = sealed_folder(folder).manifest(NEWEST)["num_updates"] if (folder / NEWEST).exists() else 0
        return [0 if found.state is None else found.state.num_updates, named]


class Policies:
    """The best policy and the previous one."""

    def save(self, root, number):
        config = Config(network=NETWORK, environment=EnvironmentConfig(id="CartPole-v1"))
        info = PolicyInfo(schema=SCHEMA, config=config, num_updates=number, score=float(number))
        save_best(root, flatten_parameters(make_network(NETWORK, SCHEMA, seed=number)), info)

    def find(self, root):
        path = find_best(root)
        assert path in (None, root / BEST)
        return [0 if path is None else int(read_policy(path)[0].score)]


class HostKeys:
    """The keys of a host, which are created only once."""

    roles = (Role.ACTOR, Role.REPLAY)

    def save(self, root, number):
        make_pairs(SimpleNamespace(keys=root / str(number), roles=self.roles), "10.0.0.1")

    def find(self, root):
        folders = [root / str(number) for number in range(1, NUM_SAVES + 1)]
        there = [folder for folder in folders if folder.exists()]
        for folder in there:
            assert all(len(public_digits(folder, role)) == 64 for role in self.roles)
            assert all('address = "10.0.0.1"' in (folder / f"{role}.key").read_text() for role in self.roles)
        return [len(there)]


CASES = {case.__name__: case for case in (Files, Snapshots, Checkpoints, Policies, HostKeys)}


@pytest.fixture
def damaged(tmp_path, place):
    """Returns a function that saves three times, and returns the disk and the first power loss that damages a case."""
    logging.disable()

    def run(name, skipped=""):
        root, looked_at = tmp_path / "disk", tmp_path / "after"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        (place / "store").unlink(missing_ok=True)
        case = CASES[name](*([place / "store"] if name == "Snapshots" else []))
        disk = Disk(root, skipped)
        with disk.recording():
            disk.run([partial(case.save, root, number) for number in range(1, NUM_SAVES + 1)])
        for (done, _), tree in disk.losses.items():
            try:
                found = case.find(write(tree, looked_at))
            except (ApexError, AssertionError) as error:
                return disk, (done, error, sorted(tree))
            finally:
                shutil.rmtree(looked_at)
            if not {*found} <= {done, done + 1}:
                return disk, (done, found, sorted(tree))
        assert len(disk.losses) > 5 * NUM_SAVES
        return disk, None

    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", CASES)
def test_the_newest_save_is_whole_after_a_power_loss_at_any_step(damaged, name):
    assert damaged(name)[1] is None


def test_each_flush_of_a_file_or_folder_is_needed(damaged):
    sites = {name: damaged(name)[0].sites for name in CASES}
    needless = [
        site
        for site in sorted(set().union(*sites.values()))
        if all(damaged(name, site)[1] is None for name in CASES if site in sites[name])
    ]
    assert needless == []
