"""A run on several machines, started by hand as the document describes."""

import json
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.machines import Machines, can_make_machines
from support.programs import CALM_FILE
from support.waiting import until

from apex.runs.metrics.writer import read_curve

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_machines(), reason="needs root, network namespaces, iproute2 and util-linux"),
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "guide" / "cluster.md"
NAMES = ("desk", "gpu1", "box2", "box3", "box4")


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path, *NAMES)
    for name in NAMES:
        (machines.home(name) / "calm.py").write_text(CALM_FILE)
    yield machines
    machines.close()


def updates(machines, name):
    with suppress(FileNotFoundError, IndexError):
        rows = read_curve(machines.home("gpu1") / "runs" / name / "curves" / "learner.jsonl")
        return rows[-1]["scalars"]["learner/updates"]
    return 0


def nothing_runs(machines):
    return not any(machines.processes(name) for name in NAMES[1:])


def test_the_commands_of_the_cluster_guide_work(machines):
    copier = machines.folder / "bin" / "scp"  # No ssh is needed for this; a machine's home is a folder here.
    copier.parent.mkdir()
    copier.write_text(f'#!/bin/sh\ntest "$1" = -rp && exec cp "$1" "$2" "{machines.folder}/$(echo "$3" | tr : /)"\n')
    copier.chmod(0o755)
    make, start, look = read_document("## By hand")
    for line, name in make:
        machines.run(name, f"PATH={copier.parent}:$PATH {line}")
    options = " --name one --stop-score 501 --replay.min-size-to-sample 300 --learner.batch-size 32"
    running = {}
    for line, name in start:
        role = line.split()[1]
        more = options if role == "learner" else ""
        running[name, role] = machines.start(name, line + more, machines.folder / f"{name}-{role}.log")
    (bundle, _), (status, _) = look
    machines.run("gpu1", bundle)

    def all_are_there():
        with suppress(subprocess.CalledProcessError):  # The command fails while no learner answers.
            roles = json.loads(machines.run("gpu1", f"{status} --json").splitlines()[-1])["roles"]
            return sorted(row["role"] for row in roles) == ["actor", "actor", "evaluator", "replay"]

    until(all_are_there, "programs", seconds=240.0)
    machines.run("gpu1", status)
    until(lambda: updates(machines, "one") > 10, "training", seconds=240.0)
    running["gpu1", "learner"].send_signal(signal.SIGINT)  # Ctrl-C in the learner's shell ends the other programs too.
    expected = {**dict.fromkeys(running, 75), ("gpu1", "learner"): 130}  # The run is not over.
    assert {program: process.wait(60) for program, process in running.items()} == expected
    assert nothing_runs(machines)


def read_document(heading):
    """The document's blocks of commands: lines, each with its machine."""
    text = DOCUMENT.read_text().partition(heading + "\n")[2].replace("\\\n", "")
    blocks = [block.partition("```")[0] for block in text.split("```bash\n")[1:]]
    return [[tuple(part.strip() for part in line.split("  # ")) for line in block.splitlines()] for block in blocks]
