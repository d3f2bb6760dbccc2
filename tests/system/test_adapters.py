"""The adapters of examples/, in an environment that has Stable-Baselines3 beside the packages of the tests."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ADAPTERS = ("dqn_one_file.py", "sb3_many_processes.py", "sb3_replay_buffer.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that finds the packages of the tests, and Stable-Baselines3."""
    folder = tmp_path_factory.mktemp("sb3")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    peers = [str(path) for path in ROOT.glob(".peer-sb3/lib/python*/site-packages")]  # by bench/peers/setup.sh
    (own / "dependencies.pth").write_text("\n".join([sysconfig.get_path("purelib"), str(ROOT), *peers]))
    if peers:  # Tests in network namespaces of their own reach no index.
        return python
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--retries=0"]
    try:
        subprocess.run([*command, "stable-baselines3==2.9.2"], capture_output=True, text=True, timeout=90, check=True)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer: run bench/peers/setup.sh")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"run bench/peers/setup.sh; pip cannot install stable-baselines3: {error.stderr[-300:]}")
    return python


def run(python, *arguments, timeout=300):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    command = [str(python), *map(str, arguments)]
    ended = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_has_at_most_60_lines(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60


@pytest.mark.parametrize("check", ["vectors", "stacks", "refusals", "learning"])
def test_the_buffer_of_stable_baselines3_gives_what_its_own_gives(python, check):
    assert run(python, ROOT / "tests/peers/sb3_twin.py", check) == "ok\n"


def test_16_processes_feed_one_learner(python):
    shown = run(python, EXAMPLES / "sb3_many_processes.py", "--updates", 300)
    assert re.fullmatch(r"300 updates, [\d,]+ steps: \d+ \+- \d+\n", shown), shown


def test_the_dqn_in_one_file_trains(python):
    shown = run(python, EXAMPLES / "dqn_one_file.py", "--steps", 1_500)
    assert re.fullmatch(r"seed 1: mean score of the last 20 games [\d.]+\n", shown), shown
