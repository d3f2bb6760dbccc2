"""The best policy of a run is the policy with the best evaluation, even if the disk was full for a while."""

from dataclasses import replace

import numpy as np
import pytest
from support.checkpoints import SCHEMA

from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, LearnerConfig, NetworkConfig
from apex.dqn.networks import make_network
from apex.runs.checkpoints.best_policy import BestPolicy
from apex.runs.checkpoints.policy_file import BEST, find_best, read_policy
from apex.types import Parameters

CONFIG = Config(network=NetworkConfig(hidden=4, body_hidden=4))


def parameters(version):
    return Parameters(version, flatten_parameters(make_network(CONFIG.network, SCHEMA, seed=version)))


def kept(folder):
    info, _ = read_policy(find_best(folder))
    return info.num_updates, info.score


@pytest.fixture
def full(tmp_path):
    """A best policy with score 5; no new one can be written, because a folder has the name of its file."""
    best = BestPolicy(tmp_path, CONFIG, SCHEMA)
    assert best.keep(5.0, parameters(1)) == 5.0
    obstacle = tmp_path / f".{BEST}.partial"
    obstacle.mkdir()
    return best, tmp_path, obstacle


def test_only_an_equal_or_better_policy_replaces_the_best(tmp_path):
    best = BestPolicy(tmp_path, CONFIG, SCHEMA)
    assert [best.keep(score, parameters(i)) for i, score in enumerate([3.0, 2.0, 3.0, 1.0], 1)] == [3.0] * 4
    assert kept(tmp_path) == (3, 3.0)
    assert BestPolicy(tmp_path, CONFIG, SCHEMA).score == 3.0


def test_a_confirmed_policy_replaces_a_better_one(tmp_path):
    best = BestPolicy(tmp_path, CONFIG, SCHEMA)
    best.keep(9.0, parameters(1))
    assert best.keep(7.0, parameters(2), confirmed=True) == 7.0
    assert BestPolicy(tmp_path, CONFIG, SCHEMA).score == 7.0


def test_a_trained_policy_replaces_an_untrained_one_of_an_older_version(tmp_path):
    BestPolicy(tmp_path, CONFIG, SCHEMA).keep(9.0, parameters(0))
    assert BestPolicy(tmp_path, CONFIG, SCHEMA).keep(1.0, parameters(1)) == 1.0
    assert kept(tmp_path) == (1, 1.0)


def test_the_policy_that_a_run_starts_from_may_be_the_best(tmp_path):
    config = replace(CONFIG, learner=LearnerConfig(init_from="runs/other"))
    BestPolicy(tmp_path, config, SCHEMA).keep(9.0, parameters(0))
    assert BestPolicy(tmp_path, config, SCHEMA).keep(1.0, parameters(1)) == 9.0
    assert kept(tmp_path) == (0, 9.0)


def test_policy_that_was_not_written_is_written_at_the_next_evaluation(full, caplog):
    best, folder, obstacle = full
    assert best.keep(9.0, parameters(2)) == 9.0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert (kept(folder), best.score) == ((1, 5.0), 5.0)
    obstacle.rmdir()
    assert best.keep(8.0, None) == 9.0
    assert (kept(folder), best.score) == ((2, 9.0), 9.0)


def test_better_policy_replaces_the_one_that_was_not_written(full):
    best, folder, obstacle = full
    assert [best.keep(9.0, parameters(2)), best.keep(7.0, parameters(3)), best.keep(10.0, parameters(4))] == [9, 9, 10]
    obstacle.rmdir()
    best.keep(0.0, None)
    assert kept(folder) == (4, 10.0)


def test_best_policy_has_the_evaluated_values(tmp_path):
    BestPolicy(tmp_path, CONFIG, SCHEMA).keep(1.0, parameters(6))
    _, agent = read_policy(find_best(tmp_path))
    assert np.array_equal(flatten_parameters(agent.network), parameters(6).values)
