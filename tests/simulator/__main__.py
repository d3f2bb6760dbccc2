"""`python -m tests.simulator`: simulates the histories of many seeds, and prints the history of each broken promise."""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `support`

from .history import describe, simulate


def main() -> int:
    """Returns 1 if any promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000, metavar="N", help="number of histories; default 1000")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed; default 0")
    parser.add_argument("--events", action="store_true", help="print every history")
    options = parser.parse_args()
    began, counts, violations = time.monotonic(), Counter(), 0
    for seed in range(options.first, options.first + options.seeds):
        result = simulate(seed)
        counts += result.counts
        violations += bool(result.failure)
        if result.failure or options.events:
            print(describe(result), flush=True)
        if (seed + 1 - options.first) % 1_000 == 0:
            print(f"{seed + 1 - options.first:,} histories", file=sys.stderr, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:10,}  {name.replace('_', ' ')}")
    print(f"{options.seeds:,} histories in {time.monotonic() - began:.0f} s, {violations} broken promises")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
