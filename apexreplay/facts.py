"""Facts as small immutable records, in the programs, in messages and in files. Nothing in a record is a sentence."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact, a message or a part of a message. The receiver checks that it has exactly the declared fields."""


MAX_TEXT = 200  # maximum characters of a text in a record
MAX_NUMBER = 1e300  # The sum of a few thousand such numbers is still finite.
Text = Annotated[str, Meta(max_length=MAX_TEXT, pattern=r"^[ -~]*\Z")]  # printable ASCII: cannot control a terminal
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
MAX_COUNTS = 64
Counts = Annotated[dict[Text, Count], Meta(max_length=MAX_COUNTS)]  # name -> count


class HexInt(int):
    """A number below 2^64. As JSON it is a text of hexadecimal digits: not every language has such integers."""


_JoinWait = Literal["host_name", "welcome_without_keys", "welcome_with_keys", "all_replay", "shard", "actor_id"]
_ActorWait = Literal["parameters", "newer_parameters", "receipts", "learner"]
_ReplayWait = Literal["samples", "more_inserts", "credit"]
_LearnerWait = Literal["replay", "transitions", "inserts", "batches", "usable_batches"]
_LearnerProcessWait = Literal["actor_steps", "trainer_start", "checkpoint"]
_HeartbeatWait = Literal["own_main_thread", "child", "any_heartbeat"]
_CloudWait = Literal["key_of_role", "aws", "metadata"]
WaitKind = Literal[_JoinWait, _ActorWait, _ReplayWait, _LearnerWait, _LearnerProcessWait, _HeartbeatWait, _CloudWait]


class Waiting(Record, frozen=True):
    """What a program waits for. The trainer has a sentence for each `what`; `str` returns a line without it."""

    what: WaitKind
    subject: Text = ""  # the program, endpoint or role that is missing, or the error that a service reported
    have: Number | None = None  # the number that is there
    need: Number | None = None  # the number that is required
    who: Text = ""  # the program that waits, such as "actor 7"
    seconds: Number | None = None  # since the wait began; None: not measured

    def __str__(self) -> str:
        waited = "" if self.seconds is None else f" ({self.seconds:.0f} s)"
        return " ".join(filter(None, (self.who, "waits for", self.what.replace("_", " "), self.subject))) + waited
