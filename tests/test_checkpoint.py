"""A checkpoint gives back exactly what was saved or says which file is bad; a policy plays as the network did."""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from apex.checkpoint import (
    BEST,
    CheckpointError,
    LearnerState,
    PolicyInfo,
    latest_good,
    load,
    load_latest,
    load_policy,
    prune,
    save,
    save_policy,
    verify,
)
from apex.config import Config, ConfigError, EnvironmentConfig, LearnerConfig, NetworkConfig
from apex.networks import flatten_parameters, make_network
from apex.optimizers import make_optimizer
from apex.types import Schema

SCHEMA = Schema(frame_shape=(3,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
NETWORK = NetworkConfig(hidden=4, body_hidden=4)


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


def make_state(num_updates=7, *, online=None, optimizer=None, **changes):
    online = online or make_network(NETWORK, SCHEMA, seed=num_updates)
    state = LearnerState(
        num_updates=num_updates,
        num_steps=100 * num_updates,
        config=Config(seed=5, network=NETWORK),
        schema=SCHEMA,
        online=online.state_dict(),
        target=make_network(NETWORK, SCHEMA, seed=99).state_dict(),
        optimizer=(optimizer or torch.optim.SGD(online.parameters(), lr=0.1)).state_dict(),
        rng={"numpy": np.random.default_rng(3).bit_generator.state, "torch": torch.get_rng_state()},
    )
    return state._replace(**changes)


def make_checkpoints(folder, *updates):
    return [save(folder, make_state(n)) for n in updates]


def same(a, b):
    """Equal in types, order of keys, dtypes and every bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def train(network, optimizer, first, last):
    for i in range(first, last):
        generator = torch.Generator().manual_seed(i)
        loss = network(torch.rand((8, 1, 3), generator=generator)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


# --- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_comes_back_as_it_was(tmp_path, name):
    network = make_network(NETWORK, SCHEMA, seed=1)
    optimizer = OPTIMIZERS[name](network.parameters())
    train(network, optimizer, 0, 3)
    state = make_state(online=network, optimizer=optimizer)
    loaded = load(save(tmp_path, state))
    for field in ("num_updates", "num_steps", "config", "schema"):
        assert getattr(loaded, field) == getattr(state, field)
    assert same(dict(state.online), loaded.online)
    assert same(dict(state.target), loaded.target)
    assert same(state.optimizer, loaded.optimizer)
    assert same(state.rng, loaded.rng)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_training_goes_on_as_if_it_had_never_stopped(tmp_path, name):
    network = make_network(NETWORK, SCHEMA, seed=1)
    optimizer = OPTIMIZERS[name](network.parameters())
    train(network, optimizer, 0, 4)
    path = save(tmp_path, make_state(online=network, optimizer=optimizer))
    train(network, optimizer, 4, 8)

    state = load(path)
    resumed = make_network(NETWORK, SCHEMA, seed=2)
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    resumed.load_state_dict(state.online)
    resumed_optimizer.load_state_dict(state.optimizer)
    train(resumed, resumed_optimizer, 4, 8)
    assert np.array_equal(flatten_parameters(network), flatten_parameters(resumed))


def test_an_optimizer_that_has_not_stepped_yet_round_trips_too(tmp_path):
    optimizer = torch.optim.Adam(make_network(NETWORK, SCHEMA, seed=1).parameters())
    assert same(optimizer.state_dict(), load(save(tmp_path, make_state(optimizer=optimizer))).optimizer)


def test_tensors_of_any_layout_and_names_that_look_alike_round_trip(tmp_path):
    transposed = torch.arange(6.0).reshape(2, 3).t()
    rng = {
        "a.b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0), 0: torch.tensor(3.0), "0": torch.tensor(4.0)},
        "shared": [transposed, transposed],
        "empty": torch.zeros(0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "numbers": (1, 2.5, float("inf"), True, None, "word", 2**100),
    }
    assert same(rng, load(save(tmp_path, make_state(rng=rng))).rng)


def test_what_is_saved_is_a_copy(tmp_path):
    network = make_network(NETWORK, SCHEMA, seed=1)
    before = flatten_parameters(network)
    path = save(tmp_path, make_state(online=network))
    nn.init.zeros_(next(network.parameters()))
    network.load_state_dict(load(path).online)
    assert np.array_equal(flatten_parameters(network), before)


def test_refuses_to_save_what_neither_tensors_nor_json_can_say(tmp_path):
    with pytest.raises(TypeError, match=r"rng\.0 is set: a checkpoint holds tensors, and what JSON can say"):
        save(tmp_path, make_state(rng=[{1, 2}]))


def test_the_folder_is_named_by_its_updates_and_its_manifest_lists_the_file(tmp_path):
    path = save(tmp_path / "checkpoints", make_state(12345))
    assert path == tmp_path / "checkpoints" / "000012345"
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(file.name for file in path.iterdir()) == ["learner.safetensors", "manifest.json"]
    assert manifest["files"]["learner.safetensors"]["bytes"] == (path / "learner.safetensors").stat().st_size


def test_the_same_update_saved_again_replaces_the_checkpoint(tmp_path):
    save(tmp_path, make_state(7))
    path = save(tmp_path, make_state(7, num_steps=1))
    assert load(path).num_steps == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_older_checkpoint_of_the_update_and_no_rest(tmp_path):
    path = save(tmp_path, make_state(7))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # Stands for a disk with room for 1,000 bytes.
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, make_state(7, num_steps=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load(path).num_steps == 700
    assert len(list(path.iterdir())) == 2


# --- damage ---------------------------------------------------------------------------------------------------------


def no_manifest(path):
    (path / "manifest.json").unlink()


def no_file(path):
    (path / "learner.safetensors").unlink()


def cut_off(path):
    file = path / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def one_bit(path):
    flip_a_bit(path / "learner.safetensors")


def torn_manifest(path):
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:20])


def foreign_manifest(path):
    (path / "manifest.json").write_text('{"format": 1, "num_updates": 2, "files": {}}')


def later_format(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))


def another_file(path):
    """A good manifest of something that is no learner's state."""
    data = b"not a tensor in it"
    shutil.rmtree(path)
    path.mkdir()
    (path / "learner.safetensors").write_bytes(data)
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": 1, "num_updates": 2, "files": {"learner.safetensors": facts}}
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [
    (no_manifest, "000000002 is not a whole checkpoint: no manifest.json, which is written last"),
    (no_file, "cannot read .*learner.safetensors: No such file"),
    (cut_off, r"learner.safetensors is damaged: it has \d+ bytes, not \d+"),
    (one_bit, "learner.safetensors is damaged: its SHA-256 is not the one that was written"),
    (torn_manifest, "manifest.json cannot be read: "),
    (foreign_manifest, "manifest.json cannot be read: no 'learner.safetensors'"),
    (later_format, "manifest.json cannot be read: its format is 2, but this program reads 1"),
    (another_file, "learner.safetensors cannot be read: "),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_and_cause(tmp_path, damage, message):
    (path,) = make_checkpoints(tmp_path, 2)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGES])
def test_the_latest_falls_back_loudly_to_the_one_before(tmp_path, damage, caplog):
    first, second = make_checkpoints(tmp_path, 1, 2)
    damage(second)
    assert latest_good(tmp_path) == first
    assert load_latest(tmp_path).num_updates == 1
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert "000000002" in caplog.records[0].getMessage()


def test_the_latest_is_the_one_of_most_updates_whenever_it_was_written(tmp_path):
    make_checkpoints(tmp_path, 999, 1_000_000_000, 5)
    assert load_latest(tmp_path).num_updates == 1_000_000_000


def test_there_is_no_latest_where_there_never_was_one(tmp_path):
    (tmp_path / BEST).write_bytes(b"")
    assert load_latest(tmp_path) is None
    assert latest_good(tmp_path / "nowhere") is None


def test_a_first_checkpoint_that_was_never_finished_is_named_and_the_run_begins_anew(tmp_path, caplog):
    (path,) = make_checkpoints(tmp_path, 1)
    no_manifest(path)
    assert load_latest(tmp_path) is None
    assert "000000001 is not a whole checkpoint" in caplog.text


def test_raises_rather_than_begin_anew_where_all_are_bad(tmp_path):
    for path in make_checkpoints(tmp_path, 1, 2):
        one_bit(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole; the newest: .*000000002"):
        load_latest(tmp_path)


# --- pruning --------------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_prune_keeps_the_newest_and_the_policies(tmp_path):
    make_checkpoints(tmp_path, 10, 9, 11, 8)
    (tmp_path / BEST).write_bytes(b"weights")
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["000000010", "000000011", BEST]


def test_prune_removes_nothing_while_the_newest_is_damaged(tmp_path, caplog):
    *_, newest = make_checkpoints(tmp_path, 1, 2, 3)
    one_bit(newest)
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["000000001", "000000002", "000000003"]
    assert "no older checkpoint is removed" in caplog.text


def test_an_unfinished_checkpoint_does_not_count_and_goes_once_a_newer_one_is_whole(tmp_path):
    _, second, _ = make_checkpoints(tmp_path, 1, 2, 3)
    no_manifest(second)
    (tmp_path / "000000004").mkdir()  # Being written.
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["000000001", "000000003", "000000004"]


def test_prune_of_nothing_is_nothing(tmp_path):
    prune(tmp_path / "nowhere", keep=1)
    (tmp_path / "000000001").mkdir()
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["000000001"]


def test_verify_tells_a_damaged_checkpoint_from_a_whole_one(tmp_path):
    whole, damaged = make_checkpoints(tmp_path, 1, 2)
    one_bit(damaged)
    with pytest.raises(CheckpointError, match="000000002"):
        verify(damaged)
    verify(whole)


# --- policies -------------------------------------------------------------------------------------------------------


def make_policy(seed=4, **changes):
    network = make_network(NETWORK, SCHEMA, seed=seed)
    facts = {"schema": SCHEMA, "network": NETWORK, "environment": EnvironmentConfig(id="CartPole-v1")}
    return network, PolicyInfo(**{**facts, "num_updates": 30, "score": 12.5, **changes})


@pytest.mark.parametrize("score", [12.5, None])
def test_a_policy_plays_as_the_network_did(tmp_path, score):
    network, info = make_policy(score=score)
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    loaded_info, loaded = load_policy(tmp_path / BEST)
    observation = torch.rand(16, 1, 3)
    assert loaded_info == info
    assert torch.equal(loaded(observation), network(observation))
    assert not loaded.training


def test_a_policy_can_be_read_with_safetensors_alone(tmp_path):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    assert same(safetensors.torch.load_file(tmp_path / BEST), dict(sorted(network.state_dict().items())))


def test_a_better_policy_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    for seed, score in ((1, 1.0), (2, 2.0)):
        network, info = make_policy(seed, score=score)
        save_policy(tmp_path / BEST, flatten_parameters(network), info)
    assert load_policy(tmp_path / BEST)[0].score == 2.0
    assert names(tmp_path) == [BEST]


def test_the_online_network_of_a_checkpoint_is_a_policy_without_a_score(tmp_path):
    state = make_state(7)
    info, network = load_policy(save(tmp_path, state))
    assert same(dict(state.online), dict(network.state_dict()))
    assert (info.num_updates, info.score, info.network) == (7, None, NETWORK)


def test_refuses_values_that_do_not_fit_the_network(tmp_path):
    _, info = make_policy()
    with pytest.raises(ConfigError, match="do not fit a network"):
        save_policy(tmp_path / BEST, np.zeros(3, np.float32), info)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":"1"', b'"format":"3"', "its format is 3, but this program reads 1"),
        (b'"__metadata__"', b'"__metadaten_"', "best.safetensors cannot be read: "),
        (b"hidden", b"hidaen", r"best.safetensors cannot be read: (unknown knob network.hidaen|no 'hid)"),
        (b'"sha256":"', b'"sha257":"', "no 'sha256'"),
    ],
)
def test_a_policy_of_another_kind_is_refused_with_the_reason(tmp_path, old, new, message):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    data = (tmp_path / BEST).read_bytes()
    assert old in data
    (tmp_path / BEST).write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        load_policy(tmp_path / BEST)


def test_a_policy_with_a_flipped_bit_is_refused(tmp_path):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    flip_a_bit(tmp_path / BEST)
    with pytest.raises(CheckpointError, match="its SHA-256 is not the one that was written"):
        load_policy(tmp_path / BEST)


def test_a_policy_that_does_not_fit_its_own_network_is_refused(tmp_path):
    path = save(tmp_path, make_state(1, config=Config(network=NetworkConfig(hidden=5, body_hidden=4))))
    with pytest.raises(CheckpointError, match="000000001 does not fit the network that it names"):
        load_policy(path)


def test_a_policy_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*best.safetensors: No such file"):
        load_policy(tmp_path / BEST)
