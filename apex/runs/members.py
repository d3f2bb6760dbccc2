"""A program of a run as the coordinator knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Status = dict[str, Any]  # what a program says of itself, or what the coordinator says of the run


@dataclass(slots=True)
class Member:
    """A program that has said hello."""

    role: str
    host: str
    pid: int
    seen_at: float  # monotonic seconds
    shard: int  # of a replay server
    status: Status = field(default_factory=dict)
