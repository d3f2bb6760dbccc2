"""`python -m bench leases`: measures the time that the coordinator needs to renew leases at one heartbeat."""

import sys
import time
from collections.abc import Sequence
from statistics import median

from apexreplay.server.leases import LeaseTable
from bench.harness.command import Figures, make_parser, run_bench

NUM_LEASES = 65_536  # the maximum of a run
STREAMS_PER_HOST = 128  # 8 cores with 16 streams each
ROUNDS = 5  # renewals of every host


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("leases", f"Measures one renewal of {STREAMS_PER_HOST} of {NUM_LEASES:,} leases.")
    arguments = parser.parse_args(argv)
    return run_bench(lambda folder, stop: measure(), show, as_json=arguments.json)


def measure(num_leases: int = NUM_LEASES) -> Figures:
    """Returns the milliseconds of one renewal, and of the expiry that the coordinator runs once a second."""
    table, now = LeaseTable(num_leases, lease_seconds=3.5), time.monotonic()
    hosts = [table.claim(session, STREAMS_PER_HOST, now) for session in range(num_leases // STREAMS_PER_HOST)]
    renewals, expiries = [], []
    for _ in range(ROUNDS):
        for session, streams in enumerate(hosts):
            begin = time.perf_counter()
            renewed = table.renew(session, streams, now)
            renewals.append(time.perf_counter() - begin)
            assert renewed
        begin = time.perf_counter()
        table.expire(now)
        expiries.append(time.perf_counter() - begin)
    return {"renewal_ms": 1e3 * median(renewals), "expiry_ms": 1e3 * median(expiries), "leases": table.num_leased}


def show(figures: Figures) -> None:
    """Prints the figures."""
    print(f"{figures['leases']:,} leases, {STREAMS_PER_HOST} streams per host")
    print(
        f"one heartbeat's renewal: {figures['renewal_ms']:.3f} ms; expiry, once a second: {figures['expiry_ms']:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
