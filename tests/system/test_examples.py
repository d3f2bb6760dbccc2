"""The examples, run as their docstrings say, for a few updates; and by the command that they name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apex.command_line import parse_config
from apex.environments.factory import describe
from apex.replay_memory.store.location import memory_folder
from apex.runs.folder import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
OUTPUTS = {
    "custom_environment.py": r"reached 30 updates; mean of 50 new games: -?\d",
    "custom_network.py": r"reached 30 updates; 67,843 parameters; mean of 20 new games: \d",
    "notebook_loop.py": r"reached 30 updates: [\d,]+ steps, \d+ s, in .*\none greedy game: \d+; Q of its last .*\[",
}


def test_there_is_no_other_example():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(OUTPUTS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_example_trains_and_plays(name, tmp_path):
    """The script runs in another folder. The programs of its run can import the same modules."""
    command = [sys.executable, str(EXAMPLES / name), "--max-updates", "30", "--folder", str(tmp_path / "runs")]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
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
