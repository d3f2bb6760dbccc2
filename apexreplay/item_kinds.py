"""What an item takes from the steps of its stream. Axes: M items, V views of an item, W steps of a view."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from apexreplay.errors import require

Array = NDArray[Any]

MAX_STEPS_OF_ITEM = 1_000  # maximum steps to which one item refers
MAX_STEPS = 8_192  # maximum steps in a segment


@dataclass(frozen=True, slots=True)
class Single:
    """An item is one step."""

    kind = "step"
    width = 1  # W
    positions = ("frame",)  # V fields of a record, each with the number of the newest step of a view
    depths: ClassVar[tuple[str, ...]] = ()
    max_steps = 1
    zeros_first = True  # whether the places of a view without a step are those before its steps

    def segment_steps(self, num_items: int) -> int:
        """Returns how many steps a segment of `num_items` items has at most."""
        return num_items + 1  # A writer keeps the newest step.

    def spans(self, records: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of the first step of each item, int64[M], and how many steps it has, int64[M]."""
        return records["frame"].astype(np.int64), np.ones(len(records), np.int64)

    def flaw(self, records: Array, num_steps: Array | int) -> str:
        """Returns what is wrong with the references of received records; "" if nothing is.

        `num_steps`: steps of the message, or of each item.
        """
        return "" if (records["frame"] < num_steps).all() else "`frame` is beyond the last step"


@dataclass(frozen=True, slots=True)
class Window:
    """An item is two stacks of steps: the `stack` steps up to `frame`, and those up to `next_frame`.

    `next_frame` is 1 to `span` steps after `frame`. `depth` and `next_depth` are the numbers of real steps in the
    stacks: an episode starts with `stack` - 1 steps of zeros, which are never stored.
    """

    stack: int  # W
    span: int

    kind = "window"
    positions = ("frame", "next_frame")
    depths = ("depth", "next_depth")
    zeros_first = True

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.stack, self.span))
        fits = whole and 1 <= self.stack <= 255 and self.span >= 1 and self.max_steps <= MAX_STEPS_OF_ITEM
        require(fits, f"a window has a stack of 1 to 255 and a span from 1 on, got {self.stack} and {self.span}")

    @property
    def width(self) -> int:
        """W, the steps of one stack."""
        return self.stack

    @property
    def max_steps(self) -> int:
        """Maximum steps to which one item refers."""
        return self.stack + self.span

    def segment_steps(self, num_items: int) -> int:
        """Returns how many steps a segment has at most. Episodes of a single step have two stored steps per item."""
        return min(MAX_STEPS, 2 * (num_items + self.span) + self.stack)

    def spans(self, records: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of the first step of each item, int64[M], and how many steps it has, int64[M]."""
        frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
        first = np.minimum(frame - records["depth"], next_frame - records["next_depth"]) + 1
        return first, next_frame - first + 1

    def flaw(self, records: Array, num_steps: Array | int) -> str:
        """Returns what is wrong with the references of received records; "" if nothing is.

        `num_steps`: steps of the message, or of each item.
        """
        frame, next_frame = records["frame"].astype(np.int64), records["next_frame"].astype(np.int64)
        steps = next_frame - frame
        for name, newest in zip(self.depths, (frame, next_frame), strict=True):
            depth = records[name]
            if not ((depth >= 1) & (depth <= self.stack)).all():
                return f"`{name}` is not in 1 ... {self.stack}"
            if not (depth <= newest + 1).all():
                return f"a stack of `{name}` steps begins before the first step"
        if not ((steps >= 1) & (steps <= self.span)).all():
            return f"`next_frame` is not 1 to {self.span} after `frame`"
        return "" if (next_frame < num_steps).all() else "`next_frame` is beyond the last step"


@dataclass(frozen=True, slots=True)
class Sequence:
    """An item is `length` consecutive steps of an episode, or `depth` < `length` if the episode ended before.

    `frame` is the newest step. `period`: a writer begins an item at every `period`-th step of an episode by itself;
    0: it does not.
    """

    length: int  # W
    period: int = 0

    kind = "sequence"
    positions = ("frame",)
    depths = ("depth",)
    zeros_first = False

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.length, self.period))
        fits = whole and 0 <= self.period <= self.length and 1 <= self.length <= MAX_STEPS_OF_ITEM
        problem = f"a sequence has a length of 1 to {MAX_STEPS_OF_ITEM} and a period of 0 to its length"
        require(fits, f"{problem}, got {self.length} and {self.period}")

    @property
    def width(self) -> int:
        """W, the steps of a sequence."""
        return self.length

    @property
    def max_steps(self) -> int:
        """Maximum steps to which one item refers."""
        return self.length

    def segment_steps(self, num_items: int) -> int:
        """Returns how many steps a segment of `num_items` items has at most."""
        return min(MAX_STEPS, (num_items + 1) * self.length)

    def spans(self, records: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the number of the first step of each item, int64[M], and how many steps it has, int64[M]."""
        depth = records["depth"].astype(np.int64)
        return records["frame"] - depth + 1, depth

    def flaw(self, records: Array, num_steps: Array | int) -> str:
        """Returns what is wrong with the references of received records; "" if nothing is.

        `num_steps`: steps of the message, or of each item.
        """
        frame, depth = records["frame"].astype(np.int64), records["depth"]
        if not ((depth >= 1) & (depth <= self.length)).all():
            return f"`depth` is not in 1 ... {self.length}"
        if not (depth <= frame + 1).all():
            return "a sequence of `depth` steps begins before the first step"
        return "" if (frame < num_steps).all() else "`frame` is beyond the last step"


Item = Single | Window | Sequence
KINDS: dict[str, type[Single] | type[Window] | type[Sequence]] = {
    each.kind: each for each in (Single, Window, Sequence)
}
