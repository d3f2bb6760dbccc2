"""The replay buffers of other projects beside our server: their measurement and the table of all."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apexreplay.errors import ApexError, require
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.process.spawn import Process, spawn

SCRIPTS = Path(__file__).parents[1] / "peers"  # NAME_bench.py for each name
PEERS = {
    "reverb": "Reverb, a server",
    "cpprb": "cpprb, in process",
    "flashbax": "flashbax, in process",
    "torchrl": "TorchRL, in process",
}
OURS = {"": "replay server, batches over TCP", "direct_": "replay server, batches from shared memory"}  # by prefix
COLUMNS = {  # title -> names of our figure and of a peer's
    "inserts/s": ("insert_transitions_per_s", "inserts_per_s"),
    "batches of 512/s": ("sample_batches_per_s", "batches_per_s"),
    "bytes per transition": ("grown_bytes_per_transition", "bytes_per_transition"),
}
RATIOS = {  # prefix and name of our figure -> label, and minimum multiple of Reverb's figure
    ("", "insert_transitions_per_s"): ("inserts, TCP", 8),
    ("direct_", "insert_transitions_per_s"): ("inserts, shared memory", 8),
    ("", "sample_batches_per_s"): ("batches, TCP", 4),
    ("direct_", "sample_batches_per_s"): ("batches, shared memory", 7),
}


class PeerError(ApexError):
    """A peer could not be measured."""


class Peer(NamedTuple):
    """A project and the interpreter that has it."""

    name: str
    python: Path


def read_peer(word: str) -> Peer:
    """Returns the peer of an option `NAME` or `NAME=PYTHON`. Raises UsageError if it is not there."""
    name, _, python = word.partition("=")
    require(name in PEERS, f"--peer: {name!r} is unknown", remedy=f"known are {', '.join(PEERS)}")
    path = Path(python or f".peer-{name}/bin/python")
    require(path.exists(), f"--peer {name}: {path} does not exist", remedy=f"bench/peers/setup.sh {name} makes it")
    return Peer(name, path)


def measure_peers(
    peers: Sequence[Peer], frames: Path, transitions: int, seconds: float, stop: Stop, tell: Callable[[str], None]
) -> dict[str, float]:
    """Returns the figures of the peers, one after the other. Tells why one has none."""
    figures: dict[str, float] = {}
    for peer in peers:
        tell(f"{transitions:,} transitions in {peer.name}")
        try:
            figures |= run_peer(peer, frames, transitions, seconds, stop)
        except PeerError as error:
            tell(str(error))
    return figures


def run_peer(peer: Peer, frames: Path, transitions: int, seconds: float, stop: Stop) -> dict[str, float]:
    """Returns the figures of a peer that stores `transitions` of these frames and is sampled for `seconds`.

    Raises PeerError if its script fails.
    """
    script = SCRIPTS / f"{peer.name}_bench.py"
    command = [str(peer.python), str(script), str(frames), str(transitions), str(seconds)]
    with spawn(command, output=subprocess.PIPE, errors=subprocess.PIPE) as process:  # Its children end with it.
        try:
            output, errors = _wait(process, stop)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    try:
        figures = json.loads(output.splitlines()[-1])
        return {f"{peer.name}_{name}": float(figures[name]) for _, name in COLUMNS.values()}
    except (IndexError, KeyError, TypeError, ValueError) as error:
        last = (errors.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        problem = f"--peer {peer.name}: {peer.python} ended with status {process.returncode}; last line: {last}"
        raise PeerError(problem, f"install it again with bench/peers/setup.sh {peer.name}") from error


def _wait(process: Process, stop: Stop) -> tuple[bytes, bytes]:
    """Returns standard output and error of the program when it has ended."""
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if stop.poll():
                raise KeyboardInterrupt from None


def ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Returns how many times better than Reverb's our figures are."""
    names = dict(COLUMNS.values())
    return {
        f"{prefix}{name}_by_reverb": figures[prefix + name] / figures[f"reverb_{names[name]}"]
        for prefix, name in RATIOS
        if prefix + name in figures and f"reverb_{names[name]}" in figures
    }


def print_peers(figures: Mapping[str, float]) -> None:
    """Prints the table, and our multiples of Reverb's figures with their bars."""
    print("\n" + "\n".join(render_table(figures)) + "\n")
    for (prefix, name), (label, bar) in RATIOS.items():
        ratio = figures.get(f"{prefix}{name}_by_reverb")
        if ratio is not None:
            print(f"{label}: {ratio:.1f} x Reverb, bar {bar} x{'' if ratio >= bar else '  below the bar'}")


def render_table(figures: Mapping[str, float]) -> Sequence[str]:
    """Returns the lines of a table in Markdown: a row for each system that was measured. In brackets: x Reverb."""
    lines = [f"| system | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for prefix, title in OURS.items():
        if prefix + "insert_transitions_per_s" in figures:
            cells = [_cell(figures, prefix, ours) for ours, _ in COLUMNS.values()]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    for name, title in PEERS.items():
        if f"{name}_inserts_per_s" in figures:
            cells = [_cell(figures, "", f"{name}_{theirs}") for _, theirs in COLUMNS.values()]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _cell(figures: Mapping[str, float], prefix: str, name: str) -> str:
    value = figures.get(name if name.startswith("grown") else prefix + name)  # The memory is that of both links.
    ratio = figures.get(f"{prefix}{name}_by_reverb")
    shown = "" if value is None else f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
    return shown if ratio is None else f"{shown} ({ratio:.1f})"
