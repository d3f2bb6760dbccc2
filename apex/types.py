"""What crosses a boundary between modules: immutable records, their dtypes and axes.

Axes: B batch, E environment streams of one process, A actions, S stacked frames, *F one frame.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from apex.frame_blob import FrameBlob

Array = NDArray[Any]


class Role(StrEnum):
    """A program of a run. Its name is also its command, its key and its module: `apex actor`, `actor.key`."""

    LEARNER = "learner"
    REPLAY = "replay"
    ACTOR = "actor"
    EVALUATOR = "evaluator"
    OBSERVER = "observer"  # only asks the learner for its status: `apex status` and the live view


PROGRAMS = (Role.LEARNER, Role.REPLAY, Role.ACTOR, Role.EVALUATOR)  # the roles with a program of their own


# One transition inside a segment. `frame` and `next_frame` count from the segment's first frame and
# name the newest frame of s_t and of s_{t+m}; `depth` and `next_depth` say how many frames of the
# stack are real: an episode starts with S - 1 zero frames, which are never sent.
RECORD = np.dtype(
    [
        ("n_step_return", "<f4"),  # r_{t+1} + ... + gamma^(m-1) r_{t+m}
        ("discount", "<f4"),  # gamma^m, or 0 if s_{t+m} is terminal
        ("priority", "<f4"),  # |TD error| by the actor's own Q-values, before the exponent
        ("action", "<u2"),
        ("frame", "<u2"),
        ("next_frame", "<u2"),
        ("depth", "u1"),
        ("next_depth", "u1"),
    ]
)

# One transition of a batch on its way to the learner. Its frames `first ... next_frame` lie side by side in
# the batch's blob; `frame` and `next_frame` count from the first of them.
BATCH_RECORD = np.dtype(
    [
        ("key", "<i8"),
        ("probability", "<f8"),  # leaf / root when it was drawn
        ("n_step_return", "<f4"),
        ("discount", "<f4"),
        ("version", "<u4"),  # parameters that chose the action, as num_updates
        ("action", "<u2"),
        ("num_frames", "<u2"),
        ("frame", "<u2"),
        ("next_frame", "<u2"),
        ("depth", "u1"),
        ("next_depth", "u1"),
        ("unused", "<u2"),  # Pads the record to 40 bytes; always 0.
    ]
)

FrameCodec = Literal["lz4", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What one transition looks like; every length on the wire is compared with this, never trusted."""

    frame_shape: tuple[int, ...]  # (84, 84) for images, (D,) for vectors
    frame_dtype: Literal["uint8", "float32"]
    stack: int  # frames in one observation; 1 for vectors
    num_actions: int
    n_step: int  # no transition is longer
    codec: FrameCodec  # how each frame is compressed on its own

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame, decompressed."""
        return prod(self.frame_shape) * np.dtype(self.frame_dtype).itemsize

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Axes [S, *F] of one observation."""
        return (self.stack, *self.frame_shape)

    @property
    def max_frame_bytes(self) -> int:
        """The most that one frame may take compressed (LZ4's own bound)."""
        return self.frame_bytes + self.frame_bytes // 255 + 16 if self.codec == "lz4" else self.frame_bytes

    @property
    def fingerprint(self) -> int:
        """The first 32 bits of a SHA-256 over the fields: it stands in every header."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The inverse of `to_dict`, also after JSON."""
        return cls(**{**fields, "frame_shape": tuple(fields["frame_shape"])})


class Step(NamedTuple):
    """What E environments answer to E actions. An ended one has already begun its next episode."""

    observation: Array  # frame_dtype[E, S, *F]  the state to act in next
    reward: NDArray[np.float32]  # [E]  raw: neither clipped nor scaled
    terminated: NDArray[np.bool_]  # [E]  the MDP ended
    truncated: NDArray[np.bool_]  # [E]  a limit cut it
    life_lost: NDArray[np.bool_]  # [E]  a life went, and the game goes on
    final_observation: Array  # frame_dtype[E, S, *F]  last state of what ended; elsewhere anything
    failed: NDArray[np.bool_] | None = None  # [E]  not taken: its environment failed and began anew; None: all were


class Stream(NamedTuple):
    """Who speaks: one environment stream in one of its lives."""

    actor_id: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # 0 ... N-1; the highest has the smallest epsilon
    incarnation: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # grows with every lease of the id

    def shard(self, num_shards: int) -> int:
        """The replay shard that keeps the stream, in this life and every other."""
        return self.actor_id % num_shards


class Segment(NamedTuple):
    """About 50 consecutive transitions of one stream, and every frame that they need once."""

    stream: Stream
    number: int  # 0, 1, 2, ... within the stream's incarnation
    version: int  # newest parameters that chose an action here, as num_updates
    records: Array  # RECORD[K]
    blob: FrameBlob  # uint32[F + 1] byte offsets of the frames, then the frames; see `make_blob`
    base: int = 0  # every segment numbered below this was acknowledged, by this store or by an earlier one


class Receipt(NamedTuple):
    """What the replay server has of one stream."""

    stream: Stream
    store_incarnation: int  # another one: the store began anew, and what was not acknowledged is sent again
    contiguous: int  # every segment numbered below this is stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too


class BatchMessage(NamedTuple):
    """A shard's part of a batch: records and their compressed frames."""

    shard: int
    store_incarnation: int  # keys are meaningful within this only
    sampler: int  # which sampler process drew it ...
    number: int  # ... as its how many-th; comes back with the priorities, and so bounds what is in flight
    num_transitions: int  # transitions alive when it was drawn: N of the importance weights
    records: Array  # BATCH_RECORD[B]
    blob: FrameBlob | None  # frames of all, laid out as in `make_blob`; None: decoded into the learner's memory already


class PriorityUpdate(NamedTuple):
    """New priorities for the transitions of one part of a batch, by key."""

    shard: int
    store_incarnation: int
    sampler: int
    number: int
    keys: NDArray[np.int64]  # [B]
    priorities: NDArray[np.float32]  # [B]  |TD error|, before the exponent


class Parameters(NamedTuple):
    """A snapshot of the online network."""

    version: int  # num_updates when it was published
    values: NDArray[np.float32]  # every tensor of the state dict, flattened, one after the other


class Progress(NamedTuple):
    """How far a run was, beside its updates: what the curves go on from."""

    num_steps: int = 0  # transitions that the replay server had stored
    num_episodes: int = 0  # games that actors had finished
    elapsed_seconds: float = 0.0  # in all lives
