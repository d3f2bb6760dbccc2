"""Runs other algorithms than DQN with the real programs and commands: DPG, SAC, IQN, R2D2, and a user's algorithm."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import linear_q, masked_corridor
from support.programs import FEW_GAMES, UNSCORED

from apex import load_policy
from apex.runs.checkpoints.checkpoint import load_checkpoint
from apex.runs.checkpoints.folder import find_latest
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from examples import memory

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(700)  # longer than the tests' own deadlines

SMALL = ("--actors", "2", "--batch-size", "32", "--replay.min-size-to-sample", "300", "--replay.capacity", "4000")
SMALL += ("--run.no-tensorboard", *FEW_GAMES)


def run(programs, name, *arguments):
    programs.start(name, *arguments)
    assert programs.wait(name) == 0, programs.output(name)
    return programs.output(name)


def last_figures(folder):
    return read_curve(folder.curves / "learner.jsonl")[-1]["scalars"]


@pytest.mark.covers_programs
def test_a_custom_algorithm_trains_through_all_programs(programs, type_apex):
    shutil.copy(linear_q.__file__, programs.folder / "linear_q.py")
    own = ("--env", "CartPole-v1", "--algorithm", "linear_q:LinearQ", "--name", "own")
    run(programs, "train", "train", *own, *SMALL, *UNSCORED, *programs.offset, "--max-updates", "200")
    folder = RunFolder.open(programs.folder / "runs/own")
    figures = last_figures(folder)
    assert figures["learner/updates"] == 200
    assert np.isfinite(figures["learner/bias"])  # a figure of this algorithm
    last = ("--checkpoint", "last")
    output = type_apex("evaluate", "runs/own", *last, "--episodes", "2", "--json")
    assert json.loads(output.splitlines()[-1])["updates"] == 200
    assert "'linear-q' cannot be exported" in type_apex("export", "runs/own", status=2)


@pytest.mark.covers_programs
def test_continuous_actions_go_through_all_programs_and_commands(programs, type_apex):
    # No game reaches this score. Without one, the evaluator would have a low CPU priority.
    name = ("--env", "Pendulum-v1", "--name", "pendulum", "--stop-score", "1")
    run(programs, "train", "train", *name, *SMALL, *programs.offset, "--max-updates", "150")
    folder = RunFolder.open(programs.folder / "runs/pendulum")
    figures = last_figures(folder)
    assert {"learner/policy_loss", "learner/action_saturation", "learner/loss"} <= set(figures)
    video = programs.folder / "game.gif"
    output = type_apex("evaluate", "runs/pendulum", "--episodes", "2", "--video", str(video), "--json")
    assert json.loads(output.splitlines()[-1])["mean"] < 0
    assert video.stat().st_size > 1_000
    type_apex("export", "runs/pendulum", "--onnx")
    policy, again = load_policy(folder.path), load_policy(folder.path / "export/model.safetensors")
    observation = np.array([1.0, 0.0, 0.5], np.float32)
    assert policy.act(observation).shape == (1,)
    assert np.allclose(policy(observation), 2 * policy.act(observation))  # The torque of Pendulum is -2 ... 2.
    assert np.array_equal(policy(observation), again(observation))
    type_apex("report", "runs/pendulum", "--out", str(programs.folder / "report.html"))
    assert "policy" in Path(programs.folder / "report.html").read_text()
    run(programs, "resume", "train", "--resume", "runs/pendulum", "--max-updates", "200")
    assert last_figures(folder)["learner/updates"] == 200


def temperature(folder):
    """The temperature in the newest checkpoint, and how many steps of the optimizer have changed it."""
    state = load_checkpoint(find_latest(folder.checkpoints).path)
    steps = [values["step"] for values in state.optimizer["state"].values() if values["exp_avg"].dim() == 0]
    return math.exp(state.online["log_temperature"]), *map(int, steps)


@pytest.mark.covers_programs
def test_sac_goes_through_all_programs_and_resumes_its_temperature(programs, type_apex):
    name = ("--env", "Pendulum-v1", "--algorithm", "sac", "--learner.learning-rate", "1e-2", "--name", "sac")
    run(programs, "train", "train", *name, *SMALL, *UNSCORED, *programs.offset, "--max-updates", "150")
    folder = RunFolder.open(programs.folder / "runs/sac")
    assert {"learner/policy_loss", "learner/temperature", "learner/entropy"} <= set(last_figures(folder))
    before, num_steps = temperature(folder)
    assert num_steps == 150
    assert before < 0.8
    output = type_apex("evaluate", "runs/sac", "--episodes", "2", "--epsilon", "1", "--json")
    assert json.loads(output.splitlines()[-1])["mean"] < 0
    type_apex("export", "runs/sac", "--onnx")
    policy, again = load_policy(folder.path), load_policy(folder.path / "export/model.safetensors")
    observation = np.array([1.0, 0.0, 0.5], np.float32)
    assert np.array_equal(policy(observation), again(observation))
    run(programs, "resume", "train", "--resume", "runs/sac", "--max-updates", "160")
    after, num_steps = temperature(folder)
    assert num_steps == 160
    assert 0.8 < after / before < 1.25  # Ten steps change its logarithm by about 0.1.


@pytest.mark.covers_programs
def test_r2d2_learns_to_remember_over_sockets_and_resumes(programs, type_apex, monkeypatch):
    """Two shards, whose samplers send the sequences; without memory, the mean score of this task is 0."""
    shutil.copy(REPOSITORY / "examples/memory.py", programs.folder / "memory.py")
    name = ("--preset", "r2d2", "--env", "memory:make_cue", "--name", "cue", "--stop-score", "0.95")
    far = ("--replay.num-shards", "2", "--transport.no-shared-memory", "--evaluator.period-seconds", "2")
    run(programs, "train", "train", *name, *far, *programs.offset, "--actors", "4", "--max-updates", "2000")
    folder = RunFolder.open(programs.folder / "runs/cue")
    assert "reached the score 0.95" in programs.output("train")
    rows = read_curve(folder.curves / "replay.jsonl")
    assert rows[-1]["steps"] == 12 * rows[-1]["scalars"]["replay/num_inserted"]  # A sequence is an episode of 12 steps.
    output = type_apex("evaluate", "runs/cue", "--episodes", "20", "--json")
    assert json.loads(output.splitlines()[-1])["mean"] > 0.9
    monkeypatch.syspath_prepend(programs.folder)
    policy, environment = load_policy(folder.path), memory.make_cue()
    for seed in range(5):
        (observation, _), is_over = environment.reset(seed=seed), False
        policy.reset()
        while not is_over:
            observation, reward, is_over, _, _ = environment.step(policy(observation))
        assert reward == 1
    updates = last_figures(folder)["learner/updates"]
    limits = ("--stop-score", "none", "--max-updates", str(int(updates) + 20))
    run(programs, "resume", "train", "--resume", "runs/cue", *limits)
    assert last_figures(folder)["learner/updates"] == updates + 20


@pytest.mark.covers_programs
def test_iqn_goes_through_all_programs_and_resumes(programs, type_apex):
    name = ("--env", "CartPole-v1", "--algorithm", "iqn", "--iqn.layer-norm", "--name", "iqn", "--stop-score", "501")
    run(programs, "train", "train", *name, *SMALL, *programs.offset, "--max-updates", "150")
    folder = RunFolder.open(programs.folder / "runs/iqn")
    assert np.isfinite(last_figures(folder)["learner/loss"])
    output = type_apex("evaluate", "runs/iqn", "--episodes", "2", "--json")
    assert json.loads(output.splitlines()[-1])["mean"] > 5
    type_apex("export", "runs/iqn", "--onnx")
    policy, again = load_policy(folder.path), load_policy(folder.path / "export/model.safetensors")
    observation = np.array([0.1, 0.2, 0.03, 0.0], np.float32)
    assert np.array_equal(policy.q_values(observation), again.q_values(observation))
    run(programs, "resume", "train", "--resume", "runs/iqn", "--max-updates", "160")
    assert last_figures(folder)["learner/updates"] == 160


@pytest.mark.covers_programs
def test_a_masked_action_is_never_played_and_the_game_is_learned(programs, type_apex):
    shutil.copy(masked_corridor.__file__, programs.folder / "corridor.py")
    masked = ("--env", "corridor:Corridor", "--name", "masked", "--actor.epsilon-base", "0.9", "--stop-score", "9")
    run(programs, "train", "train", *masked, *SMALL, *programs.offset, "--max-updates", "800")
    output = type_apex("evaluate", "runs/masked", "--episodes", "20", "--epsilon", "0.5", "--json")
    assert json.loads(output.splitlines()[-1])["mean"] > 0.9
    type_apex("evaluate", "--random", "--env", "corridor:Corridor", "--episodes", "20")
    type_apex("export", "runs/masked")
    exported = load_policy(programs.folder / "runs/masked/export/model.safetensors", epsilon=0.5, seed=1)
    environment = masked_corridor.Corridor()
    for _ in range(20):
        (observation, info), is_over = environment.reset(), False
        while not is_over:
            action = exported.act(observation, info["action_mask"])
            observation, reward, ended, truncated, info = environment.step(action)
            is_over = ended or truncated
            assert reward >= 0, "a forbidden action was played"
    assert not (programs.folder / "forbidden").exists()
