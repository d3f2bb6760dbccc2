"""The examples, run as their docstrings say, for a few updates; and by the command that they name."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch
from support.builders import VECTORS
from torch import nn

import apex
from apex.algorithms.gradient_step import DeviceBatch
from apex.command_line import parse_config
from apex.environments.factory import describe
from apex.runs.folder import RunFolder
from apexreplay.store.location import memory_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
ADAPTERS = ("dqn_one_file.py", "sb3_many_processes.py", "sb3_replay_buffer.py")  # test_adapters.py
TUNING = ("ray_tune.py",)  # test_sweep.py
OUTPUTS = {
    "custom_environment.py": r"reached 30 updates; mean of 50 new games: -?\d",
    "custom_network.py": r"reached 30 updates; 67,843 parameters; mean of 20 new games: \d",
    "notebook_loop.py": r"reached 30 updates: [\d,]+ steps, \d+ s, in .*\none greedy game: \d+; Q of its last .*\[",
}


def test_there_is_no_other_example():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *OUTPUTS,
        "c51.py",
        "memory.py",
        "observations.py",
        "physics.py",
        "pixels.py",
        *ADAPTERS,
        *TUNING,
    }


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_example_trains_and_plays(name, tmp_path):
    """The script runs in another folder. The programs of its run can import the same modules."""
    command = [sys.executable, str(EXAMPLES / name), "--max-updates", "30", "--folder", str(tmp_path / "runs")]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(OUTPUTS[name], answer.stdout), answer.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    run = RunFolder.open(folder)
    assert run.config.run.max_updates == 30
    assert not list(memory_folder().glob(f"apex-{run.run_id:016x}*"))


def test_the_notebook_is_of_a_notebooks_size():
    assert len((EXAMPLES / "notebook_loop.py").read_text().splitlines()) < 40


def test_the_environment_is_found_by_the_command_too(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    config = parse_config(["--env", "custom_environment:KeyAndDoor"], prog="apex train")
    assert describe(config.environment, 3).num_actions == 4
    assert config.run.stop_score is None  # The stop score of CartPole's preset does not fit this environment.


@pytest.mark.parametrize(("name", "steps"), [("make_cue", 12), ("make_cartpole", 51)])
def test_tasks_of_memory_hide_what_matters(name, steps, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    config = parse_config(["--preset", "r2d2", "--env", f"memory:{name}"], prog="apex train")
    assert describe(config.environment, 3).frame_shape == (2,)
    environment = getattr(importlib.import_module("memory"), name)()
    observation, _ = environment.reset(seed=1)
    length, is_over = 0, False
    while not is_over:
        action = int(observation[1] > 0) if name == "make_cartpole" else environment.cue
        observation, reward, ended, truncated, _ = environment.step(action)
        length, is_over = length + 1, ended or truncated
    assert (length, reward) == (steps, 1)


PIXELS = """
import sys
import numpy as np
from apex.environments.mujoco import _egl_works
if not _egl_works():
    sys.exit(77)
from pixels import REPEAT, make_swingup
environment = make_swingup()
seen = [environment.reset(seed=1)[0]]
began = environment.unwrapped.physics.data.time
for _ in range(3):
    observation, reward, ended, truncated, _ = environment.step(np.ones(1, np.float32))
    seen.append(observation)
    assert 0 <= reward <= REPEAT and not ended and not truncated
steps = (environment.unwrapped.physics.data.time - began) / environment.unwrapped.dt
changed = sum(bool((seen[i] != seen[i + 1]).any()) for i in range(3))
print(round(steps), changed, observation.shape, observation.dtype)
"""


def test_the_example_of_pixels_repeats_actions_and_sees_them():
    pytest.importorskip("shimmy", reason="needs the extra dm-control, which dev has")
    answer = subprocess.run([sys.executable, "-c", PIXELS], cwd=EXAMPLES, capture_output=True, text=True, timeout=300)
    if answer.returncode == 77:
        pytest.skip("nothing can draw on this host without a screen")
    assert answer.stdout.strip() == "24 3 (64, 64, 3) uint8", answer.stderr


def test_other_physics_change_the_motion_and_the_defaults_do_not(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    make, usual = importlib.import_module("physics").make_cartpole, gymnasium.make("CartPole-v1")
    others = [make(), make(gravity=15.0), make(pole_mass=0.3), make(half_length=1.0)]
    states = []
    for each in (usual, *others):
        each.reset(seed=1)
        states.append([each.step(action)[0].tolist() for action in (0, 1, 0)][-1])
    assert states[0] == states[1]
    assert len({tuple(state) for state in states[1:]}) == len(others)


@pytest.fixture
def c51(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("c51")


def test_c51_projects_returns_onto_the_atoms_as_by_hand(c51):
    """Of 0.5 + 0.5 * (0, 1, 2, 3), atom 1 gets half of 0.5 and 1.5, and all of 1."""
    probability = torch.tensor([0.1, 0.2, 0.3, 0.4]).repeat(4, 1)
    n_step_return, discount = torch.tensor([0.5, 2.25, -1.0, 5.0]), torch.tensor([0.5, 0.0, 1.0, 1.0])
    projected = c51.project(probability, n_step_return, discount, torch.arange(4.0))
    by_hand = [[0.05, 0.4, 0.55, 0.0], [0.0, 0.0, 0.75, 0.25], [0.3, 0.3, 0.4, 0.0], [0.0, 0.0, 0.0, 1.0]]
    assert torch.allclose(projected, torch.tensor(by_hand), atol=1e-6)


class Constant(nn.Module):
    """Outputs the same logits, float32[A, N], for every observation."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, observation):
        return self.logits.flatten().expand(len(observation), -1)


def test_c51_bootstraps_by_double_q_and_returns_cross_entropies(c51):
    """The online network prefers action 1, of return 8 = atom 4 by the target network; action 0 has 18 = atom 9."""
    algorithm = c51.C51(apex.preset("cartpole"), VECTORS)
    online = c51.Distribution(Constant(0.1 * torch.tensor([[1.0], [2.0]]) * torch.arange(51)))
    target = c51.Distribution(Constant(100 * torch.eye(51)[[9, 4]]))
    stacks, action, weights = torch.zeros(2, 2, 1, 4), torch.tensor([1, 0]), torch.tensor([1.0, 0.5])
    rows = torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5]), weights
    mask = torch.tensor([[True, True], [True, False]])
    before = online.log_probability(stacks[0])[[0, 1], action].detach()
    update = algorithm.make_update(online, target, algorithm.make_optimizer(online), torch.device("cpu"))
    updated = update(DeviceBatch(stacks, action, *rows, next_mask=mask))
    # Goals: 2 + 0.5 * 8 = 6, which is atom 3, and 2 + 0.5 * 18 = 11, between atoms 5 and 6.
    expected = -torch.stack([before[0, 3], before[1, [5, 6]].mean()])
    assert torch.allclose(updated.td_errors, expected)
    assert torch.allclose(updated.figures["loss"], (weights * expected).mean())
    assert (online.log_probability(stacks[0])[0, 1, 3] > before[0, 3]).item()


def test_c51_is_of_an_examples_size():
    assert len((EXAMPLES / "c51.py").read_text().splitlines()) <= 70
