"""Text for people: known numbers, sizes, and text from others without control characters."""

import math
from typing import Any


def known(value: Any) -> float | None:
    """Returns `value` if it is a finite number, else None: a status may contain null, and a loss may be NaN."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def clean(text: str) -> str:
    """Replaces control characters by spaces, because text from a log or a socket must not control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def size(num_bytes: Any) -> str:
    """Formats a number of bytes in GiB, MiB or KiB."""
    value = known(num_bytes)
    if value is None:
        return "-"
    if value < 2**20:
        return f"{value / 2**10:.0f} KiB"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
