"""The faults of `python -m chaos`, drawn from a seed before the run begins."""

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

from apexreplay.errors import require
from chaos.proxy import PAIRS

EVERY_KIND = ("kill", "pair", "hangup", "stop", "cut", "delay", "garbage", "storm", "clock", "neighbour", "plant")
KINDS = EVERY_KIND if os.geteuid() == 0 else EVERY_KIND[:-1]  # Only root can act as another user.
VICTIMS = ("launcher", "replay", "learner", "actor", "evaluator")
CHILDREN = ("replay's child", "learner's loader", "learner's coordinator", "actor's child")
STOP_SECONDS = (1.0, 90.0)  # shortest and longest stop; the logarithm of the duration is uniform
CUT_SECONDS = (2.0, 60.0)  # the same for cuts and delays
PLANT_SECONDS = 60.0  # time for which the files of another user stay
LARGEST_JUMP = 86_400.0  # seconds by which the wall clock may differ
BESIDE = ("a living run", "a killed run")  # beside what a second run starts and ends
ROUND_TRIP_SECONDS = 0.25  # round trip of delayed links
RARE_ROUNDS = 5
STORM_KILLS = 4
STORM_SECONDS = 1.5  # time between two kills of a storm


class Fault(NamedTuple):
    """One fault."""

    at: float  # seconds after the beginning of the training
    kind: str  # one of KINDS
    target: str  # a role, one of CHILDREN, two of both, a pair of programs, one of BESIDE, or the name of a thing
    seconds: float = 0.0  # duration; clock: difference from the true time

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
            "pair": f"kill -9 {self.target}, at once",
            "clock": f"{self.target} differs by {self.seconds:+,.0f} s",
            "neighbour": f"a second run starts and ends beside {self.target}",
            "plant": f"another user's files in {self.target} for {self.seconds:.1f} s",
        }
        return f"{self.at:7.1f} s  {sentences[self.kind]}"


def draw(seed: int, seconds: float, period: float, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Returns one fault for each `period`, which varies by a fifth; the same for the same arguments.

    Every kind occurs once before any occurs again. Raises UsageError for an unknown kind.
    """
    for kind in kinds:
        require(kind in EVERY_KIND, f"--faults must be of {', '.join(EVERY_KIND)}, got {kind!r}")
        require(kind in KINDS, f"--faults {kind} needs root", remedy="leave it out, or start the command as root")
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
    match kind:
        case "kill":
            return rng.choice((*VICTIMS, *CHILDREN)), 0.0
        case "pair":
            return " + ".join(rng.sample((*VICTIMS, *CHILDREN), 2)), 0.0
        case "hangup":
            return rng.choice(VICTIMS), 0.0
        case "storm":
            return rng.choice([role for role in VICTIMS if role != "launcher"]), STORM_KILLS * STORM_SECONDS
        case "stop":
            return rng.choice((*VICTIMS, "learner's coordinator")), _duration(*STOP_SECONDS, rng)
        case "cut" | "delay":
            return rng.choice(list(PAIRS)), _duration(*CUT_SECONDS, rng)
        case "clock":
            return "the wall clock", rng.uniform(-LARGEST_JUMP, LARGEST_JUMP)
        case "neighbour":
            return rng.choice(BESIDE), 0.0
        case "plant":
            return "/dev/shm", PLANT_SECONDS
    return "every port", 0.0


def _duration(shortest: float, longest: float, rng: random.Random) -> float:
    return shortest * float((longest / shortest) ** rng.random())
