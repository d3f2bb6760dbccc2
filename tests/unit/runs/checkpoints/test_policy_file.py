"""A loaded policy acts as its network did; a damaged file is refused and named, and the previous best replaces it."""

import dataclasses
import json
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from support.checkpoints import NETWORK, SCHEMA, flip_a_bit, make_state, names, same
from support.steps import CallAt

from apex.algorithms.parameters import flatten_parameters
from apex.config import ActorConfig, Config, EnvironmentConfig, NetworkConfig, RunConfig
from apex.dqn.algorithm import DqnAlgorithm
from apex.dqn.networks import make_network
from apex.errors import CheckpointError
from apex.runs.checkpoints.checkpoint import save_checkpoint
from apex.runs.checkpoints.folder import prune
from apex.runs.checkpoints.policy_file import BEFORE, BEST, PolicyInfo, find_best, read_policy, save_best, save_policy
from apex.runs.checkpoints.tensor_file import digest_of
from apexreplay.errors import UsageError
from apexreplay.files.atomic_files import seal


def make_policy(seed=4, **changes):
    network = make_network(NETWORK, SCHEMA, seed=seed)
    config = Config(network=NETWORK, environment=EnvironmentConfig(id="CartPole-v1"))
    return network, PolicyInfo(**{"schema": SCHEMA, "config": config, "num_updates": 30, "score": 12.5, **changes})


@pytest.mark.parametrize("score", [12.5, None])
def test_a_policy_plays_as_the_network_did(tmp_path, score):
    network, info = make_policy(score=score)
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    loaded_info, agent = read_policy(tmp_path / BEST)
    observation = torch.rand(16, 1, 3)
    assert loaded_info == info
    assert torch.equal(agent.network(observation), network(observation))
    assert not agent.network.training


def test_a_policy_can_be_read_with_safetensors_alone(tmp_path):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    assert same(safetensors.torch.load_file(tmp_path / BEST), dict(sorted(network.state_dict().items())))


def test_better_policy_replaces_the_file_without_leftovers(tmp_path):
    for seed, score in ((1, 1.0), (2, 2.0)):
        network, info = make_policy(seed, score=score)
        save_policy(tmp_path / BEST, flatten_parameters(network), info)
    assert read_policy(tmp_path / BEST)[0].score == 2.0
    assert names(tmp_path) == [BEST]


def test_checkpoint_can_be_read_as_a_policy_without_a_score(tmp_path):
    state = make_state(7)
    info, agent = read_policy(save_checkpoint(tmp_path, state))
    assert same(dict(state.online), dict(agent.network.state_dict()))
    assert (info.num_updates, info.score, info.config.network) == (7, None, NETWORK)


def test_refuses_values_that_do_not_fit_the_network(tmp_path):
    _, info = make_policy()
    with pytest.raises(UsageError, match=r"network\.\*"):
        save_policy(tmp_path / BEST, np.zeros(3, np.float32), info)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":"5"', b'"format":"6"', "format.* 6, .*format 5"),
        (b'"__metadata__"', b'"__metadaten_"', "best.safetensors cannot be read: "),
        (b"hidden", b"hidaen", "best.safetensors.*changed"),
        (b"seal", b"sael", '"seal"'),
    ],
)
def test_a_policy_of_another_kind_is_refused_with_the_reason(tmp_path, old, new, message):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    data = (tmp_path / BEST).read_bytes()
    assert old in data
    (tmp_path / BEST).write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=message):
        read_policy(tmp_path / BEST)


def test_a_policy_with_a_flipped_bit_is_refused(tmp_path):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    flip_a_bit(tmp_path / BEST)
    with pytest.raises(CheckpointError, match=r"SHA-256.*differs"):
        read_policy(tmp_path / BEST)


@pytest.mark.parametrize("file_format", ["2", "3", "4"])
def test_older_policy_formats_have_gray_images_and_no_parts(tmp_path, file_format):
    network, info = make_policy()
    fields = info.to_dict()
    missing = ("parts",) if file_format == "4" else ("parts", "action_size", "masked")
    fields["schema"] = {name: value for name, value in fields["schema"].items() if name not in missing}
    fields["environment"] |= {"frame_stack": 4}
    del fields["environment"]["grayscale"]
    sealed = seal({**fields, "names": {}, "sha256": digest_of(dict(network.state_dict()))}).decode()
    old = {"format": file_format, "policy": sealed if file_format != "2" else json.dumps(fields), "names": "{}"}
    safetensors.torch.save_file(network.state_dict(), tmp_path / BEST, old)
    loaded_info, agent = read_policy(tmp_path / BEST)
    played = dataclasses.replace(info.environment, frame_stack=info.schema.stack, grayscale=True)
    assert loaded_info == dataclasses.replace(info, config=dataclasses.replace(info.config, environment=played))
    assert same(dict(agent.network.state_dict()), dict(network.state_dict()))


def make_by_n_step(config, schema):
    """An algorithm of the user whose network depends on a setting of the actors."""
    network = dataclasses.replace(config.network, hidden=config.actor.n_step)
    return DqnAlgorithm(dataclasses.replace(config, network=network), schema)


def test_custom_algorithm_gets_all_settings_except_run_and_transport(tmp_path):
    config = Config(
        algorithm=f"{__name__}:make_by_n_step",
        actor=ActorConfig(n_step=7),
        network=NETWORK,
        environment=EnvironmentConfig(id="CartPole-v1"),
        run=RunConfig(folder="/home/me/runs"),
    )
    network = make_by_n_step(config, SCHEMA).make_network()
    save_policy(tmp_path / BEST, flatten_parameters(network), make_policy(config=config)[1])
    info, agent = read_policy(tmp_path / BEST)
    assert agent.network.advantage.hidden.out_features == 7
    assert info.config == dataclasses.replace(config, run=RunConfig())
    assert b"/home/me" not in (tmp_path / BEST).read_bytes()


def test_policy_whose_tensors_do_not_fit_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, make_state(1, config=Config(network=NetworkConfig(hidden=5, body_hidden=4))))
    with pytest.raises(CheckpointError, match=r"tensors of .*000000001"):
        read_policy(path)


def test_a_policy_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*best.safetensors: No such file"):
        read_policy(tmp_path / BEST)


def test_every_flipped_bit_of_a_policy_is_noticed(tmp_path):
    network, info = make_policy()
    save_policy(tmp_path / BEST, flatten_parameters(network), info)
    data, rng = (tmp_path / BEST).read_bytes(), np.random.default_rng(0)
    for bit in rng.choice(8 * len(data), 300, replace=False).tolist():
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / BEST).write_bytes(flipped)
        with pytest.raises(CheckpointError, match=BEST):
            read_policy(tmp_path / BEST)


def keep_best(folder, *scores):
    for score in scores:
        network, info = make_policy(int(score), score=score)
        save_best(folder, flatten_parameters(network), info)


def best_score(folder):
    return read_policy(find_best(folder))[0].score


def test_there_is_no_best_before_the_first_evaluation(tmp_path):
    assert find_best(tmp_path) is None


@pytest.mark.parametrize("damage", [flip_a_bit, lambda file: file.unlink(), lambda file: file.write_bytes(b"")])
def test_damaged_best_policy_falls_back_to_the_previous_and_logs_it(tmp_path, damage, caplog):
    keep_best(tmp_path, 1.0, 2.0, 3.0)
    assert best_score(tmp_path) == 3.0
    assert names(tmp_path) == [BEFORE, BEST]
    damage(tmp_path / BEST)
    assert best_score(tmp_path) == 2.0
    assert BEST in caplog.text
    keep_best(tmp_path, 4.0)  # The damaged file must not replace the intact one.
    damage(tmp_path / BEST)
    assert best_score(tmp_path) == 2.0
    damage(tmp_path / BEFORE)
    if (tmp_path / BEST).exists():
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
            find_best(tmp_path)


def test_prune_keeps_the_best_policy_even_if_saved_meanwhile(tmp_path):
    for num_updates in range(1, 5):
        save_checkpoint(tmp_path, make_state(num_updates))
    prune(tmp_path, 2, steps=CallAt("remove a file", lambda: keep_best(tmp_path, 9.0)))
    assert best_score(tmp_path) == 9.0
    assert names(tmp_path) == ["000000003", "000000004", BEFORE, BEST, "newest.json"]
