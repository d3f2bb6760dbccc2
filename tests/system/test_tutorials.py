"""Executes the files and commands of the tutorials in an empty folder, with shorter limits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs/tutorials"
SHORT = ["--max-updates", "200", "--actors", "4", "--run.no-tensorboard", "--evaluator.final-seconds", "5"]


def python_of(page, number=0):
    """Returns the text of a Python block."""
    return re.findall(r"```python\n(.*?)```", (TUTORIALS / page).read_text(), re.DOTALL)[number]


def commands_of(page):
    """The lines that begin with `apex` in a page's blocks, split like a shell does."""
    return [line.split()[1:] for line in (TUTORIALS / page).read_text().splitlines() if line.startswith("apex ")]


def type_apex(folder, arguments):
    """Runs `apex ARGUMENTS`; returns its output."""
    command = [sys.executable, "-m", "apex", *arguments]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert answer.returncode == 0, f"{arguments}: {answer.stdout}{answer.stderr}"
    return answer.stdout


@pytest.mark.timeout(600)
def test_the_tutorial_environment_is_trained_evaluated_and_filmed(tmp_path):
    (tmp_path / "corridor.py").write_text(python_of("environment.md"))
    train, evaluate = commands_of("environment.md")
    type_apex(tmp_path, [*train, *SHORT])
    summary = json.loads(type_apex(tmp_path, [*evaluate, "--json"]).splitlines()[-1])
    assert summary["episodes"] == 20
    assert (tmp_path / "corridor.mp4").stat().st_size > 1_000
    script = python_of("environment.md", 1).replace(
        'run={"max_minutes": 1}', 'run={"max_updates": 20, "tensorboard": False}, evaluator={"enabled": False}'
    )
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=200)


@pytest.mark.timeout(300)
def test_a_custom_network_is_trained(tmp_path):
    (tmp_path / "wide.py").write_text(python_of("network.md"))
    (train,) = commands_of("network.md")
    type_apex(tmp_path, [*train, *SHORT])
