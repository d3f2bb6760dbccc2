"""How long the programs of a run wait for each other, in seconds. docs/protocol.md has the same table.

Settings have the rest: `transport.heartbeat_seconds`, `transport.lease_seconds`, `learner.publish_seconds`.
"""

from __future__ import annotations

# Joining a run, and leaving it
HELLO_SECONDS = 0.5  # between two hellos
TAKEOVER_HEARTBEATS = 2  # periods of silence after which a newcomer gets a replay server's shard
ABSENT_HEARTBEATS = 3  # periods of silence after which a replay server, or the learner, counts as away
FORGET_SECONDS = 30.0  # of silence after which the status shows a program no more
END_NOTICE_SECONDS = 3.0  # for which the coordinator tells the end of the run to whoever still asks
GOODBYE_SECONDS = 1.0  # that the last message on a control socket may take to leave

# Figures
REPORT_SECONDS = 1.0  # between two reports of the trainer, two rows of the curves, two messages of scores
TRAINER_SILENCE_SECONDS = 10.0  # without a report after which the trainer is the bottleneck, whatever it said last
STATUS_SECONDS = 1.0  # between two questions of the live view
ANSWER_SECONDS = 3.0  # after which it asks again

# Experience
RECEIPT_SECONDS = 0.2  # between two receipts of a stream that lives: a SUB may have missed one
STREAM_LIFE_SECONDS = 60.0  # of silence after which a stream gets no more receipts
RESEND_SECONDS = 2.0  # without progress after which a stream sends its window again, at least
MOST_RESEND_SECONDS = 10.0  # ... and at most, where inserts wait for a slow learner
RECEIPT_SILENCE_SECONDS = 1.0  # without a receipt: a pause with such a silence in it is a loss, not slowness
DRAIN_SECONDS = 0.5  # that an actor process which was told to end waits for its last receipts
CREDIT_SECONDS = 5.0  # without an answer after which batches count as lost, and one more may go

# Parameters
SUBSCRIPTION_SECONDS = 0.2  # in which new subscriptions are answered by one publish
REPEAT_SECONDS = 5.0  # after which the newest parameters are published again

# Connections
RECONNECT_SECONDS = 0.1  # before the first attempt to connect again; the pause doubles ...
MOST_RECONNECT_SECONDS = 2.0  # ... up to this
CONTROL_RECONNECT_SECONDS = 0.2  # ... or, on control, to this: a run begins when all have found the learner
RENEW_SECONDS = 10.0  # without a receipt that is waited for, before a new connection; then twice as long each time
KEEPALIVE_SECONDS = 4  # that a connection is idle before the kernel's first probe
PROBE_SECONDS = 2  # between two probes ...
KEEPALIVE_PROBES = 3  # ... of which so many without an answer close the connection
UNACKNOWLEDGED_SECONDS = 10.0  # that sent bytes may lie at a peer's host before the connection is closed
HANDSHAKE_SECONDS = 5.0  # after which a connection that has not shown its key is closed
