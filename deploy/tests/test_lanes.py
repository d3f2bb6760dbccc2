"""deploy/test.sh with parts that only print, fail or wait: it shows every part, and leaves no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[1]
PARTS = """
part_shell() { skip shell "no shell"; }
part_namespaces() { sleep 0.5; echo "slow $PPID"; false; echo unreachable; }
part_kubernetes() { echo "after a failure"; }
part_units() { :; }
part_terraform() { echo planned >"$SCRATCH/plan.json"; }
part_policy() { cat "$SCRATCH/plan.json"; }
part_slurm() { :; }
part_container() { :; }
"""
WAITS = f"""
part_units() {{ {sys.executable} -c 'import time; print("begun", flush=True); time.sleep(600)'; }}
part_slurm() {{ part_units; }}
"""
SECONDS = 60.0  # deadline on a busy machine


@pytest.fixture
def start(tmp_path: Path):
    """Returns a function that starts the script with these parts; all its processes have TMPDIR=tmp_path/scratch."""
    started = []

    def start(parts: str, *arguments: str) -> subprocess.Popen[str]:
        script = (DEPLOY / "test.sh").read_text()
        assert script.count("\nasked_parts=") == 1
        (tmp_path / "deploy").mkdir()
        (tmp_path / "scratch").mkdir()
        (tmp_path / "deploy/test.sh").write_text(script.replace("\nasked_parts=", f"{parts}\nasked_parts="))
        (tmp_path / "venv.sh").write_text("ensure_venv() { :; }\n")
        process = subprocess.Popen(
            ["bash", tmp_path / "deploy/test.sh", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, "TMPDIR": str(tmp_path / "scratch")}, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def left_by(tmp_path: Path) -> list[str]:
    """Returns the command lines of the script's processes, and its files."""
    mark = f"TMPDIR={tmp_path / 'scratch'}\0".encode()
    found = [str(path) for path in (tmp_path / "scratch").iterdir()]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:  # It has ended.
            continue
    return found


def test_all_parts_are_shown_in_order_and_a_failed_one_fails_all(start, tmp_path) -> None:
    script = start(PARTS)
    output, _ = script.communicate(timeout=SECONDS)
    shown = [line.removeprefix("== ") for line in output.splitlines() if line.startswith("== ")]
    parts = ["shell", "namespaces", "kubernetes", "units", "terraform", "policy", "slurm", "container"]
    assert shown == [*parts, "1 skipped", "failed: namespaces"]
    for text in ("slow", "after a failure", "planned"):
        assert text in output
    assert "unreachable" not in output
    assert script.returncode == 1
    assert left_by(tmp_path) == []


def test_asked_parts_run_until_the_first_fails(start) -> None:
    script = start(PARTS, "kubernetes", "namespaces", "units")
    output, _ = script.communicate(timeout=SECONDS)
    assert "== kubernetes" not in output
    assert "slow" in output
    assert script.returncode == 1


@pytest.mark.parametrize(("send", "signum"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)])
def test_a_signal_ends_both_lanes_and_leaves_nothing(start, tmp_path, send, signum) -> None:
    """A terminal sends the signal of Ctrl-C to all processes, and another program only to the script."""
    script = start(PARTS + WAITS)
    deadline = time.monotonic() + SECONDS
    while sum("begun" in path.read_text() for path in (tmp_path / "scratch").glob("*/*.output")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    send(script.pid, signum)
    script.communicate(timeout=3 * SECONDS)  # After a minute, the script kills what is left.
    assert script.returncode == 130
    assert left_by(tmp_path) == []
