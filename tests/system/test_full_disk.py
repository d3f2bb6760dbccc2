"""A disk that is full costs what it was to hold, and nothing else: no role, no line that was written before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import apex

MOUNT = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o "size=64k,nr_inodes=${NODES:-64}" tmpfs "$1" && shift && exec "$@"',
    "sh",
]


def can_mount():
    return os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(
    not can_mount(), reason="mounting a small disk needs root and its own mount namespace"
)


def run_on_a_small_disk(folder, script, **environment):
    """Runs a Python script in `folder`, on a disk of 64 KiB that nobody else sees; its standard output."""
    process = subprocess.run(
        [*MOUNT, str(folder), sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(apex.__file__).parent.parent,
        env={**os.environ, "FOLDER": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@needs_mounts
def test_a_full_disk_leaves_whole_lines_and_events_and_goes_on_when_there_is_room(tmp_path):
    """The disk takes a part of what is written; what a reader finds then is whole, and nothing is lost or twice."""
    said = run_on_a_small_disk(
        tmp_path,
        """
        import json, logging, os, sys
        from pathlib import Path
        from apex.runs.metrics.writer import MetricsWriter, read_curve
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        folder = Path(os.environ["FOLDER"])
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(56_000))
        writer = MetricsWriter(folder)
        curve = folder / "curves/learner.jsonl"
        for steps in range(150):
            writer.accept({"role": "learner", "steps": steps, "time": 1.0, "scalars": {"loss": steps}})
            writer.flush()
            assert curve.read_bytes().endswith(b"\\n")
        full = len(read_curve(curve))
        ballast.unlink()
        writer.close()
        steps = [line["steps"] for line in read_curve(curve)]
        shown = EventAccumulator(str(folder / "tensorboard" / folder.name)).Reload()
        print(json.dumps([full, steps, [event.step for event in shown.Scalars("loss")]]))
        """,
    ).splitlines()
    full, steps, events = json.loads(said[-1])
    assert 0 < full < 150
    assert steps == events == list(range(150))
    told = [line for line in said if "No space left" in line or "is written again" in line]
    assert [line.partition(" ")[0] == "cannot" for line in told] == [True, True, False, False]
