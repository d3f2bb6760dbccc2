"""Calls that wait, written once for threads and for asyncio: generators that yield the seconds of each pause."""

import time
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[float, None, T]  # T: what the call returns

PAUSE_SECONDS = 0.002


def block(call: Waiting[T]) -> T:
    """Runs a call; its pauses block the thread."""
    while True:
        try:
            time.sleep(next(call))
        except StopIteration as end:
            result: T = end.value
            return result
