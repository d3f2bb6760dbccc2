"""All roles in one process keep the replay ratio and learn.

Segments and priorities are encoded and decoded, but not sent. tests/system/test_serial_run.py tests that a run with the
same seed is the same.
"""

import dataclasses

import numpy as np
import pytest
import torch

from apex.config import (
    ActorConfig,
    Config,
    EnvironmentConfig,
    EvaluatorConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    RunConfig,
)
from apex.environments.factory import describe
from apex.facts import EndReason
from apex.launch.preflight.fit import fit_one_process
from apex.launch.serial.run import open_serial_run
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apexreplay.process.lifecycle import Stop

NUM_UPDATES = 2_500
CARTPOLE = Config(
    seed=3,
    environment=EnvironmentConfig(id="CartPole-v1", clip_rewards=False),
    actor=ActorConfig(num_actors=4, segment_length=10, parameters_period=5),
    replay=ReplayConfig(capacity=2_000, max_bytes=200_000, min_size_to_sample=200, samples_per_insert=8),
    learner=LearnerConfig(
        batch_size=32, optimizer="adam", learning_rate=1e-3, target_period=50, publish_period=5, loss="huber"
    ),
    network=NetworkConfig(hidden=32, body_hidden=32),
    evaluator=EvaluatorConfig(enabled=False),
    run=RunConfig(max_updates=NUM_UPDATES),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learns: the replay server's status, the number of steps, and the mean scores of the curve."""
    before = torch.get_num_threads()
    schema = describe(CARTPOLE.environment, CARTPOLE.actor.n_step)
    config, _ = fit_one_process(CARTPOLE, schema)
    run = dataclasses.replace(config.run, folder=str(tmp_path_factory.mktemp("runs")))
    folder = RunFolder.create(dataclasses.replace(config, run=run), schema, argv=[])
    with open_serial_run(folder, Stop()) as system:
        system.run()
        assert folder.end == EndReason("updates", NUM_UPDATES)
        status, num_steps = system.experience.server.status(), system.experience.actor.num_steps
    torch.set_num_threads(before)
    scores = [row["scalars"]["actors/mean_score"] for row in read_curve(folder.curves / "actor.jsonl")]
    return status, num_steps, scores


def test_a_run_keeps_the_replay_ratio_and_stores_all_steps(trained):
    status, num_steps, _ = trained
    assert status.refused == 0
    assert status.duplicate_segments == 0
    assert status.num_drawn == NUM_UPDATES * 32
    # Samples may be ahead by the tolerance, 0.1 * 8 * 200, and by a batch; inserts by what is stored at once, 4 * 12.
    ahead = NUM_UPDATES * 32 - 8 * (status.num_inserted - 200)
    assert 0.1 * 8 * 200 - 8 * 48 <= ahead <= 0.1 * 8 * 200 + 32
    # Steps since the last cut and open windows are not stored.
    assert 0 <= 4 * num_steps - status.num_inserted <= 4 * (10 + 2)


def test_a_run_learns(trained):
    """The mean is over all four actors, one with epsilon 0.4. A random policy scores 22."""
    assert np.mean(trained[2][-3:]) > 60
