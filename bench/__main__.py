"""`python -m bench NAME`: measures this machine with the real programs, and compares two commits."""

import importlib
import sys
from collections.abc import Callable, Sequence

from apex.runtime.logs import configure_logging
from apexreplay.errors import FINISHED, UsageError
from apexreplay.process.lifecycle import reports_errors

BENCHES = {  # name of the benchmark -> module, whose main(argv) measures
    "acting": "bench.acting",
    "actor": "bench.actor",
    "compare": "bench.compare",
    "confirmation": "bench.confirmation",
    "connections": "bench.connections",
    "curve": "bench.curve_encryption",
    "device": "bench.device",
    "engines": "bench.engines",
    "fleet": "bench.fleet.command",
    "learner": "bench.learner",
    "learning": "bench.learning.command",
    "leases": "bench.leases",
    "observations": "bench.observations",
    "peer_actor": "bench.peer_actor",
    "peers": "bench.peer_table",
    "replay": "bench.replay",
    "sequences": "bench.sequences",
    "snapshots": "bench.snapshots",
    "system": "bench.system",
    "threads": "bench.threads",
}


@reports_errors("python -m bench")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first argument names; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m bench {'|'.join(BENCHES)} [OPTIONS]")
        return FINISHED
    if arguments[0] not in BENCHES:
        raise UsageError(f"unknown benchmark {arguments[0]!r}; known: {', '.join(BENCHES)}")
    if any(argument.partition("=")[0] == "--transport.keys" for argument in arguments):
        raise UsageError("benchmarks make their own keys, or use none; python -m bench curve measures the cost of keys")
    bench: Callable[[list[str]], int] = importlib.import_module(BENCHES[arguments[0]]).main
    return bench(arguments[1:])


if __name__ == "__main__":
    configure_logging("bench")
    sys.exit(main())
