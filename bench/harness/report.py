"""What `python -m bench replay` prints, and the yardstick that it compares with."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from apex.errors import UsageError
from apex.runtime.lifecycle import POLL_SECONDS, Stop
from apex.runtime.spawn import spawn
from bench.replay_steps import StoreTimes

PEER_SCRIPT = Path(__file__).parents[1] / "peers" / "reverb_bench.py"
PEER_LINE = re.compile(r"^reverb_(insert|sample|update) ([\d.]+) ", re.MULTILINE)


class ReportRow(NamedTuple):
    """A figure in the report."""

    name: str  # in the JSON object
    label: str
    unit: str
    scale: float = 1.0  # from the figure to what is printed
    digits: int = 1
    bar: float | None = None  # as printed
    stretch: float | None = None
    less_is_better: bool = False
    peer: str = ""  # what `reverb_bench.py` calls it
    peer_bar: float | None = None  # times the peer's figure


SERVER_LINES = [
    ReportRow(
        "insert_transitions_per_s", "inserted, one connection, LZ4 included", "/s", digits=0, peer="insert", peer_bar=5
    ),
    ReportRow("sample_batches_per_s", "batches of 512, priorities returned", "/s", peer="sample", peer_bar=8),
    ReportRow("sample_longest_wait_ms", "the longest wait for one of them", "ms", less_is_better=True),
    ReportRow("batch_ms", "one batch drawn and decoded, one process", "ms", digits=2, less_is_better=True),
    ReportRow(
        "both_insert_transitions_per_s", "all at once: transitions in, 12,500 offered", "/s", digits=0, bar=12_400
    ),
    ReportRow("both_sample_batches_per_s", "all at once: batches out", "/s", bar=100, stretch=200),
    ReportRow("bytes_per_transition", "on the wire, per transition", "bytes", 1, 0, 1_000, 800, True),
    ReportRow("memory_bytes_2m", "memory for 2,000,000 transitions", "GB", 1e-9, 2, 2.5, 2.0, True),
]
STORE_LINES = [
    ReportRow("update_512_ms", "512 priorities among 2^21 leaves", "ms", 1, 3, 0.4, 0.1, True, "update"),
    ReportRow("draw_512_ms", "draw of 512 from 2^21 leaves", "ms", 1, 3, 0.15, 0.1, True),
    ReportRow("size_ratio", "draw and update, 2^23 against 2^16 slots", "x", 1, 2, 3.0, 2.0, True),
]
STEPS = {  # of one batch, in their order
    "draw": "draw 512 of the tree",
    "gather": "copy records and frames out of the store",
    "encode": "encode: CRC of all bytes",
    "send_receive": "send and receive, TCP on loopback",
    "check": "check: CRC, every field",
    "decompress": "decompress every frame once",
    "place": "place them in the stacks, copy shared ones",
}
PREFIXES = {
    "": "batches by TCP",
    "direct_": "loaders draw for themselves, on the store's host",
    "trained_": "a trained policy's frames, batches by TCP",
    "trained_direct_": "a trained policy's frames, loaders draw for themselves",
}


def print_report(figures: Mapping[str, float]) -> None:
    """A table: figure, value, bar, how many times the peer's."""
    print(f"\n{'':<48}{'here':>12}{'':<7}{'bar':>10}{'stretch':>10}{'peer':>11}{'ratio':>8}")
    for prefix, title in PREFIXES.items():
        lines = [line for line in SERVER_LINES if prefix + line.name in figures]
        if lines:
            print(f"{title}, {figures[prefix + 'verified_transitions']:.0f} transitions verified")
        for line in lines:
            print(_row(line, prefix, figures))
    print("in one process")
    for line in STORE_LINES:
        if line.name in figures:
            print(_row(line, "", figures))


def print_rows(title: str, lines: Sequence[ReportRow], figures: Mapping[str, float]) -> None:
    """A table of those figures that are there."""
    print(f"\n{title:<48}{'here':>12}{'':<7}{'bar':>10}{'stretch':>10}")
    for line in lines:
        if line.name in figures:
            print(_row(line, "", figures))


def print_budget(budget: Mapping[str, float]) -> None:
    """A table: where the time of one batch goes."""
    whole = sum(budget.values())
    print(f"\n{'one batch of 512, alone in one process':<48}{'ms':>12}{'share':>9}")
    for name, value in budget.items():
        print(f"  {STEPS[name]:<46}{value:>12.3f}{value / whole:>9.0%}")
    print(f"  {'sum':<46}{whole:>12.3f}")


def print_sizes(times: Mapping[int, StoreTimes]) -> None:
    """A table: what a draw and an update take, by number of slots."""
    print(f"\n{'slots':>12}{'draw ms':>12}{'update ms':>12}")
    for size, each in times.items():
        print(f"{size:>12,}{each.draw:>12.3f}{each.update:>12.3f}")


def run_peer(python: str, frames: Path, stop: Stop) -> dict[str, float]:
    """Runs the yardstick; returns its figures as insert, sample (per second) and update (ms)."""
    if not PEER_SCRIPT.exists():
        raise UsageError(f"--peer needs {PEER_SCRIPT}")
    command = [python, str(PEER_SCRIPT), str(frames)]
    process = spawn(command, output=subprocess.PIPE, errors=subprocess.PIPE)  # It has children, which end with it.
    try:
        while True:
            try:
                said, complained = process.communicate(timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if stop.poll():
                    raise KeyboardInterrupt from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures = read_peer(said.decode(errors="replace"))
    if process.returncode or len(figures) < 3:
        last = (complained.decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise UsageError(f"--peer {python} ended with status {process.returncode} and said: {last}")
    return figures


def read_peer(said: str) -> dict[str, float]:
    """The yardstick's figures, by name."""
    return {name: float(value) for name, value in PEER_LINE.findall(said)}


def compare(figures: Mapping[str, float], peer: Mapping[str, float]) -> dict[str, float]:
    """The peer's figures, and how many times better ours are, for the JSON object."""
    compared: dict[str, float] = {}
    for line in [*SERVER_LINES, *STORE_LINES]:
        if not line.peer:
            continue
        theirs = peer[line.peer]
        compared[f"peer_{line.name}"] = theirs
        for prefix in PREFIXES:
            if prefix + line.name in figures:
                ours = figures[prefix + line.name]
                compared[f"{prefix}peer_{line.peer}_ratio"] = theirs / ours if line.less_is_better else ours / theirs
    return compared


def _row(line: ReportRow, prefix: str, figures: Mapping[str, float]) -> str:
    def show(value: float | None) -> str:
        return "" if value is None else f"{value:,.{line.digits}f}"

    value = figures[prefix + line.name] * line.scale
    theirs = figures.get(f"peer_{line.name}")
    ratio = figures.get(f"{prefix}peer_{line.peer}_ratio") if line.peer else None
    bar = line.bar
    if line.peer_bar is not None and theirs is not None:
        bar = line.peer_bar * theirs
    met = bar is None or (value <= bar if line.less_is_better else value >= bar)
    return (
        f"  {line.label:<46}{show(value):>12} {line.unit:<6}{show(bar):>10}{show(line.stretch):>10}{show(theirs):>11}"
        f"{'' if ratio is None else f'{ratio:.1f} x':>8}{'' if met else '  below the bar'}"
    )
