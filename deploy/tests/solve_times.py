"""Measures how long CartPole takes to its score on this machine: locally, and by the files for each engine, by turns.

    cd deploy/tests && PYTHONPATH=../.. python solve_times.py --rounds 4 local pods slurm image

Needs root, except for local; Slurm (APEX_SLURM, see slurm_cluster.py); for image buildah, and minutes for a build.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from namespaces import wait_until
from pods import Jobs
from slurm_cluster import SlurmCluster
from test_container import ROOT
from test_container import build as build_image
from test_kubernetes import HEAD, VALUES, build, make_secrets
from test_slurm import submit

from apex.facts import EndReason
from apex.runs.folder import RunFolder

SECONDS = 600.0  # deadline of a run
EIGHT = VALUES | {"ACTORS": "8", "ENVS": "4"}  # two pods with one process each, as on the Slurm nodes

Solve = Callable[[str], Path]  # trains a run of this name; returns its folder


def local(folder: Path, _: ExitStack) -> Solve:
    """Returns a function that trains with `apex train`."""

    def solve(name: str) -> Path:
        command = [sys.executable, "-m", "apex", "train", "--preset", "cartpole", "--name", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=SECONDS)
        return folder / "runs" / name

    return solve


def pods(folder: Path, _: ExitStack) -> Solve:
    """Returns a function that trains with the pods of the manifests."""

    def solve(name: str) -> Path:
        (place := folder / name).mkdir()
        with Jobs(place) as jobs:
            jobs.apply(*make_secrets(place), *build(place / "manifests", EIGHT | {"NAME": name}))
            jobs.reconcile()
            head = jobs.pods[HEAD]
            jobs.wait_until(lambda: head.process.poll() is not None, "the end of the run", SECONDS)
            return head.folder / "work/runs" / name

    return solve


def slurm(folder: Path, stack: ExitStack) -> Solve:
    """Returns a function that submits the batch file to three nodes."""
    cluster = stack.enter_context(SlurmCluster(folder))

    def solve(name: str) -> Path:
        job = submit(cluster, f"--preset cartpole --name {name}", "--exclusive")
        wait_until(lambda: job not in cluster.jobs(), "the end of the run", SECONDS)
        return cluster.shared / "runs" / name

    return solve


def image(folder: Path, _: ExitStack) -> Solve:
    """Returns a function that trains in the container."""
    built = build_image(folder)

    def solve(name: str) -> Path:
        built.run("train", "--preset", "cartpole", "--name", name, seconds=SECONDS)
        return built.root / "home/apex/runs" / name

    return solve


ENGINES = {function.__name__: function for function in (local, pods, slurm, image)}


def main() -> None:
    """Measures, and prints the seconds of each run and their median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in options.engines}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        places = {name: Path(scratch, name) for name in seconds}
        for place in places.values():
            place.mkdir()
        solves = {name: ENGINES[name](place, stack) for name, place in places.items()}
        for number in range(options.rounds):
            for name, solve in solves.items():
                started = time.monotonic()
                folder = solve(f"cartpole-{number}")
                seconds[name].append(time.monotonic() - started)
                print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
                assert RunFolder.open(folder).end == EndReason("score", 475.0)
    for name, found in seconds.items():
        print(f"{name}: {', '.join(f'{one:.1f}' for one in found)} s; median {median(found):.1f} s")


if __name__ == "__main__":
    main()
