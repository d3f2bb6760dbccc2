"""Periods and timeouts between the programs of a run, in seconds. docs/protocol.md includes this file.

Three more are settings: `transport.heartbeat_seconds`, `transport.lease_seconds`, `learner.publish_seconds`.
"""

# Joining and leaving a run
HELLO_SECONDS = 0.5  # time between two Hello messages
TAKEOVER_HEARTBEATS = 2  # missing heartbeats after which a new replay server takes over the shard
ABSENT_HEARTBEATS = 3  # missing heartbeats after which a replay server or the learner counts as absent
FORGET_SECONDS = 30.0  # silence after which the status no longer shows a program
END_NOTICE_SECONDS = 3.0  # time after the end of the run in which the coordinator still answers requests

# Reports
REPORT_SECONDS = 1.0  # time between trainer reports, between curve rows, and between score messages
TRAINER_SILENCE_SECONDS = 10.0  # silence after which the trainer counts as the bottleneck
STATUS_SECONDS = 1.0  # time between two status requests of the live view
ANSWER_SECONDS = 3.0  # time without an answer after which the live view repeats its request

# Experience
DRAIN_SECONDS = 0.5  # time that an actor process waits for its last receipts before it ends

# Parameters
SUBSCRIPTION_SECONDS = 0.2  # new subscriptions within this time share one publication
REPEAT_SECONDS = 5.0  # time without newer parameters after which the newest are published again


def pace_of(num_programs: int) -> float:
    """Returns the factor on the time between two heartbeats of an actor host: above 1 in runs with many programs."""
    return max(1.0, num_programs / 150)  # 150 heartbeats a second take a fifth of the coordinator's core
