"""`python -m bench NAME`: measures this machine with the real programs, and compares two commits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from apex.errors import FINISHED, UsageError
from apex.runtime.lifecycle import reports_errors

BENCHES = {  # word -> module whose main(argv) measures
    "actor": "bench.actor",
    "compare": "bench.compare",
    "connections": "bench.connections",
    "curve": "bench.curve_encryption",
    "device": "bench.device",
    "engines": "bench.engines",
    "learner": "bench.learner",
    "learning": "bench.learning.command",
    "leases": "bench.leases",
    "replay": "bench.replay",
    "system": "bench.system",
}


@reports_errors("python -m bench")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark that the first word names; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: python -m bench {'|'.join(BENCHES)} [OPTIONS]")
        return FINISHED
    if words[0] not in BENCHES:
        raise UsageError(f"unknown benchmark {words[0]!r}; known: {', '.join(BENCHES)}")
    if any(word.partition("=")[0] == "--transport.keys" for word in words):
        raise UsageError("benchmarks run on loopback without keys; python -m bench curve tells what keys cost")
    bench: Callable[[list[str]], int] = importlib.import_module(BENCHES[words[0]]).main
    return bench(words[1:])


if __name__ == "__main__":
    sys.exit(main())
