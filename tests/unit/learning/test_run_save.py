"""A save has both parts under one manifest, contains only finite numbers, and survives a full disk."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from apex.errors import DivergedError
from apex.learning.run_save import is_finite, save_run
from apex.runs.checkpoints.checkpoint import ReplayPart, load_with_manifest
from apex.runs.checkpoints.folder import find_latest
from apex.types import Progress
from chaos.saves.saver import Saver, make_run, read_run


def make_saver(tmp_path, num_saves=2):
    run = make_run(tmp_path)
    saver = Saver(run, tmp_path / "memory")
    for _ in range(num_saves):
        saver.save()
    return run, saver


def make_state(saver, **changes):
    state = {"num_updates": saver.num_updates + 10, "optimizer": {}, "rng": {}}
    network = saver.network.state_dict()
    return {**state, "online": network, "target": network, **changes}


def test_manifest_names_the_snapshots(tmp_path):
    run, _ = make_saver(tmp_path)
    assert load_with_manifest(run.checkpoints / "000000020")[1].replay == [ReplayPart(0, 2, 300)]


def test_old_checkpoints_are_removed_and_the_best_policy_stays(tmp_path):
    run, _ = make_saver(tmp_path, 5)
    names = sorted(path.name for path in run.checkpoints.iterdir())
    best = ["best-before.safetensors", "best.safetensors"]
    assert names == ["000000040", "000000050", *best, "newest.json", "replay"]


@pytest.mark.parametrize("part", ["online", "target", "optimizer"])
def test_state_that_is_not_finite_is_refused(tmp_path, part):
    run, saver = make_saver(tmp_path)
    bad = {"state": [{"weight": torch.tensor([1.0, float("inf")])}]}
    with pytest.raises(DivergedError, match=r"\b30\b.*--learner\.learning-rate"):
        save_run(run, make_state(saver, **{part: bad}), Progress())
    assert find_latest(run.checkpoints).state.num_updates == 20


def test_integers_and_plain_values_are_finite():
    assert is_finite({"a": torch.arange(3), "b": [1.0, None, "x"], "c": (torch.ones(2),)})


FULL = """
import sys
from pathlib import Path
from chaos.saves.saver import Saver, make_run, read_run
place, memory = Path(sys.argv[1]), Path(sys.argv[2])
run = make_run(place)
saver = Saver(run, memory)
saver.save(); saver.save()
before = read_run(run.path)
filler = place / "filler"
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
failures = 0
for _ in range(3):
    try:
        saver.save()
    except OSError as error:
        failures += error.errno == 28
left = [path for path in run.path.rglob("*") if path.name.endswith(".partial")]
after = read_run(run.path)
filler.unlink()
saver.save()
print(failures, left, after == before, read_run(run.path).num_updates > before.num_updates)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
def test_small_file_system_that_is_full_loses_no_save(tmp_path):
    """The file system is 1 MB of tmpfs in a mount namespace of its own."""
    place = tmp_path / "small"
    place.mkdir()
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", place, sys.executable, FULL, tmp_path / "memory"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no mount namespace here")
    assert done.stdout.split(maxsplit=1)[1:] == ["[] True True\n"], done.stderr
    assert int(done.stdout.split()[0]) == 3


def test_full_disk_is_logged_at_each_save(tmp_path, caplog):
    run, saver = make_saver(tmp_path)
    before = read_run(run.path)

    def full(step):
        raise OSError(28, "No space left on device")

    for _ in range(2):
        assert save_run(run, make_state(saver), Progress(), steps=full) is None
    assert len(caplog.messages) == 2
    assert all("30" in message for message in caplog.messages)
    assert read_run(run.path) == before
    assert save_run(run, make_state(saver), Progress()) is not None
    assert dataclasses.is_dataclass(find_latest(run.checkpoints).state.config)
