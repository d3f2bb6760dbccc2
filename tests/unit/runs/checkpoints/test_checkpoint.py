"""Checkpoints: a loaded state equals the saved state; damage is noticed, and an older checkpoint is used instead."""

import errno
import logging
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import NETWORK, SCHEMA, flip_a_bit, make_state, names, same
from support.steps import CallAt, Crash, crash_at
from torch import nn

from apex.algorithms.optimizers import make_optimizer
from apex.algorithms.parameters import flatten_parameters
from apex.config import LearnerConfig
from apex.dqn.networks import make_network
from apex.errors import CheckpointError
from apex.runs.checkpoints.checkpoint import ReplayPart, load_checkpoint, load_with_manifest, save_checkpoint, verify
from apex.runs.checkpoints.folder import find_latest, prune, set_aside
from apex.runs.checkpoints.policy_file import BEST
from apex.types import Progress


class Momenta(torch.optim.Optimizer):
    """Keeps two tensors, a number and a tuple per parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "rates": (0.5, 0.75), "name": None})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                for i, rate in enumerate(group["rates"]):
                    before = state.get(f"momentum_{i}", torch.zeros_like(parameter))
                    state[f"momentum_{i}"] = rate * before + parameter.grad
                state["count"] = state.get("count", 0) + 1
                state["shape"] = tuple(parameter.shape)
                parameter -= group["lr"] * (state["momentum_0"] - state["momentum_1"] / state["count"])


OPTIMIZERS = {
    "torch's Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "our Adam": lambda parameters: make_optimizer(LearnerConfig(optimizer="adam"), parameters),
    "our RMSProp": lambda parameters: make_optimizer(LearnerConfig(optimizer="rmsprop"), parameters),
    "several tensors per parameter": Momenta,
}


def make_checkpoints(folder, *updates):
    return [save_checkpoint(folder, make_state(n)) for n in updates]


def train(network, optimizer, first, last):
    for i in range(first, last):
        generator = torch.Generator().manual_seed(i)
        loss = network(torch.rand((8, 1, 3), generator=generator)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loaded_state_equals_saved_state(tmp_path, name):
    network = make_network(NETWORK, SCHEMA, seed=1)
    optimizer = OPTIMIZERS[name](network.parameters())
    train(network, optimizer, 0, 3)
    state = make_state(online=network, optimizer=optimizer)
    loaded = load_checkpoint(save_checkpoint(tmp_path, state))
    for field in ("num_updates", "progress", "config", "schema"):
        assert getattr(loaded, field) == getattr(state, field)
    assert same(dict(state.online), loaded.online)
    assert same(dict(state.target), loaded.target)
    assert same(state.optimizer, loaded.optimizer)
    assert same(state.rng, loaded.rng)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_equals_uninterrupted_training(tmp_path, name):
    network = make_network(NETWORK, SCHEMA, seed=1)
    optimizer = OPTIMIZERS[name](network.parameters())
    train(network, optimizer, 0, 4)
    path = save_checkpoint(tmp_path, make_state(online=network, optimizer=optimizer))
    train(network, optimizer, 4, 8)

    state = load_checkpoint(path)
    resumed = make_network(NETWORK, SCHEMA, seed=2)
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    resumed.load_state_dict(state.online)
    resumed_optimizer.load_state_dict(state.optimizer)
    train(resumed, resumed_optimizer, 4, 8)
    assert np.array_equal(flatten_parameters(network), flatten_parameters(resumed))


def test_tensor_layouts_and_similar_names_round_trip(tmp_path):
    transposed = torch.arange(6.0).reshape(2, 3).t()
    rng = {
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0), 0: torch.tensor(3.0), "0": torch.tensor(4.0)},
        "shared": [transposed, transposed],
        "empty": torch.zeros(0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "numbers": (1, 2.5, float("inf"), True, None, "word", 2**100),
    }
    assert same(rng, load_checkpoint(save_checkpoint(tmp_path, make_state(rng=rng))).rng)


def test_checkpoint_does_not_change_with_the_network(tmp_path):
    network = make_network(NETWORK, SCHEMA, seed=1)
    before = flatten_parameters(network)
    path = save_checkpoint(tmp_path, make_state(online=network))
    nn.init.zeros_(next(network.parameters()))
    network.load_state_dict(load_checkpoint(path).online)
    assert np.array_equal(flatten_parameters(network), before)


def test_values_without_a_file_form_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"rng\.0 is set\b"):
        save_checkpoint(tmp_path, make_state(rng=[{1, 2}]))


def test_folder_and_manifest_describe_the_checkpoint(tmp_path):
    part = ReplayPart(0, 12, 3_456)
    path = save_checkpoint(tmp_path / "checkpoints", make_state(12345), [part])
    assert path == tmp_path / "checkpoints" / "000012345"
    assert names(path) == ["learner.safetensors", "manifest.json"]
    manifest = load_with_manifest(path)[1]
    assert (manifest.num_updates, manifest.progress.num_steps, manifest.replay) == (12345, 1_234_500, [part])
    assert manifest.file.num_bytes == (path / "learner.safetensors").stat().st_size


def test_saving_an_update_again_replaces_the_checkpoint(tmp_path):
    save_checkpoint(tmp_path, make_state(7))
    path = save_checkpoint(tmp_path, make_state(7, progress=Progress(1)))
    assert load_checkpoint(path).progress.num_steps == 1
    assert names(tmp_path) == ["000000007", "newest.json"]
    assert len(names(path)) == 2


def steps_of_a_save(folder):
    """Returns the names of the steps that save one checkpoint."""
    steps = CallAt("", lambda: None)
    save_checkpoint(folder, make_state(2), steps=steps)
    return steps.taken


@pytest.mark.parametrize("again", [False, True], ids=["new", "replaced"])
def test_crash_at_any_step_leaves_the_new_or_the_old_checkpoint(tmp_path, again):
    steps = steps_of_a_save(tmp_path / "whole")
    assert len(steps) >= 7
    for number in range(len(steps)):
        folder = tmp_path / str(number)
        make_checkpoints(folder, 1, *([2] if again else []))
        with pytest.raises(Crash):
            save_checkpoint(folder, make_state(2, progress=Progress(1)), steps=crash_at("", skip=number))
        late = number > steps.index("rename the manifest")
        found = find_latest(folder).state
        assert (found.num_updates, found.progress.num_steps) == ((2, 1) if late else (2, 200) if again else (1, 100))
        path = save_checkpoint(folder, make_state(2, progress=Progress(5)))
        assert load_checkpoint(path).progress.num_steps == 5
        assert len(names(path)) == 2


@pytest.mark.parametrize("step", ["write a file", "rename a file", "write the manifest", "rename the manifest"])
def test_disk_error_leaves_the_old_or_after_the_rename_the_new(tmp_path, step):
    (path,) = make_checkpoints(tmp_path, 2)

    def fail():
        raise OSError(errno.ENOSPC, "full")

    for number in (2, 3):
        with pytest.raises(OSError, match="full"):
            save_checkpoint(tmp_path, make_state(number, progress=Progress(1)), steps=CallAt(step, fail))
        assert load_checkpoint(path).progress.num_steps == 200
        assert names(path) == ["learner.safetensors", "manifest.json"]
        assert names(tmp_path) == ["000000002", "newest.json"]
    with pytest.raises(OSError, match="full"):
        save_checkpoint(tmp_path, make_state(2, progress=Progress(1)), steps=CallAt("flush the folder", fail))
    assert load_checkpoint(path).progress.num_steps == 1
    assert len(names(path)) == 2


def test_full_disk_leaves_only_the_older_checkpoints(tmp_path):
    path = save_checkpoint(tmp_path, make_state(7))
    before = names(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # Simulates a disk with 1,000 free bytes.
    try:
        for num_updates in (7, 8):
            with pytest.raises(OSError, match="File too large"):
                save_checkpoint(tmp_path, make_state(num_updates, progress=Progress(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(path).progress.num_steps == 700
    assert (names(path), names(tmp_path)) == (before, ["000000007", "newest.json"])
    save_checkpoint(tmp_path, make_state(8))
    assert find_latest(tmp_path).state.num_updates == 8


# --- damage ---------------------------------------------------------------------------------------------------------


def no_manifest(path):
    (path / "manifest.json").unlink()


def no_file(path):
    (path / "learner.safetensors").unlink()


def truncated(path):
    file = path / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def one_bit(path):
    flip_a_bit(path / "learner.safetensors")


def truncated_manifest(path):
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:20])


def spaced_manifest(path):
    """The same JSON with another space."""
    file = path / "manifest.json"
    file.write_text(file.read_text().replace(": ", ":  ", 1))


def other_manifest(path):
    other = save_checkpoint(path.parent.with_name("elsewhere"), make_state(3))
    shutil.copy(other / "manifest.json", path)


def later_format(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"format": 3', '"format": 4'))


DAMAGES = {  # damage: pattern of the error
    no_manifest: "000000002 .* manifest.json",
    no_file: r"000000002/learner\.safetensors",
    truncated: r"000000002/learner\.safetensors .*SHA-256",
    one_bit: r"000000002/learner\.safetensors .*SHA-256",
    truncated_manifest: r"000000002/manifest\.json",
    spaced_manifest: r"000000002/manifest\.json .*SHA-256",
    other_manifest: "000000002 .* 3$",
    later_format: r"000000002/manifest\.json .*\b4\b.*\b3\b",
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.items())
def test_damaged_checkpoint_is_refused_by_name(tmp_path, damage, message):
    (path,) = make_checkpoints(tmp_path, 2)
    verify(path)
    damage(path)
    for function, argument in ((load_checkpoint, path), (find_latest, tmp_path)):
        with pytest.raises(CheckpointError, match=message if function is load_checkpoint else "000000002"):
            function(argument)


@pytest.mark.parametrize("damage", DAMAGES)
def test_search_falls_back_to_the_checkpoint_before_and_logs_it(tmp_path, damage, caplog):
    first, second = make_checkpoints(tmp_path, 1, 2)
    damage(second)
    assert find_latest(tmp_path).path == first
    assert find_latest(tmp_path).state.num_updates == 1
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "000000002" in caplog.records[0].getMessage()


@pytest.mark.parametrize("name", ["manifest.json", "learner.safetensors"])
def test_search_does_not_skip_a_checkpoint_that_cannot_be_read(tmp_path, name, monkeypatch):
    """It may be intact, and would be set aside."""
    _, second = make_checkpoints(tmp_path, 1, 2)
    read = Path.read_bytes

    def fail(path):
        if path == second / name:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.read_bytes", fail)
        with pytest.raises(CheckpointError, match=f"000000002/{name}") as refused:
            find_latest(tmp_path)
    assert refused.value.remedy.startswith("try again")
    assert find_latest(tmp_path).path == second


def test_search_finds_the_checkpoint_with_most_updates(tmp_path):
    make_checkpoints(tmp_path, 999, 1_000_000_000, 5)
    assert find_latest(tmp_path).state.num_updates == 1_000_000_000


def test_search_finds_nothing_in_a_new_run(tmp_path):
    (tmp_path / BEST).write_bytes(b"")
    assert find_latest(tmp_path).state is None
    assert find_latest(tmp_path / "nowhere").path is None


def test_unfinished_first_checkpoint_is_logged_and_skipped(tmp_path, caplog):
    with pytest.raises(Crash):
        save_checkpoint(tmp_path, make_state(1), steps=crash_at("rename the manifest"))
    assert find_latest(tmp_path).state is None
    assert "000000001" in caplog.text


def test_missing_newest_checkpoint_is_noticed(tmp_path, caplog):
    _, second = make_checkpoints(tmp_path, 1, 2)
    shutil.rmtree(second)
    found = find_latest(tmp_path)
    assert found.state.num_updates == 1
    assert "000000002" in found.passed_over[0]
    shutil.rmtree(tmp_path / "000000001")
    with pytest.raises(CheckpointError, match="000000002"):
        find_latest(tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes() + b" ")]
)
def test_unusable_newest_json_is_reported(tmp_path, damage):
    make_checkpoints(tmp_path, 1, 2)
    damage(tmp_path / "newest.json")
    found = find_latest(tmp_path)
    assert found.state.num_updates == 2
    assert "newest.json" in found.passed_over[0]


def test_damaged_checkpoints_are_set_aside_before_pruning(tmp_path):
    """Otherwise, a damaged checkpoint would count as one of those that are kept."""
    _, second, third, fourth = make_checkpoints(tmp_path, 1, 2, 3, 4)
    one_bit(third)
    no_manifest(fourth)
    found = find_latest(tmp_path)
    set_aside(tmp_path, found)
    assert names(tmp_path) == ["000000001", "000000002", "damaged-000000003", "newest.json"]
    save_checkpoint(tmp_path, make_state(5))
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["000000002", "000000005", "damaged-000000003", "newest.json"]
    assert find_latest(tmp_path).passed_over == []
    assert found.path == second


# --- pruning --------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_policies(tmp_path):
    make_checkpoints(tmp_path, 10, 9, 11, 8)
    (tmp_path / BEST).write_bytes(b"weights")
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["000000010", "000000011", BEST, "newest.json"]


def test_prune_removes_nothing_if_the_newest_is_damaged(tmp_path, caplog):
    *_, newest = make_checkpoints(tmp_path, 1, 2, 3)
    one_bit(newest)
    with pytest.raises(CheckpointError, match="000000003"):
        verify(newest)
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["000000001", "000000002", "000000003", "newest.json"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "000000003" in caplog.text


def test_prune_removes_unfinished_checkpoints_older_than_the_newest(tmp_path):
    _, second, _ = make_checkpoints(tmp_path, 1, 2, 3)
    no_manifest(second)
    (tmp_path / "000000004").mkdir()  # a checkpoint that is being written
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["000000001", "000000003", "000000004", "newest.json"]


def test_prune_without_finished_checkpoints_does_nothing(tmp_path):
    prune(tmp_path / "nowhere", keep=1)
    (tmp_path / "000000001").mkdir()
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["000000001"]
