"""`apex bench NAME`: what this machine gives, measured with the real programs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from apex.errors import ConfigError
from apex.lifecycle import FINISHED, REFUSED

BENCHES = {  # word -> module whose main(argv) measures
    "actor": "apex.bench_actor",
    "connections": "apex.bench_connections",
    "curve": "apex.bench_curve",
    "learner": "apex.bench_learner",
    "replay": "apex.bench_replay",
    "system": "apex.bench_system",
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first word names; returns its exit status."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: apex bench {'|'.join(BENCHES)} [OPTIONS]")
        return FINISHED
    try:
        if words[0] not in BENCHES:
            raise ConfigError(f"unknown benchmark {words[0]!r}; known: {', '.join(BENCHES)}")
        if any(word.partition("=")[0] == "--transport.keys" for word in words):
            raise ConfigError("benchmarks run on loopback without keys; apex bench curve tells what keys cost")
        bench: Callable[[list[str]], int] = importlib.import_module(BENCHES[words[0]]).main
        return bench(words[1:])
    except ConfigError as error:
        print(f"apex bench: {error}", file=sys.stderr)
        return REFUSED
