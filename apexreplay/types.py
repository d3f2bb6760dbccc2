"""Records of the replay memory and of its messages, with their dtypes and axes.

Axes: B batch, A discrete actions, K values of a continuous action, S stacked frames, *F one frame. An action is int64,
0 ... A - 1, or float32[K] in [-1, 1], depending on the `Schema`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from apexreplay.frame_blob import FrameBlob

Array = NDArray[Any]


FrameCodec = Literal["lz4", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The format of a transition. Every length in a received message is checked against the schema."""

    frame_shape: tuple[int, ...]  # (84, 84) for images, (D,) for vectors
    frame_dtype: Literal["uint8", "float32"]
    stack: int  # frames in one observation; 1 for vectors
    num_actions: int  # A; 0 if actions are continuous
    n_step: int  # maximum steps that one transition spans
    codec: FrameCodec  # compression of each single frame
    action_size: int = 0  # K; 0 if actions are discrete
    masked: bool = False  # whether the environment has masks of the allowed actions

    @property
    def frame_bytes(self) -> int:
        """Size of one decompressed frame in bytes."""
        return prod(self.frame_shape) * np.dtype(self.frame_dtype).itemsize

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation, [S, *F]."""
        return (self.stack, *self.frame_shape)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action: () if actions are discrete, else (K,)."""
        return (self.action_size,) if self.action_size else ()

    @property
    def action_dtype(self) -> str:
        """The dtype of a discrete action, or of each of the K values of a continuous action."""
        return "<f4" if self.action_size else "<i8"

    @property
    def actions(self) -> str:
        """A description of the actions, such as "6 actions"."""
        return f"actions of {self.action_size} values" if self.action_size else f"{self.num_actions} actions"

    @property
    def mask_bytes(self) -> int:
        """Size in bytes of a packed action mask (see `pack_mask`); 0 if there are no masks."""
        return -(-self.num_actions // 8) if self.masked else 0

    @property
    def max_frame_bytes(self) -> int:
        """Maximum size of one compressed frame in bytes; for lz4, the bound that LZ4 guarantees."""
        return self.frame_bytes + self.frame_bytes // 255 + 16 if self.codec == "lz4" else self.frame_bytes

    @property
    def fingerprint(self) -> int:
        """The first 32 bits of the fields' SHA-256. Every message header contains this number."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

    def to_attributes(self) -> dict[str, Any]:
        """Returns the fields and the shapes, for code that creates a network without this package."""
        return {**self.to_dict(), "observation_shape": self.observation_shape, "action_shape": self.action_shape}

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Returns the schema from a result of `to_dict` or its JSON. Raises ValueError if a field is missing."""
        missing = [field.name for field in fields(cls) if field.name not in saved]
        if missing:
            raise ValueError(f"the schema lacks {', '.join(missing)}: an older version of this package wrote it")
        return cls(**{**saved, "frame_shape": tuple(saved["frame_shape"])})


# --- records --------------------------------------------------------------------------------------------------------


@cache
def record_dtype(schema: Schema) -> np.dtype[Any]:
    """Returns the dtype of one transition in a segment.

    `frame` and `next_frame` are the numbers, within the segment, of the newest frames of s_t and s_{t+m}. `depth` and
    `next_depth` are the counts of real frames in the two stacks: an episode starts with S - 1 zero frames, which are
    never sent. `reward` and `step_discount` belong to the single step from s_t; learning does not use them yet.
    """
    return np.dtype(
        [
            ("n_step_return", "<f4"),  # r_{t+1} + ... + gamma^(m-1) r_{t+m}
            ("discount", "<f4"),  # gamma^m, or 0 if s_{t+m} is terminal
            ("priority", "<f4"),  # |TD error| computed by the actor, before the exponent
            ("reward", "<f4"),  # r_{t+1}, the reward used for learning
            ("step_discount", "<f4"),  # gamma, or 0 if s_{t+1} is terminal
            ("action", schema.action_dtype, schema.action_shape),
            ("frame", "<u2"),
            ("next_frame", "<u2"),
            ("depth", "u1"),
            ("next_depth", "u1"),
            *_mask_field(schema),
        ]
    )


@cache
def batch_record_dtype(schema: Schema) -> np.dtype[Any]:
    """Returns the dtype of one transition of a batch that is sent to the learner.

    The frames of a transition are adjacent in the batch's blob. `frame` and `next_frame` count from the first frame of
    the transition.
    """
    return padded(
        [
            ("key", "<i8"),
            ("probability", "<f8"),  # P(i) = 1/R * leaf / root of the shard's sum-tree when the transition was drawn
            ("n_step_return", "<f4"),
            ("discount", "<f4"),
            ("action", schema.action_dtype, schema.action_shape),
            ("version", "<u4"),  # version (num_updates) of the parameters that chose the action
            ("num_frames", "<u2"),
            ("frame", "<u2"),
            ("next_frame", "<u2"),
            ("depth", "u1"),
            ("next_depth", "u1"),
            *_mask_field(schema),
        ]
    )


def padded(record: list[Any]) -> np.dtype[Any]:
    """Returns the dtype of the fields, padded to a multiple of 8 bytes for alignment by a field `unused`, always 0."""
    return np.dtype([*record, ("unused", "u1", (-np.dtype(record).itemsize % 8,))])


def _mask_field(schema: Schema) -> list[Any]:
    """Returns the field for the mask of actions allowed in s_{t+m}, see `pack_mask`; [] if there are no masks."""
    return [("next_mask", "u1", (schema.mask_bytes,))] if schema.masked else []


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Packs bool[..., A] into uint8[..., ceil(A / 8)]: action a is bit a % 8 of byte a // 8; bits beyond A are 0."""
    return np.packbits(mask, axis=-1, bitorder="little")


def unpack_mask(packed: NDArray[np.uint8], num_actions: int) -> NDArray[np.bool_]:
    """Returns the mask that `pack_mask` packed, bool[..., A]."""
    return np.unpackbits(packed, axis=-1, count=num_actions, bitorder="little").view(np.bool_)


class Stream(NamedTuple):
    """One incarnation of one environment stream."""

    actor_id: Annotated[int, Meta(ge=0, le=2**32 - 1)]  # 0 ... N-1; the highest id has the smallest epsilon
    incarnation: Annotated[int, Meta(ge=0, le=2**63 - 1)]  # increases with every lease of the id

    def shard(self, num_shards: int) -> int:
        """Returns the replay shard that stores the stream, the same for all incarnations."""
        return self.actor_id % num_shards


class Cut(NamedTuple):
    """The content of one stream's next `Segment`."""

    stream_index: int  # 0 ... E-1
    records: Array  # record_dtype[M], M >= 1, in order of time
    blob: bytes


class Segment(NamedTuple):
    """About 50 consecutive transitions of one stream. A frame that several transitions share is contained once."""

    stream: Stream
    number: int  # 0, 1, 2, ... within the stream's incarnation
    version: int  # version (num_updates) of the newest parameters that chose an action in this segment
    records: Array  # record_dtype[M]
    blob: FrameBlob  # uint32[F + 1] byte offsets of the frames, then the frames; see `make_blob`
    base: int = 0  # all segments with lower numbers were acknowledged, by this store or an earlier one
    # From the message, (initial, final): final = crc32(blob, crc32(records, initial)).
    checksum: tuple[int, int] | None = None


class Receipt(NamedTuple):
    """Tells an actor which segments of one stream the replay server has stored."""

    stream: Stream
    store_incarnation: int  # if this changes, the store is new, and unacknowledged segments are sent again
    contiguous: int  # all segments with lower numbers are stored
    bitmap: int  # bit i: segment contiguous + 1 + i is stored too


class BatchMessage(NamedTuple):
    """A shard's part of a batch: records and their compressed frames."""

    shard: int
    store_incarnation: int  # keys are valid only within this incarnation
    sampler: int  # number of the sampler process that drew the part
    number: int  # sequence number within that sampler; returned with the priorities to limit parts in flight
    num_transitions: int  # transitions in the shard when the part was drawn: N in the importance weights
    records: Array  # batch_record_dtype[B]
    blob: FrameBlob  # all frames, as in `make_blob`; empty if they are already decoded into the learner's memory


class PriorityUpdate(NamedTuple):
    """New priorities for the transitions of one part of a batch, by key. Without keys it only returns credit."""

    shard: int
    store_incarnation: int
    sampler: int
    number: int
    keys: NDArray[np.int64]  # [B] or [0]
    priorities: NDArray[np.float32]  # [B] or [0]  |TD error|, before the exponent
