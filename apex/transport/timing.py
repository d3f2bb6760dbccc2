"""Periods and timeouts between the programs of a run, in seconds. docs/protocol.md includes this file.

Three more are settings: `transport.heartbeat_seconds`, `transport.lease_seconds`, `learner.publish_seconds`.
"""

# Joining and leaving a run
HELLO_SECONDS = 0.5  # time between two Hello messages
TAKEOVER_HEARTBEATS = 2  # missing heartbeats after which a new replay server takes over the shard
ABSENT_HEARTBEATS = 3  # missing heartbeats after which a replay server or the learner counts as absent
FORGET_SECONDS = 30.0  # silence after which the status no longer shows a program
END_NOTICE_SECONDS = 3.0  # time after the end of the run in which the coordinator still answers requests
GOODBYE_SECONDS = 1.0  # maximum time to send the queued messages of a closed control socket

# Reports
REPORT_SECONDS = 1.0  # time between trainer reports, between curve rows, and between score messages
TRAINER_SILENCE_SECONDS = 10.0  # silence after which the trainer counts as the bottleneck
STATUS_SECONDS = 1.0  # time between two status requests of the live view
ANSWER_SECONDS = 3.0  # time without an answer after which the live view repeats its request

# Experience
RECEIPT_SECONDS = 0.2  # time between two receipts of an active stream; repeated because one may be lost
STREAM_LIFE_SECONDS = 60.0  # time without segments after which a stream gets no more receipts
RESEND_SECONDS = 2.0  # minimum time without a new acknowledgement before a stream resends its window
MOST_RESEND_SECONDS = 10.0  # maximum time before a resend, which grows while acknowledgements are slow
RECEIPT_SILENCE_SECONDS = 1.0  # time without receipts after which they count as lost, not as delayed by a slow store
DRAIN_SECONDS = 0.5  # time that an actor process waits for its last receipts before it ends
CREDIT_SECONDS = 5.0  # time without an acknowledged batch after which a sampler may send one more than its credit

# Parameters
SUBSCRIPTION_SECONDS = 0.2  # new subscriptions within this time share one publication
REPEAT_SECONDS = 5.0  # time without newer parameters after which the newest are published again

# Connections
RECONNECT_SECONDS = 0.1  # pause before the first reconnect attempt; doubles for each further attempt
MOST_RECONNECT_SECONDS = 2.0  # maximum pause between reconnect attempts
CONTROL_RECONNECT_SECONDS = 0.2  # maximum pause for control sockets: short, so that runs start fast
RENEW_SECONDS = 10.0  # delay of a due answer after which a connection is renewed; doubles after each renewal
KEEPALIVE_SECONDS = 4  # idle time of a connection before the first keepalive probe
PROBE_SECONDS = 2  # time between two keepalive probes
KEEPALIVE_PROBES = 3  # unanswered keepalive probes after which the connection is closed
UNACKNOWLEDGED_SECONDS = 10.0  # time without acknowledgement of sent bytes after which the connection is closed
HANDSHAKE_SECONDS = 5.0  # maximum duration of the handshake of a new connection
