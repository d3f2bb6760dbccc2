"""The tables of a server with their limits, in Python or from a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, get_args

from apexreplay.errors import DataError, UsageError, require
from apexreplay.item_kinds import KINDS
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.selection import Order, Selection
from apexreplay.store.layout import StoreSettings
from apexreplay.tables import Table, table
from apexreplay.transport.endpoints import MAX_MESSAGE_BYTES, max_segment_bytes
from apexreplay.wire.codec import MAX_PRIORITIES

DEFAULT_BYTES = 1 << 30
MAX_STREAMS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """A table with its limits. Raises UsageError for a value out of range."""

    table: Table
    capacity: int = 100_000  # items; the oldest are removed first
    max_bytes: int = 0  # bytes of steps; 0: enough for `capacity` steps that do not compress, at most 1 GiB
    order: Order = "priority"  # "newest": the newest items; "queue": each item draws_per_item times, oldest first
    draws_per_item: int = 1  # of a queue
    max_version_lag: int = -1  # items older than the newest version minus this are not drawn; -1: no limit
    priority_exponent: float = 0.6  # items are drawn in proportion to priority ** exponent; 0: uniformly
    min_priority: float = 1e-6
    min_size: int = 1  # items before the first draw
    samples_per_insert: float = 0.0  # items drawn per inserted item; 0: no limit
    tolerance: float = 0.1  # deviation from that, as a share of samples_per_insert * min_size
    inserts_wait: bool = False  # whether inserts wait for draws, too
    num_streams: int = 256  # writers at a time
    num_samplers: int = 1  # processes that draw for clients on other hosts
    segment_length: int = 50  # items that a writer sends at once
    window: int = 16  # segments that a writer may send before the first is acknowledged

    def __post_init__(self) -> None:
        limits = {
            "capacity": (1, 2**40),
            "max_bytes": (0, 2**46),
            "draws_per_item": (1, 2**20),
            "max_version_lag": (-1, 2**32),
            "priority_exponent": (0, 10),
            "min_priority": (1e-30, 1e30),
            "min_size": (1, self.capacity),
            "samples_per_insert": (0, 1e9),
            "tolerance": (0, 1e9),
            "num_streams": (1, MAX_STREAMS),
            "num_samplers": (0, 6),
            "segment_length": (1, 4_000),
            "window": (1, 63),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_right = is_number and (name in _FLOATS or isinstance(value, int)) and low <= value <= high
            require(is_right, f"{self.table.name}.{name} must be from {low} to {high}, got {value!r}")
        name, length, waits = self.table.name, self.segment_length, self.inserts_wait
        require(isinstance(waits, bool), f"{name}.inserts_wait must be true or false, got {waits!r}")
        require(length <= self.capacity, f"{name}.segment_length {length} is above its capacity {self.capacity}")
        orders, is_ordered = get_args(Order), self.order != "priority"
        require(self.order in orders, f"{name}.order must be one of {', '.join(orders)}, got {self.order!r}")
        one = self.num_samplers == 1 and self.samples_per_insert == 0
        problem = f"{name}.order {self.order!r} needs num_samplers 1 and samples_per_insert 0"
        require(one or not is_ordered, f"{problem}, got {self.num_samplers} and {self.samples_per_insert:g}")
        require(self.order == "queue" or self.draws_per_item == 1, f'{name}.draws_per_item needs the order "queue"')
        stuck = self.order == "queue" and waits and self.max_version_lag >= 0
        problem = f"{name}.max_version_lag does not go with a queue whose inserts wait"
        remedy = "set it to -1, or inserts_wait to false: items that are too old could fill the memory for ever"
        require(not stuck, problem, remedy=remedy)
        need = max_segment_bytes(self.table, length)
        problem = f"{name}.segment_length {length} allows a segment of {need} bytes, but messages have less than 4 GiB"
        require(need < MAX_MESSAGE_BYTES, problem, remedy="lower it, or declare smaller fields or shorter items")
        bounds = f"{name}.capacity {self.capacity} and {name}.max_bytes {self.store.max_bytes}"
        problem = f"{bounds} have no room for {name}.min_size {self.min_size} items and two segments of {length}"
        require(self._room >= self.min_size, problem, remedy=f"raise them, or lower {name}.segment_length")
        problem = f"{name}.max_bytes must be 0 or at least {need}, the maximum of a segment, got {self.max_bytes}"
        require(not 0 < self.max_bytes < need, problem, remedy=f"raise it, or lower {name}.segment_length")

    @property
    def store(self) -> StoreSettings:
        """The settings of the store."""
        all_steps, is_queue = self.capacity * (self.table.max_step_bytes + 16) + 4_096, self.order == "queue"
        segment = max_segment_bytes(self.table, self.segment_length)
        num_bytes = self.max_bytes or max(min(DEFAULT_BYTES, all_steps + 3 * segment * is_queue), segment)
        limits = self.num_streams, self.priority_exponent, self.min_priority, self.max_version_lag
        draws_per_item = self.draws_per_item if is_queue else 0
        return StoreSettings(self.capacity, num_bytes, *limits, in_order=True, draws_per_item=draws_per_item)

    @property
    def limiter(self) -> RateLimiter:
        """The limits of draws and inserts."""
        return RateLimiter(self.min_size, self.samples_per_insert, self.tolerance, self.inserts_wait)

    @property
    def selection(self) -> Selection:
        """How items are selected."""
        return Selection(self.order, self.draws_per_item)

    @property
    def max_batch(self) -> int:
        """Maximum items of a batch."""
        if self.order == "priority":
            return MAX_PRIORITIES
        is_held = self.order == "queue" and self.inserts_wait
        room = self._room if is_held else self.capacity - self.segment_length + 1  # Whole segments are removed.
        return min(room * self.draws_per_item, MAX_PRIORITIES)

    @property
    def _room(self) -> int:
        """Items that always fit. A queue whose inserts wait needs room for the rest of its oldest segment, which is
        removed as a whole, and for a new one, before which as many bytes may stay unused."""
        if self.order != "queue" or not self.inserts_wait:
            return self.capacity
        spare = self.store.max_bytes - 3 * max_segment_bytes(self.table, self.segment_length)
        item_bytes = self.table.item.segment_steps(1) * (self.table.max_step_bytes + 16)
        return min(self.capacity - 2 * self.segment_length, spare // item_bytes)

    @classmethod
    def from_dict(cls, name: str, declared: Mapping[str, Any]) -> Self:
        """Returns the table `name` from a table of TOML: `steps`, `item`, `values`, `kept` and the limits above."""
        limits = dict(declared)
        item = limits.pop("item", {"kind": "step"})
        require(isinstance(item, dict), f"{name}.item must be a table with its kind, got {item!r}")
        item = dict(item)
        kind = item.pop("kind", "")
        require(str(kind) in KINDS, f"{name}.item.kind must be one of {sorted(KINDS)}, got {kind!r}")
        parts = {field.name: field.default is MISSING for field in fields(KINDS[kind])}
        needed = {each for each, is_needed in parts.items() if is_needed}
        is_right = needed <= set(item) <= set(parts)
        require(is_right, f"{name}.item of kind {kind!r} has {sorted(parts)}, got {sorted(item)}")
        steps, values = limits.pop("steps", {}), limits.pop("values", {})
        kept = limits.pop("kept", [])
        require(isinstance(kept, list), f"{name}.kept must be a list of values, got {kept!r}")
        options = sorted({field.name for field in fields(cls)} - {"table"})
        unknown = sorted(set(limits) - set(options))
        known = ["steps", "item", "values", "kept", *options]
        near = [match for each in unknown for match in get_close_matches(each, known, n=1)]
        remedy = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(known)}"
        require(not unknown, f"{name} has unknown settings {unknown}", remedy=remedy)
        return cls(table=table(name, steps, item=KINDS[kind](**item), values=values, kept=tuple(kept)), **limits)


_FLOATS = {field.name for field in fields(TableSettings) if field.type is float}


def read_tables(path: Path) -> list[TableSettings]:
    """Returns the tables of a TOML file, one for each of its tables. Raises UsageError and DataError."""
    try:
        declared = tomllib.loads(path.read_text())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "name a file that declares the tables") from error
    except ValueError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    require(len(declared) > 0, f"{path} declares no table")
    for name, content in declared.items():
        require(isinstance(content, dict), f"{path}: {name} is no table", remedy=f"begin the table with [{name}]")
    try:
        return [TableSettings.from_dict(name, content) for name, content in declared.items()]
    except UsageError as error:
        raise UsageError(f"{path}: {error.problem}", error.remedy) from error
