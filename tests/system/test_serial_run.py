"""A run in one process gives the same curve for the same seed, and a run folder like any other run."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from apex.algorithms.parameters import flatten_parameters
from apex.config import LearnerConfig, ReplayConfig
from apex.config.presets import PRESETS
from apex.environments.factory import describe
from apex.environments.inspection import Inspector
from apex.evaluation.command import main as evaluate
from apex.facts import INTERRUPTED, EndReason
from apex.launch.preflight.fit import FREE_RATIO, fit_one_process
from apex.launch.train import main as train
from apex.learner import open_run
from apex.learning import run_save
from apex.learning.coordinator import state
from apex.runs.checkpoints.folder import find_latest
from apex.runs.checkpoints.policy_file import find_best, read_policy
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apex.sentences import describe_end
from apexreplay.errors import FAILED, FINISHED, HOPELESS, REFUSED, UsageError
from apexreplay.process.lifecycle import KILLED_BY_CTRL_C
from apexreplay.store.location import store_path

COMMON = ("--single-process", "--evaluator.episodes=2", "--evaluator.num-envs=2")
CARTPOLE = (
    "--preset=cartpole",
    *COMMON,
    "--replay.capacity=2000",
    "--replay.min-size-to-sample=400",
    "--replay.samples-per-insert=2",
    "--batch-size=32",
    "--max-updates=130",
    "--evaluator.period-updates=50",
)
PONG = (
    "--preset=pong",
    *COMMON,
    "--environment.max-episode-frames=240",
    "--actors=4",
    "--actor.segment-length=20",
    "--replay.capacity=600",
    "--replay.min-size-to-sample=200",
    "--replay.samples-per-insert=0.5",
    "--batch-size=16",
    "--learner.random-shift=4",
    "--network.width=0.125",
    "--network.hidden=16",
    "--max-updates=30",
    "--evaluator.period-updates=20",
)
PENDULUM = (
    "--env=Pendulum-v1",
    *COMMON,
    "--actors=2",
    "--replay.capacity=2000",
    "--replay.min-size-to-sample=400",
    "--replay.samples-per-insert=4",
    "--batch-size=32",
    "--max-updates=60",
    "--evaluator.period-updates=40",
    "--stop-score=none",
)
MEMORY = (
    "--preset=r2d2",
    "--env=examples.memory:make_cue",
    *COMMON,
    "--actors=4",
    "--replay.capacity=2000",
    "--replay.min-size-to-sample=40",
    "--replay.samples-per-insert=4",
    "--r2d2.sequence-length=16",
    "--r2d2.burn-in=4",
    "--max-updates=40",
    "--evaluator.period-updates=30",
)
JOBS = {
    "memory": (*MEMORY, "--seed=3"),
    "pendulum": (*PENDULUM, "--seed=3"),
    "cartpole": (*CARTPOLE, "--seed=3"),
    "pong": (*PONG, "--seed=3"),
    "another": (*CARTPOLE, "--seed=4"),
    "iqn": (*PONG, "--seed=3", "--algorithm=iqn", "--network.torso=impala", "--learner.target=munchausen"),
}
SCRIPT = "import json, sys; from apex.launch.train import main; sys.exit(max(map(main, json.loads(sys.argv[1]))))"

pytestmark = pytest.mark.timeout(700)  # for the first test, which waits for the shared runs


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(folder, names, hash_seed):
    """Starts jobs in a new process, whose hash seed changes the order of sets."""
    runs = [[*JOBS[name], f"--run.folder={folder}", f"--name={name}"] for name in names]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(runs)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The jobs' run folders by name, for each of two processes. The second process repeats jobs in another order."""
    plans = [
        ("cartpole", "another", "pong", "pendulum", "iqn", "memory"),
        ("memory", "iqn", "pendulum", "pong", "cartpole"),
    ]
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    processes = [start(folder, plan, number) for number, (folder, plan) in enumerate(zip(folders, plans, strict=True))]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == FINISHED, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [{path.name: RunFolder.open(path) for path in folder.iterdir()} for folder in folders]


def curves(folder):
    """All rows by role, without the time of day."""
    rows = {path.stem: read_curve(path) for path in sorted(folder.curves.glob("*.jsonl"))}
    return {role: [{k: v for k, v in row.items() if k != "time"} for row in rows[role]] for role in rows}


def tensors(folder):
    """Networks and optimizer, bit for bit."""
    state = find_latest(folder.checkpoints).state
    found = []

    def collect(tree):
        if isinstance(tree, torch.Tensor):
            found.append(tree.numpy().tobytes())
        elif isinstance(tree, dict | list):
            for child in tree.values() if isinstance(tree, dict) else tree:
                collect(child)

    for part in (state.online, state.target, state.optimizer):
        collect(part)
    return state.num_updates, state.progress.num_steps, found


@pytest.mark.parametrize("name", ["cartpole", "pong", "pendulum", "iqn", "memory"])
def test_a_seed_gives_the_same_curves_and_bits_in_another_process(runs, name):
    first, second = (each[name] for each in runs)
    assert curves(first) == curves(second)
    assert tensors(first) == tensors(second)
    best = [read_policy(find_best(folder.checkpoints))[1].network for folder in (first, second)]
    assert (flatten_parameters(best[0]) == flatten_parameters(best[1])).all()


def test_another_seed_gives_another_curve(runs):
    mine, another = runs[0]["cartpole"], runs[0]["another"]
    assert curves(mine)["actor"] != curves(another)["actor"]
    assert tensors(mine)[2] != tensors(another)[2]


@pytest.mark.parametrize(("name", "updates", "evaluations"), [("cartpole", 130, 3), ("pong", 30, 2)])
def test_the_run_leaves_curves_and_a_checkpoint(runs, name, updates, evaluations, capsys):
    folder = runs[0][name]
    rows = curves(folder)
    assert rows["learner"][-1]["scalars"]["learner/updates"] == updates
    assert len(rows["evaluator"]) == evaluations  # The last evaluation is that of the final policy.
    assert all(row["scalars"]["actors/mean_score"] for row in rows["actor"])
    steps = [row["steps"] for row in rows["replay"]]
    assert steps == sorted(steps)
    assert 1_000 <= steps[0] < 1_200  # The first row follows the segment with step 1,000.
    assert rows["replay"][-1]["scalars"]["replay/num_inserted"] == steps[-1] == tensors(folder)[1]
    assert not any("second" in tag for role in rows.values() for row in role for tag in row["scalars"])
    assert not store_path(folder.run_id).exists()
    assert evaluate([str(folder.path), "--episodes=1", "--json"]) == FINISHED
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 1


def small(folder, *options):
    return [*CARTPOLE, f"--run.folder={folder}", "--name=mine", *options]


@pytest.mark.parametrize(
    ("option", "end"),
    [
        ("--max-steps=1200", EndReason("steps", 1200.0)),
        ("--max-minutes=0.02 --max-updates=0", EndReason("minutes", 0.02)),
        ("--stop-score=1", EndReason("score", 1.0)),
    ],
)
def test_limits_end_the_run_with_a_checkpoint(tmp_path, capsys, option, end):
    assert train(small(tmp_path, *option.split())) == FINISHED
    assert RunFolder.open(tmp_path / "mine").end == end
    assert find_latest(tmp_path / "mine" / "checkpoints").state is not None
    output = capsys.readouterr().out
    assert describe_end(end) in output
    assert "--resume" not in output


@pytest.mark.parametrize(("option", "kind"), [("--max-minutes=0.00001", "no_steps"), ("--max-updates=20", "unsaved")])
def test_a_run_without_a_step_or_its_checkpoint_fails(tmp_path, capsys, monkeypatch, option, kind):
    if kind == "unsaved":
        monkeypatch.setattr(run_save, "save_checkpoint", raise_disk_full)
    monkeypatch.setattr(state, "MAX_STARTUP_SECONDS", 0.0)  # Otherwise the limit of minutes waits for the first step.
    assert train(small(tmp_path, option)) == FAILED
    assert RunFolder.open(tmp_path / "mine").end == EndReason("failed")
    assert ("No space left on device" in capsys.readouterr().err) == (kind == "unsaved")


def raise_disk_full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_score_of_the_final_policy_is_not_confirmed(tmp_path):
    limits = ("--stop-score=1", "--max-updates=20", "--evaluator.period-updates=1000")
    assert train(small(tmp_path, *limits)) == FINISHED
    (evaluation,) = curves(RunFolder.open(tmp_path / "mine"))["evaluator"]
    assert evaluation["scalars"]["evaluator/episodes"] == 2


def test_the_run_cannot_be_resumed(runs, capsys):
    assert train(["--resume", str(runs[0]["cartpole"].path), "--max-updates=1000"]) == REFUSED
    assert "--single-process" in capsys.readouterr().err


def test_a_diverging_run_fails_with_the_cause(tmp_path, capsys):
    rough = ("--learner.learning-rate=1e30", "--learner.loss=squared", "--learner.publish-period=1000")
    assert train(small(tmp_path, *rough)) == HOPELESS
    assert "finite" in capsys.readouterr().err
    assert not store_path(RunFolder.open(tmp_path / "mine").run_id).exists()


class Leaving(CartPoleEnv):
    """A simulator that is gone after 1,000 steps of all games."""

    num_steps = 0

    def step(self, action):
        Leaving.num_steps += 1
        if Leaving.num_steps > 1_000:
            raise OSError("the simulator has gone")
        return super().step(action)


def test_an_environment_that_fails_for_good_leaves_a_policy(tmp_path, capsys):
    assert train(small(tmp_path, f"--env={__name__}:Leaving", "--evaluator.period-updates=1000")) != FINISHED
    assert "the simulator has gone" in capsys.readouterr().err
    folder = RunFolder.open(tmp_path / "mine")
    assert folder.end == EndReason("failed")
    updates = find_latest(folder.checkpoints).state.num_updates
    assert updates > 0
    assert curves(folder)["learner"][-1]["scalars"]["learner/updates"] == updates


NUM_ACTORS = 4


class Single(CartPoleEnv):
    """A simulator of which a process can have as many as there are actors."""

    num_made = 0

    def __init__(self, **options):
        super().__init__(**options)
        Single.num_made += 1
        if Single.num_made > NUM_ACTORS:
            raise OSError("no licence is left")


def test_an_evaluator_without_an_environment_leaves_a_policy(tmp_path, capsys):
    options = (f"--env={__name__}:Single", f"--actors={NUM_ACTORS}", "--evaluator.period-updates=100")
    assert train(small(tmp_path, *options)) == REFUSED
    assert "no licence is left" in capsys.readouterr().err
    assert find_latest(tmp_path / "mine" / "checkpoints").state.num_updates >= 100


def test_ctrl_c_ends_the_run_which_has_no_socket_and_no_child(tmp_path):
    command = [sys.executable, "-m", "apex", "train", *small(tmp_path, "--max-updates=0", "--stop-score=none")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        curve, deadline = tmp_path / "mine" / "curves" / "evaluator.jsonl", time.monotonic() + 300
        while not curve.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        own = Path(f"/proc/{process.pid}")
        assert (own / "task" / str(process.pid) / "children").read_text() == ""
        assert not [fd for fd in (own / "fd").iterdir() if os.readlink(fd).startswith("socket:")]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == KILLED_BY_CTRL_C, output
    folder = RunFolder.open(tmp_path / "mine")
    assert folder.end == INTERRUPTED
    assert tensors(folder)[0] == curves(folder)["learner"][-1]["scalars"]["learner/updates"]
    assert not store_path(folder.run_id).exists()


def fit(preset, **branches):
    config = dataclasses.replace(PRESETS[preset].config, **branches)
    return fit_one_process(config, describe(config.environment, config.actor.n_step))[0]


def test_the_run_uses_one_core_and_always_has_a_replay_ratio():
    config = fit("pong")
    assert (config.actor.num_actors, config.actor.num_processes, config.learner.batch_size) == (16, 1, 64)
    assert (config.learner.num_threads, config.learner.device, config.learner.publish_seconds) == (1, "cpu", 0.0)
    assert config.replay.samples_per_insert == PRESETS["pong"].config.replay.samples_per_insert
    cartpole = PRESETS["cartpole"].config
    replay = dataclasses.replace(cartpole.replay, samples_per_insert=0.0, inserts_wait=False)
    free = fit("cartpole", actor=dataclasses.replace(cartpole.actor, num_processes=4), replay=replay)
    assert free.replay.samples_per_insert == FREE_RATIO
    assert free.actor.num_actors == free.actor.envs_per_process == cartpole.actor.num_actors


@pytest.mark.parametrize(
    ("branches", "name"),
    [
        ({"learner": LearnerConfig(device="cuda")}, "--device cuda"),
        ({"replay": ReplayConfig(num_shards=2)}, r"replay\.num_shards.*\b2\b"),
    ],
)
def test_a_gpu_and_shards_are_refused(branches, name):
    with pytest.raises(UsageError, match=name):
        fit("pong", **branches)


def test_the_command_learner_cannot_run_all_roles():
    with pytest.raises(UsageError, match="apex train"):
        open_run(["--preset=cartpole", "--single-process"], Inspector())
