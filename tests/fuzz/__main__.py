"""`python -m tests.fuzz`: decodes mutated messages of one type or of all types."""

import argparse
import json
import sys
import time
from pathlib import Path

from .campaign import replay, run
from .seeds import TYPES


def main() -> int:
    """Returns 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=50_000, metavar="N", help="messages of each type; default 50000"
    )
    parser.add_argument("--type", choices=TYPES, action="append", help="type of message; default: every type")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    parser.add_argument("--json", action="store_true", help="print the figures of each type as JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for messages on which a decoder failed")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="decode only these messages again")
    options = parser.parse_args()
    if options.replay:
        problems = {str(path): replay(path) for path in options.replay}
        print("\n".join(f"{path}: {problem or 'no problem'}" for path, problem in problems.items()))
        return int(any(problems.values()))
    found = 0
    for kind in options.type or TYPES:
        began = time.monotonic()
        report = run(kind, options.messages, options.seed)
        seconds = time.monotonic() - began
        found += len(report.findings)
        if options.json:
            figures = {**report._asdict(), "findings": len(report.findings), "seed": options.seed, "seconds": seconds}
            print(json.dumps(figures), flush=True)
        else:
            print(
                f"{kind}: {report.messages:,} messages in {seconds:.0f} s, {report.accepted:,} accepted, "
                f"{len(report.reasons)} reasons of refusal, {report.arcs} arcs, {report.corpus} in the corpus, "
                f"{len(report.findings)} found",
                flush=True,
            )
        for index, finding in enumerate(report.findings):
            print(finding.to_json(), file=sys.stderr, flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{kind}-{options.seed}-{index}.json").write_text(finding.to_json() + "\n")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
