"""Frozen parts stay as they are, and the rest of the network learns as before."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import dpg, r2d2, trainers
from torch import nn

from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import freeze
from apex.config import Config, DpgConfig, LearnerConfig
from apexreplay.errors import UsageError

CPU = torch.device("cpu")
LEARNER = LearnerConfig(learning_rate=0.01, optimizer_epsilon=1e-4, num_threads=1)


def make(algorithm):
    """Returns an algorithm, and a batch of it as the update takes it."""
    if algorithm == "r2d2":
        config = r2d2.make_config(learner={"learning_rate": 0.01})
        schema = r2d2.make_schema(config)
        return make_algorithm(config, schema), r2d2.make_batch(np.random.default_rng(1), schema, ["whole", "short"])
    if algorithm in ("dpg", "sac"):
        config = Config(algorithm=algorithm, learner=LEARNER, dpg=DpgConfig(**dpg.SMALL))
        return make_algorithm(config, dpg.SCHEMA), dpg.make_batch()
    config = Config(algorithm=algorithm, learner=replace(LEARNER, optimizer="adam"), network=trainers.NETWORK)
    return make_algorithm(config, trainers.SCHEMA), None


def step(algorithm, batch, parts):
    """Returns the names of the tensors that one update changes if `parts` are frozen."""
    if batch is None:
        tape = trainers.Tape(trainers.make_batch(1))
        trainer = trainers.make_trainer(tape, algorithm=algorithm.name, freeze=parts)
        online, update = trainer.online, lambda: trainer.step(0.0)
    else:
        online, target = algorithm.make_network(), algorithm.make_network()
        freeze(online, parts)
        trained = algorithm.make_update(online, target, algorithm.make_optimizer(online), CPU)
        update = lambda: trained(batch)  # noqa: E731
    before = {name: tensor.clone() for name, tensor in online.named_parameters()}
    update()
    return {name for name, tensor in online.named_parameters() if not torch.equal(tensor, before[name])}, set(before)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dqn", "body"),
        ("dqn", "value, advantage.output"),
        ("iqn", "body"),
        ("r2d2", "q.body,recurrent.weight_hh_l0"),
        ("dpg", "policy"),
        ("dpg", "critics"),
        ("sac", "policy"),
        ("sac", "critics"),
        ("sac", "log_temperature,critics.hidden1"),
    ],
)
def test_frozen_parts_stay_and_all_others_change(name, parts):
    changed, names = step(*make(name), parts)
    frozen = {each for each in names if each.startswith(tuple(f"{part.strip()}" for part in parts.split(",")))}
    assert frozen
    assert changed == names - frozen


def test_a_part_is_a_whole_name_or_all_below_it():
    network = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "body2", "head")})
    assert freeze(network, "body") == 2
    assert {name for name, each in network.named_parameters() if not each.requires_grad} == {"body.weight", "body.bias"}
    assert freeze(network, "body, head.bias") == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("torso", r"no parameters in 'torso'; use body, head"),
        ("body,", r"no parameters in ''"),
        ("body,head", "no parameter .* left"),
    ],
)
def test_unknown_parts_and_a_network_that_cannot_learn_are_refused(parts, message):
    network = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("body", "head")})
    with pytest.raises(UsageError, match=f"learner.freeze {parts!r}: .*{message}"):
        freeze(network, parts)
