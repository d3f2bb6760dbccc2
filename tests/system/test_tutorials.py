"""Executes the files and commands of the tutorials in an empty folder, with shorter limits."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.programs import FEW_GAMES, UNSCORED

import apex
from apex.launch.train import read_start
from apex.runs.folder import RunFolder
from apex.runs.history import RunHistory

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"
TUNE = ROOT / "docs/guide/tune.md"
SHORT = ["--max-updates", "200", "--actors", "4", "--run.no-tensorboard", "--evaluator.final-seconds", "5"]
SHORT += FEW_GAMES


def python_of(page, number=0):
    """Returns the text of a Python block."""
    return re.findall(r"```python\n(.*?)```", (TUTORIALS / page).read_text(), re.DOTALL)[number]


def commands_of(page):
    """The lines that begin with `apex` in a page's blocks, split like a shell does."""
    return [line.split()[1:] for line in (TUTORIALS / page).read_text().splitlines() if line.startswith("apex ")]


@pytest.mark.timeout(600)
def test_the_tutorial_environment_is_trained_evaluated_and_filmed(tmp_path, type_apex):
    (tmp_path / "corridor.py").write_text(python_of("environment.md"))
    train, evaluate = commands_of("environment.md")
    type_apex(*train, *SHORT)
    summary = json.loads(type_apex(*evaluate, "--json").splitlines()[-1])
    assert summary["episodes"] == summary["metrics"]["success"]["games"] == 20
    assert "actor_metrics/success" in RunHistory(RunFolder.open(tmp_path / "runs/corridor")).tags("actor")
    assert (tmp_path / "corridor.mp4").stat().st_size > 1_000
    script = python_of("environment.md", 1).replace(
        'run={"max_minutes": 1}', 'run={"max_updates": 20, "tensorboard": False}, evaluator={"enabled": False}'
    )
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=200)


@pytest.mark.parametrize("name", ["Colour", "Camera", "Grid", "Planes"])
def test_each_kind_of_observations_is_trained_exported_and_resumed(tmp_path, type_apex, name):
    shutil.copy(ROOT / "examples/observations.py", tmp_path)
    limits = ("--max-updates", "20", "--replay.min-size-to-sample", "300")
    type_apex("train", "--env", f"observations:{name}", *SHORT, *UNSCORED, *limits, "--name", "one")
    type_apex("train", "--resume", "runs/one", "--max-updates", "30")
    type_apex("export", "runs/one", "--onnx")
    type_apex("evaluate", "runs/one", "--episodes", "2")
    assert RunFolder.open(tmp_path / "runs/one").end.kind == "updates"


def test_a_vector_environment_is_trained(tmp_path, type_apex):
    (tmp_path / "batched.py").write_text(python_of("../guide/families.md"))
    _, train = commands_of("../guide/families.md")  # The first trains dm_control, which is no extra of the tests.
    type_apex(*train, *SHORT, "--name", "one")
    assert RunFolder.open(tmp_path / "runs/one").end.kind == "updates"


def test_a_custom_network_is_trained(tmp_path, type_apex):
    (tmp_path / "wide.py").write_text(python_of("network.md"))
    (train,) = commands_of("network.md")
    type_apex(*train, *SHORT, *UNSCORED)


def test_an_algorithm_with_another_optimizer_is_trained(tmp_path, type_apex):
    (tmp_path / "adamw.py").write_text(python_of("algorithm.md"))
    train, _ = commands_of("algorithm.md")
    type_apex(*train, *SHORT, *UNSCORED, "--name", "adamw")
    assert RunFolder.open(tmp_path / "runs/adamw").end.kind == "updates"


@pytest.mark.timeout(900)
def test_c51_solves_cartpole(tmp_path, type_apex):
    """Runs in one process: the seed decides the curve, and the load of the machine only the time."""
    shutil.copy(ROOT / "examples/c51.py", tmp_path)
    _, train = commands_of("algorithm.md")
    type_apex(*train, "--single-process", "--name", "c51", "--max-updates", "5000")
    folder = RunFolder.open(tmp_path / "runs/c51")
    assert folder.end.kind == "score"  # The 95 % interval of 100 fresh games lies above 475.
    assert folder.end.value == 475


def test_the_loops_of_the_tuning_guide_start_distinct_runs(tmp_path):
    """A shell runs the blocks with an `apex` that only records its arguments."""
    blocks = re.findall(r"```bash\n(.*?)```", TUNE.read_text(), re.DOTALL)
    names = []
    for block in blocks:
        script = f'apex() {{ echo "$*" >> calls; echo TensorBoard; }}\n{block}'
        subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    for command, *options in map(str.split, (tmp_path / "calls").read_text().splitlines()):
        if command == "train":
            names.append(read_start(options).config.run.name)
        else:
            assert command == "plot"
    assert sorted(names) == ["five", "lr-1e-2", "lr-1e-3", "lr-3e-3", "one", "two"]


def test_the_python_of_the_tuning_guide_makes_valid_runs():
    """The same with a module that only records the configurations."""
    trained = []
    recorder = SimpleNamespace(
        preset=apex.preset,
        train=lambda config, quiet: trained.append(config) or SimpleNamespace(best_score=0.0),
        evaluate=lambda run, episodes: SimpleNamespace(mean=0.0),
    )
    (text,) = re.findall(r"```python\nimport apex\n(.*?)```", TUNE.read_text(), re.DOTALL)
    exec(text, {"apex": recorder})
    assert [config.learner.learning_rate for config in trained] == [1e-3, 3e-3, 1e-2]
