"""Periods and timeouts of the sockets, in seconds. docs/protocol.md includes this file."""

# Leaving
GOODBYE_SECONDS = 1.0  # maximum time to send the queued messages of a closed control socket

# Experience
RECEIPT_SECONDS = 0.2  # time after which a receipt is sent again, because the first may be lost
RECEIPT_REPEAT_SECONDS = 1.0  # time between two further receipts of an active stream
STREAM_LIFE_SECONDS = 60.0  # time without segments after which a stream gets no more receipts
RESEND_SECONDS = 2.0  # minimum time without a new acknowledgement before a stream resends its window
MOST_RESEND_SECONDS = 10.0  # maximum time before a resend, which grows while acknowledgements are slow
RECEIPT_SILENCE_SECONDS = 1.8  # time without receipts after which they count as lost, not as delayed by a slow store
CREDIT_SECONDS = 5.0  # time without an acknowledged batch after which a sampler may send one more than its credit

# Connections
CONTROL_RECONNECT_SECONDS = 0.2  # maximum pause of control sockets: short, so that runs start fast
RECONNECT_SECONDS = 0.1  # pause before the first reconnect attempt; doubles for each further attempt
MOST_RECONNECT_SECONDS = 2.0  # maximum pause between reconnect attempts
RENEW_SECONDS = 10.0  # delay of a due answer after which a connection is renewed; doubles after each renewal
KEEPALIVE_SECONDS = 4  # idle time of a connection before the first keepalive probe
PROBE_SECONDS = 2  # time between two keepalive probes
KEEPALIVE_PROBES = 3  # unanswered keepalive probes after which the connection is closed
UNACKNOWLEDGED_SECONDS = 10.0  # time without acknowledgement of sent bytes after which the connection is closed
HANDSHAKE_SECONDS = 5.0  # maximum duration of the handshake of a new connection
