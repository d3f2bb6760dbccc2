"""Facts about a run, as small immutable records: inside the programs, in messages and in files.

Nothing in a record is a sentence: a field is a number, an enumeration or an identifier. `apex.sentences` turns a record
into English where a person reads it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fact, a message or a part of a message. The receiver checks that it has exactly the declared fields."""


EndKind = Literal["score", "steps", "updates", "minutes", "interrupted"]
Phase = Literal["waiting_for_replay", "filling_replay", "training", "finishing", "evaluating_final_policy", "finished"]


class EndReason(Record, frozen=True):
    """Why a run ended: it reached a limit, or a user stopped it."""

    kind: EndKind
    value: float | None = None  # the limit that was reached; None: interrupted

    @property
    def is_limit(self) -> bool:
        """Whether the run reached a limit, so that it would end at once if it was resumed."""
        return self.kind != "interrupted"


INTERRUPTED = EndReason("interrupted")
