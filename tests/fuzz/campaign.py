"""A campaign against one message type: mutates messages and compares the decoder with the reference.

Messages that reach new lines of the decoder are mutated further.
"""

import json
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, NamedTuple

from apex.transport.messages import control
from apexreplay.wire import codec, header, json_codec
from apexreplay.wire.header import WireError

from .mutations import Mutator
from .reference import accepts
from .seeds import DECODE, SIDES, Seed, make_seeds

DECODERS = {module.__file__ for module in (codec, header, json_codec, control)}
TRACED_SHARE = 0.02  # share of messages whose lines are traced, which takes ten times as long
MEASURED_SHARE = 0.005  # share of messages whose memory is measured
MOST_CORPUS = 2_000
BASE_BYTES, BYTES_PER_BYTE = 100_000, 100  # Decoded JSON takes about 60 bytes for each `1,`.


class Finding(NamedTuple):
    """A message that the decoder treats wrongly."""

    kind: str
    side: str
    parts: list[bytes]
    problem: str

    def to_json(self) -> str:
        """Returns the finding as JSON, for `replay`."""
        parts = [part.hex() for part in self.parts]
        return json.dumps({"type": self.kind, "side": self.side, "parts": parts, "problem": self.problem})


class Report(NamedTuple):
    """The result of a campaign."""

    kind: str
    messages: int
    accepted: int
    reasons: dict[str, int]  # refusals by reason
    arcs: int  # transitions between lines of the decoders
    corpus: int
    findings: list[Finding]


def judge(kind: str, side_name: str, parts: list[bytes]) -> tuple[str, str]:
    """Returns the decoder's reason for refusing ("" if it accepts), and the problem with that, or ""."""
    side = SIDES[side_name]
    try:
        DECODE[kind](side, parts)
        reason = ""
    except WireError as error:
        reason = error.reason
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"[:200]
    if accepts(kind, parts, side.facts) == (not reason):
        return reason, ""
    return reason, f"only the decoder refuses: {reason}" if reason else "only the reference refuses"


class Arcs:
    """Transitions from line to line within the decoders, recorded by the interpreter's trace function.

    msgspec is not traced. Instead, each of its error messages counts as one transition, without its numbers.
    """

    def __init__(self) -> None:
        self.known: set[tuple[CodeType, int, int] | str] = set()
        self._new = False

    def watch(self, call: Callable[[], Any]) -> bool:
        """Returns whether the call makes a new transition."""
        self._new = False
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        except WireError as error:
            self._note(re.sub(r"\d+", "0", str(error)))
        finally:
            sys.settrace(before)
        return self._new

    def _note(self, step: tuple[CodeType, int, int] | str) -> None:
        if step not in self.known:
            self.known.add(step)
            self._new = True

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in DECODERS:
            return None
        code, last = frame.f_code, 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                arc = (code, last, frame.f_lineno)
                last = frame.f_lineno
                self._note(arc)
            return step

        return step


def _measure(kind: str, seed: Seed) -> str:
    """Returns a problem if decoding takes much more memory than the message; else ""."""
    tracemalloc.start()
    try:
        judge(kind, seed.side, seed.parts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = sum(map(len, seed.parts))
    return f"{peak} bytes for a message of {size}" if peak > BASE_BYTES + BYTES_PER_BYTE * size else ""


def run(kind: str, messages: int, seed: int, *, most_findings: int = 10) -> Report:
    """Runs a campaign, deterministic for its arguments. Ends early after `most_findings` findings."""
    rng = Random(f"{kind} {seed}")
    corpus = make_seeds(kind)
    grown = len(corpus)
    mutator, arcs = Mutator(kind, rng), Arcs()
    foreign = [other for name in DECODE for other in make_seeds(name)]
    reasons: Counter[str] = Counter()
    findings: list[Finding] = []
    num_done = 0
    for origin in corpus:
        reason, problem = judge(kind, origin.side, origin.parts)
        if not problem:
            arcs.watch(lambda origin=origin: DECODE[kind](SIDES[origin.side], origin.parts))
        if problem or reason:
            findings.append(Finding(kind, origin.side, origin.parts, problem or f"a seed is refused: {reason}"))
    for num_done in range(1, messages + 1):  # noqa: B007 - used after the loop
        # Half of the messages mutate recent finds or our few hand-made seeds, which would otherwise be chosen too
        # rarely.
        first = rng.random()
        origin = corpus[rng.randrange(grown)] if first < 0.3 else corpus[rng.randrange(len(corpus))]
        pool = corpus if rng.random() < 0.9 else foreign
        other = pool[rng.randrange(len(pool))]
        parts = mutator.mutate(origin.parts, [other.parts])
        reason, problem = judge(kind, origin.side, parts)
        reasons[reason] += 1
        made = Seed(origin.side, parts)
        look = rng.random()
        if not problem and look < MEASURED_SHARE:
            problem = _measure(kind, made)
        if problem:
            findings.append(Finding(kind, origin.side, parts, problem))
            if len(findings) >= most_findings:
                break
        is_small = 0 < sum(map(len, parts)) < 2_000
        may_grow = look > 1 - TRACED_SHARE and is_small and len(corpus) < MOST_CORPUS and not problem
        if may_grow and arcs.watch(lambda made=made: DECODE[kind](SIDES[made.side], made.parts)):
            corpus.append(made)
    accepted = reasons.pop("", 0)
    return Report(kind, num_done, accepted, dict(reasons.most_common()), len(arcs.known), len(corpus), findings)


def accepted_messages(kind: str, messages: int, seed: int) -> Iterator[tuple[Seed, Any]]:
    """Yields the accepted ones of `messages` mutated messages, each with the decoded value."""
    rng = Random(f"accepted {kind} {seed}")
    seeds = make_seeds(kind)
    mutator = Mutator(kind, rng)
    for _ in range(messages):
        origin = rng.choice(seeds)
        parts = mutator.mutate(origin.parts, [rng.choice(seeds).parts])
        try:
            decoded = DECODE[kind](SIDES[origin.side], parts)
        except WireError:
            continue
        yield Seed(origin.side, parts), decoded


def replay(path: Path) -> str:
    """Returns the problem of a finding in a file; "" if it is mended."""
    entry = json.loads(path.read_text())
    parts = [bytes.fromhex(part) for part in entry["parts"]]
    return judge(entry["type"], entry["side"], parts)[1] or _measure(entry["type"], Seed(entry["side"], parts))
