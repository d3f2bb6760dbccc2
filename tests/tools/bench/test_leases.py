"""The benchmark of leases renews all leases and reports the times."""

from bench.leases import STREAMS_PER_HOST, measure


def test_a_short_run_gives_every_figure():
    figures = measure(num_leases=4 * STREAMS_PER_HOST)
    assert figures["leases"] == 4 * STREAMS_PER_HOST
    assert figures["renewal_ms"] > 0
    assert figures["expiry_ms"] > 0
