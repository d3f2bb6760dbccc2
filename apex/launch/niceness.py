"""Which programs of a run leave CPU time to the others."""

from __future__ import annotations

from apex.config import Config

NICE = 10  # niceness of programs that only observe the run or are not the bottleneck


def actor_niceness(config: Config) -> int:
    """Returns the niceness of the actors. If inserts wait for samples, the learner is the bottleneck.

    The actors then get the CPU time that the learner leaves idle.
    """
    return NICE if config.replay.inserts_wait else 0
