"""`python -m bench peer_actor`: trains CartPole with an actor in JavaScript, and measures the time to 475."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from apex.config.presets import preset
from apex.runs.folder import RunFolder
from apex.runtime.ports import choose_ports, is_free
from apexreplay.errors import require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import spawn
from bench.harness.command import Figures, make_parser, run_bench

PEERS = Path(__file__).parents[1] / "tests" / "peers"
INSTALL = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000")
BAR_SECONDS = 60.0  # from the start of `apex train` to its end
LIMIT_SECONDS = 300.0  # after which a run is ended
NUM_STREAMS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("peer_actor", "Trains CartPole with tests/peers/actor.js, the only source of experience.")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="number of runs; default 3")
    arguments = parser.parse_args(argv)
    return run_bench(
        lambda folder, stop: measure(folder, arguments.seeds, stop),
        show,
        as_json=arguments.json,
        passed=lambda figures: max(figures.values()) <= BAR_SECONDS,
    )


def measure(folder: Path, seeds: int, stop: Stop) -> Figures:
    """Returns the seconds of each run until the evaluator has confirmed 475; raises ApexError if a run does not."""
    peers = folder / "peers"
    subprocess.run(["cp", "-r", str(PEERS), str(peers)], check=True)
    subprocess.run(INSTALL, cwd=peers, check=True, capture_output=True, timeout=120.0)
    return {f"seed {seed}": _train(folder, peers, seed, stop) for seed in range(1, seeds + 1)}


def _train(folder: Path, peers: Path, seed: int, stop: Stop) -> float:
    config = choose_ports(preset("cartpole"), is_free, lambda sentence: None)
    port, path = config.transport.port("control"), folder / "runs" / f"seed-{seed}"
    options = ("--seed", seed, "--name", path.name, "--run.folder", path.parent, "--run.no-tensorboard")
    offset = ("--transport.port-offset", config.transport.port_offset)
    head = ("--head", "--preset", "cartpole", "--actors", NUM_STREAMS, *options, *offset)
    began = time.monotonic()
    train = spawn([sys.executable, "-m", "apex", "train", *map(str, head)], output=(folder / "train.log").open("wb"))
    actor = None
    try:
        while train.poll() is None and time.monotonic() < began + LIMIT_SECONDS:
            if stop.poll():
                raise KeyboardInterrupt
            if actor is None and (path / "keys" / "observer.key_secret").exists():
                command = ["node", "actor.js", "127.0.0.1", str(port), str(NUM_STREAMS), str(path / "keys")]
                actor = spawn(command, cwd=peers, output=(folder / "actor.log").open("wb"))
            time.sleep(POLL_SECONDS)
        seconds, end = time.monotonic() - began, RunFolder.open(path).end
        log = "".join((folder / name).read_text() for name in ("train.log", "actor.log") if (folder / name).exists())
        require(end is not None and end.kind == "score", f"seed {seed} did not reach 475", remedy=log[-2_000:])
        print(f"seed {seed}: {seconds:.1f} s", file=sys.stderr, flush=True)
        return seconds
    finally:
        for process in filter(None, (train, actor)):
            process.terminate()
            process.wait()


def show(figures: Figures) -> None:
    """Prints the figures."""
    for name, seconds in figures.items():
        print(f"{name}: {seconds:.1f} s from the start of the run to its end at a confirmed 475")
    print(f"bar: {BAR_SECONDS:g} s for each")
