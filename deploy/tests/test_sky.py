"""deploy/sky/apex.yaml: SkyPilot accepts the task, and Ape-X its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

TASK = Path(__file__).parents[1] / "sky/apex.yaml"
SKY = os.environ.get("APEX_SKY_PYTHON", "")  # an interpreter that has SkyPilot, which has requirements of its own
READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(box,) = task.resources
print(json.dumps([task.envs, box.accelerators, box.use_spot, box.job_recovery]))
"""
needs_sky = pytest.mark.skipif(not SKY, reason="SkyPilot is not installed; deploy/test.sh does it")


def read(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Lets SkyPilot read a task."""
    (folder / "task.yaml").write_text(text)
    environment = {**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [SKY, "-c", READ, str(folder / "task.yaml")]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


@needs_sky
def test_skypilot_accepts_the_task(tmp_path):
    done = read(tmp_path, TASK.read_text().replace("BUCKET: null", "BUCKET: b"))
    assert done.returncode == 0, done.stderr
    envs, accelerators, use_spot, recovery = json.loads(done.stdout.splitlines()[-1])
    assert (envs["BUCKET"], accelerators, use_spot) == ("b", {"L4": 1}, True)
    assert (recovery["recover_on_exit_codes"], recovery["max_restarts_on_errors"]) == ([75], 3)


@needs_sky
@pytest.mark.parametrize(
    ("old", "new"), [("max_restarts_on_errors: 3", "max_restarts_on_errors: x"), ("cpus:", "cpu:")]
)
def test_skypilot_refuses_a_task_with_a_wrong_field(tmp_path, old, new):
    assert read(tmp_path, TASK.read_text().replace("BUCKET: null", "BUCKET: b").replace(old, new)).returncode


def test_the_task_trains_with_a_mirror_in_the_bucket(tmp_path):
    """A shell runs the task's command, whose program is this tree's, and prints the settings instead of training."""
    program = tmp_path / "apex/bin/apex"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m apex "$@" --print-config\n')
    program.chmod(0o755)
    task = yaml.safe_load(TASK.read_text())
    names = {"HOME": str(tmp_path), "NAME": task["envs"]["NAME"], "BUCKET": "b"}
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), **names}
    command = ["bash", "-euc", task["run"]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    run = tomllib.loads(done.stdout)["run"]
    assert (run["name"], run["mirror"]) == ("pong", "s3://b/runs"), done.stderr
