"""The faults of `python -m chaos`, drawn from a seed before the run begins."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from apex.errors import require
from chaos.proxy import PAIRS

KINDS = ("kill", "hangup", "stop", "cut", "delay", "garbage", "storm")
VICTIMS = ("launcher", "replay", "learner", "actor")
ROUND_TRIP_SECONDS = 0.25  # round trip of delayed links
RARE_ROUNDS = 5
STORM_KILLS = 4
STORM_SECONDS = 1.5  # time between two kills of a storm


class Fault(NamedTuple):
    """One fault."""

    at: float  # seconds after the beginning of the training
    kind: str  # one of KINDS
    target: str  # a role, "ROLE's child", "learner's loader", a pair of programs, or "every port"
    seconds: float = 0.0  # duration

    def sentence(self) -> str:
        """For people."""
        sentences = {
            "kill": f"kill -9 {self.target}",
            "hangup": f"SIGHUP {self.target}",
            "stop": f"SIGSTOP {self.target} for {self.seconds:.1f} s",
            "cut": f"cut {self.target} for {self.seconds:.1f} s",
            "delay": f"{1000 * ROUND_TRIP_SECONDS:.0f} ms round trip {self.target} for {self.seconds:.1f} s",
            "garbage": f"garbage to {self.target}",
            "storm": f"kill -9 {self.target}, {STORM_KILLS} times, {STORM_SECONDS} s apart",
        }
        return f"{self.at:7.1f} s  {sentences[self.kind]}"


def draw(seed: int, seconds: float, period: float, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Returns one fault for each `period`, which varies by a fifth; the same for the same arguments.

    Every kind occurs once before any occurs again. Raises UsageError for an unknown kind.
    """
    for kind in kinds:
        require(kind in KINDS, f"--faults must be of {', '.join(KINDS)}, got {kind!r}")
    require(bool(kinds), f"--faults must name at least one of {', '.join(KINDS)}")
    rng = random.Random(seed)
    faults: list[Fault] = []
    bag: list[str] = []
    at = period
    while at < seconds:
        bag = bag or rng.sample(list(kinds), len(kinds))
        kind = bag.pop()
        target, lasts = _target(kind, rng)
        faults.append(Fault(round(at + rng.uniform(-0.2, 0.2) * period, 1), kind, target, round(lasts, 1)))
        at += period
    return faults


def draw_kills(seed: int, rounds: int, victims: Sequence[str], rare: Sequence[str] = ()) -> list[str]:
    """Returns the victims in order: each of `victims` once per round, each of `rare` once in RARE_ROUNDS rounds.

    For actors and replay servers, every second victim is one of their children.
    """
    rng = random.Random(seed)
    killed: list[str] = []
    for number in range(rounds):
        targets = [*victims, *(rare if number % RARE_ROUNDS == 0 else ())]
        for target in rng.sample(targets, len(targets)):
            is_child = target in ("actor", "replay") and rng.random() < 0.5
            killed.append(f"{target}'s child" if is_child else target)
    return killed


def make_garbage(seed: int) -> list[bytes]:
    """Returns the data that is sent to ports: noise, another protocol, and a valid greeting followed by noise."""
    rng = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
    return [
        rng.randbytes(4_096),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        greeting + rng.randbytes(2_048),
        greeting + ready + b"\x00\xff" + rng.randbytes(255),
        greeting + ready + b"\x02" + bytes([255] * 8) + rng.randbytes(1_024),
    ]


def _target(kind: str, rng: random.Random) -> tuple[str, float]:
    if kind == "kill":
        role = rng.choice(VICTIMS)
        return (f"{role}'s child" if role != "launcher" and rng.random() < 0.5 else role), 0.0
    if kind == "hangup":
        return rng.choice(VICTIMS), 0.0
    if kind == "storm":
        return rng.choice([role for role in VICTIMS if role != "launcher"]), STORM_KILLS * STORM_SECONDS
    if kind == "stop":
        return rng.choice(VICTIMS), rng.uniform(1.0, 8.0)
    if kind in ("cut", "delay"):
        return rng.choice(list(PAIRS)), rng.uniform(2.0, 10.0)
    return "every port", 0.0
