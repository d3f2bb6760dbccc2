"""What the driver orders from a guard, and what the guard reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import msgspec

from apex.facts import Ending, LogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run: one program, or the head of a run, which consists of every program except the actors."""

    name: str  # name of the log file
    home: str  # folder of the guard; the keys are written to home/keys
    keys: dict[str, str]  # file name -> text of the key file
    arguments: tuple[str, ...] = ()  # arguments after `python -m`; empty if this host runs the head
    stuck_seconds: float = 0.0
    run: dict[str, object] | None = None  # configuration of the run; None if this host does not run the head
    continues: bool = False  # the run may be in its mirror: it has begun, or the command has --continue
    begun: bool = False  # whether the run has started before, so that its run folder must exist
    cores: int = 0  # number of CPU cores that the head is sized for; 0: all cores of this host
    argv: tuple[str, ...] = ()  # command line of the user, for the run's manifest

    def encode(self) -> str:
        """Returns the order as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class Report:
    """A line of a guard's standard output: a log's line or entry, new settings, or the ending of its programs."""

    log: str = ""  # name of the log
    line: str = ""
    entry: LogEntry | None = None  # a warning or an error of the log
    config_toml: str = ""
    ending: Ending | None = None

    def encode(self) -> str:
        """Returns the report as one line of JSON."""
        return json.dumps(msgspec.to_builtins(self)) + "\n"

    @classmethod
    def decode(cls, data: str | bytes) -> Report:
        """The inverse of `encode`."""
        return msgspec.convert(json.loads(data), cls)
