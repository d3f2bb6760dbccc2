"""The tables of `python -m bench replay`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.replay_steps import StoreTimes


class ReportRow(NamedTuple):
    """One figure of a report."""

    name: str  # key in the JSON object
    label: str
    unit: str
    scale: float = 1.0  # factor between the figure and the printed value
    digits: int = 1
    bar: float | None = None  # in the printed unit
    stretch: float | None = None
    less_is_better: bool = False


SERVER_LINES = [
    ReportRow("insert_transitions_per_s", "inserts over one connection, with LZ4", "/s", digits=0),
    ReportRow("sample_batches_per_s", "batches of 512, with priorities returned", "/s"),
    ReportRow("sample_longest_wait_ms", "longest wait for a batch", "ms", less_is_better=True),
    ReportRow("batch_ms", "one batch drawn and decoded in one process", "ms", digits=2, less_is_better=True),
    ReportRow("both_insert_transitions_per_s", "both at once: inserts, 12,500 offered", "/s", digits=0, bar=12_400),
    ReportRow("both_sample_batches_per_s", "both at once: batches", "/s", bar=100, stretch=200),
    ReportRow("bytes_per_transition", "bytes per transition on the wire", "bytes", 1, 0, 1_000, 800, True),
    ReportRow("memory_bytes_2m", "memory for 2,000,000 transitions", "GB", 1e-9, 2, 2.5, 2.0, True),
]
STORE_LINES = [
    ReportRow("update_512_ms", "update of 512 among 2^21 leaves", "ms", 1, 3, 0.4, 0.1, True),
    ReportRow("draw_512_ms", "draw of 512 among 2^21 leaves", "ms", 1, 3, 0.15, 0.1, True),
    ReportRow("size_ratio", "2^23 slots relative to 2^16 slots", "x", 1, 2, 3.0, 2.0, True),
]
STEPS = {  # steps of one batch, in their order
    "draw": "draw 512 transitions from the tree",
    "gather": "copy records and frames from the store",
    "encode": "encode, with a CRC of all bytes",
    "send_receive": "send and receive over TCP on loopback",
    "check": "check the CRC and every field",
    "decompress": "decompress each frame once",
    "place": "copy frames into the stacks",
}
PREFIXES = {
    "": "batches over TCP",
    "direct_": "loaders draw from the mapped store",
    "trained_": "frames of a trained policy, batches over TCP",
    "trained_direct_": "frames of a trained policy, loaders draw from the mapped store",
}


def print_report(figures: Mapping[str, float]) -> None:
    """Prints a table: figure, value, bar."""
    print(f"\n{'':<48}{'here':>12}{'':<7}{'bar':>10}{'stretch':>10}")
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
    """Prints a table of the figures that were measured."""
    print(f"\n{title:<48}{'here':>12}{'':<7}{'bar':>10}{'stretch':>10}")
    for line in lines:
        if line.name in figures:
            print(_row(line, "", figures))


def print_budget(budget: Mapping[str, float]) -> None:
    """Prints a table of the steps of one batch."""
    whole = sum(budget.values())
    print(f"\n{'steps of one batch of 512 in one process':<48}{'ms':>12}{'share':>9}")
    for name, value in budget.items():
        print(f"  {STEPS[name]:<46}{value:>12.3f}{value / whole:>9.0%}")
    print(f"  {'sum':<46}{whole:>12.3f}")


def print_sizes(times: Mapping[int, StoreTimes]) -> None:
    """Prints a table of the times of a draw and an update by number of slots."""
    print(f"\n{'slots':>12}{'draw ms':>12}{'update ms':>12}")
    for size, each in times.items():
        print(f"{size:>12,}{each.draw:>12.3f}{each.update:>12.3f}")


def _row(line: ReportRow, prefix: str, figures: Mapping[str, float]) -> str:
    def show(value: float | None) -> str:
        return "" if value is None else f"{value:,.{line.digits}f}"

    value = figures[prefix + line.name] * line.scale
    bar = line.bar
    met = bar is None or (value <= bar if line.less_is_better else value >= bar)
    return (
        f"  {line.label:<46}{show(value):>12} {line.unit:<6}{show(bar):>10}{show(line.stretch):>10}"
        f"{'' if met else '  below the bar'}"
    )
