"""`python -m bench fleet`: simulates runs with 1 to 1,000 actor hosts on this machine.

Coordinator, publisher, writer and their sockets are real, with keys; the hosts only send. Cores are CPU time, so other
programs disturb them less. Bytes and ages of parameters are real up to 64 hosts, and simulated above.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.runtime.provenance import describe_hardware
from apex.transport.curve.command import new_folder
from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.fleet.control import MAX_HOSTS, MAX_STREAMS, STREAMS_PER_HOST, measure_control
from bench.fleet.parameters import measure_parameters
from bench.fleet.receipts import measure_receipts
from bench.harness.command import Figures, make_parser, run_bench
from bench.harness.report import ReportRow, print_rows

HOSTS = "1,16,64,256,1000"
LINES = [
    ReportRow("streams", "streams", "", digits=0),
    ReportRow("receipts_writer_cores", "receipts of all streams: writer", "cores", 1, 3, 0.1, less_is_better=True),
    ReportRow("receipts_longest_pause_ms", "receipts: longest pause", "ms", 1, 1, 5, less_is_better=True),
    ReportRow("parameter_bytes_per_s", "parameters, all hosts together", "MB/s", 1e-6),
    ReportRow("parameter_budget_share", "parameters: share of their budget", "%", 100, 0, 100, less_is_better=True),
    ReportRow("parameter_period_s", "parameters: period", "s", 1, 2),
    ReportRow("parameter_age_periods", "parameters: largest age", "periods", 1, 2, 2, less_is_better=True),
    ReportRow("coordinator_cores", "coordinator", "cores", 1, 3, 0.25, less_is_better=True),
    ReportRow("leases_lost", "leases lost", "", digits=0, bar=0, less_is_better=True),
    ReportRow("curve_bytes_per_hour", "curves and events", "MB/h", 1e-6, 0, 50, less_is_better=True),
    ReportRow("shards", "replay servers", "", digits=0),
]


def main(argv: Sequence[str]) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("fleet", "Simulates runs with many actor hosts.", seconds=10.0, of="of each measurement")
    parser.add_argument("--hosts", default=HOSTS, metavar="N,...", help=f"numbers of hosts; default {HOSTS}")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="also draw the figures that have a bar")
    options = parser.parse_args(argv)
    numbers = read_hosts(options.hosts)
    return run_bench(
        lambda folder, stop: measure(folder, numbers, options.seconds, stop),
        lambda figures: show(numbers, figures, options.plot),
        as_json=options.json,
    )


def read_hosts(text: str) -> list[int]:
    """Returns the numbers of hosts, ascending; raises UsageError unless each is 1 to MAX_HOSTS."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= MAX_HOSTS for word in words):
        raise UsageError(f"--hosts must be numbers from 1 to {MAX_HOSTS}, separated by commas, got {text!r}")
    return sorted(set(map(int, words)))


def measure(folder: Path, numbers: Sequence[int], seconds: float, stop: Stop) -> Figures:
    """Returns the figures of each number of hosts, with names such as 16_coordinator_cores."""
    keys = str(folder / "keys")
    new_folder(Path(keys))
    return {
        f"{number}_{name}": value for number in numbers for name, value in _measure(folder, keys, number, seconds, stop)
    }


def _measure(folder: Path, keys: str, number: int, seconds: float, stop: Stop) -> Any:
    streams = min(number * STREAMS_PER_HOST, MAX_STREAMS)
    figures = {"streams": float(streams)}
    for part in (
        measure_receipts(folder, keys, streams, seconds),
        measure_parameters(keys, number, seconds, stop),
        measure_control(folder, keys, number, seconds, stop),
    ):
        if stop.poll():
            raise KeyboardInterrupt
        figures |= part
    figures["parameter_budget_share"] = figures["parameter_bytes_per_s"] / figures["parameter_budget_bytes_per_s"]
    figures["parameter_age_periods"] = figures["parameter_age_s"] / figures["parameter_period_s"]
    return {name: float(f"{value:.4g}") for name, value in figures.items()}.items()


def show(numbers: Sequence[int], figures: Figures, plot: Path | None) -> None:
    """Prints a table for each number of hosts, and draws the plot."""
    print(f"processor: {describe_hardware()['cpu']}")
    for number in numbers:
        own = {
            name.removeprefix(f"{number}_"): value for name, value in figures.items() if name.startswith(f"{number}_")
        }
        print_rows(f"{number} hosts", LINES, own)
    if plot is not None:
        from bench.plots.fleet import draw_fleet  # Needs matplotlib.

        draw_fleet(numbers, figures, LINES).savefig(plot)
