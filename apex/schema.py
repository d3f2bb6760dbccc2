"""The schema of a run: observations, actions, and the table of its transitions in the replay library.

Axes: B batch, A discrete actions, K values of a continuous action, S stacked frames, *F one frame. An action is int64,
0 ... A - 1, or float32[K] in [-1, 1], depending on the `Schema`.
"""

from dataclasses import asdict, dataclass, fields
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from apexreplay.item_kinds import Sequence, Window
from apexreplay.tables import FieldCodec, Table, table

MIN_IMAGE_SIZE = 36  # pixels; smaller images are grids, for which the convolutions of DQN are too large
PartDtype = Literal["uint8", "float32", "int32", "bool"]


class Part(NamedTuple):
    """One part of an observation. The parts of a frame follow each other in its bytes; bools are packed into bits."""

    name: str  # its keys in the observation, such as "goal.camera"
    dtype: PartDtype  # int32: indices of categories
    shape: tuple[int, ...]  # [H, W] or [H, W, C] for images and grids, [D] for others
    most: int = 255  # the largest value, if it is an integer

    @property
    def num_bytes(self) -> int:
        """Size in the bytes of a frame."""
        return -(-prod(self.shape) // 8) if self.dtype == "bool" else prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def stored_as(self) -> str:
        """The dtype that a network takes."""
        return "uint8" if self.dtype == "bool" else self.dtype

    @property
    def is_image(self) -> bool:
        """Whether it is an image, neither a grid of cells nor a vector."""
        return self.dtype == "uint8" and len(self.shape) > 1 and min(self.shape[:2]) >= MIN_IMAGE_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What the environment's observations and actions are, and what a transition takes from them."""

    frame_shape: tuple[int, ...]  # [H, W] or [H, W, C] for images and grids, [D] for vectors and for bytes of `parts`
    frame_dtype: Literal["uint8", "float32"]
    stack: int  # frames in one observation
    num_actions: int  # A; 0 if actions are continuous
    n_step: int  # maximum steps that one transition spans
    codec: FieldCodec  # compression of each single frame
    action_size: int = 0  # K; 0 if actions are discrete
    masked: bool = False  # whether the environment has masks of the allowed actions
    parts: tuple[Part, ...] = ()  # parts of the observation, if the frame is their bytes one after the other
    sequence_length: int = 0  # steps of a sequence; 0: the items of the replay memory are transitions
    sequence_period: int = 0  # steps of an episode from the beginning of one sequence to that of the next one
    state_size: int = 0  # D: numbers in the state of a recurrent agent

    @property
    def frame_bytes(self) -> int:
        """Size of one decompressed frame in bytes."""
        return prod(self.frame_shape) * np.dtype(self.frame_dtype).itemsize

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """`parts`, or the whole observation as the only part."""
        return self.parts or (Part("observation", self.frame_dtype, self.frame_shape),)

    @property
    def has_images(self) -> bool:
        """Whether any part is an image."""
        return any(part.is_image for part in self.all_parts)

    @property
    def is_vector(self) -> bool:
        """Whether the observation is one vector of float32."""
        return self.frame_dtype == "float32" and len(self.frame_shape) == 1

    @property
    def observations(self) -> str:
        """A description of the observations, such as "4 x 84 x 84 uint8"."""
        stack = f"{self.stack} x " if self.stack > 1 or not self.parts else ""
        texts = [f"{' x '.join(map(str, part.shape))} {part.dtype}" for part in self.all_parts]
        names = [f"{part.name} " for part in self.parts] or [""]
        return stack + ", ".join(map("".join, zip(names, texts, strict=True)))

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
    def table(self) -> Table:
        """The table of the transitions, or of the sequences."""
        return sequences(self) if self.sequence_length else transitions(self)

    def to_attributes(self) -> dict[str, Any]:
        """Returns the fields and the shapes, for code that creates a network without this package."""
        return {**self.to_dict(), "observation_shape": self.observation_shape, "action_shape": self.action_shape}

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dictionary that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Self:
        """Returns the schema from a result of `to_dict` or its JSON. Raises ValueError if a field is missing."""
        saved = {"sequence_length": 0, "sequence_period": 0, "state_size": 0, **saved}  # added later
        missing = [field.name for field in fields(cls) if field.name not in saved]
        if missing:
            raise ValueError(f"the schema lacks {', '.join(missing)}: an older version of this package wrote it")
        parts = tuple(Part(name, dtype, tuple(shape), most) for name, dtype, shape, most in saved["parts"])
        for part in parts:
            sized = part.dtype in get_args(PartDtype) and all(type(size) is int and size > 0 for size in part.shape)
            named = type(part.name) is str and part.name.isprintable()
            # A part whose values have one category has 0.
            bounded = type(part.most) is int and part.most >= (0 if part.dtype == "int32" else 1)
            if not (sized and named and bounded):
                raise ValueError(f"{part} is no part of an observation")
        if len({part.name for part in parts}) < len(parts):
            raise ValueError("two parts of an observation have one name")
        if parts and tuple(saved["frame_shape"]) != (sum(part.num_bytes for part in parts),):
            raise ValueError(f"the parts of a frame do not have its {saved['frame_shape']} bytes")
        return cls(**{**saved, "frame_shape": tuple(saved["frame_shape"]), "parts": parts})


@cache
def transitions(schema: Schema) -> Table:
    """Returns the table of n-step transitions (docs/concepts/transition.md).

    `reward` and `step_discount` belong to the single step from s_t; learning does not use them yet.
    """
    masks = {"next_mask": ("|u1", (schema.mask_bytes,))} if schema.masked else {}  # actions of s_{t+m}: `pack_mask`
    return table(
        "transitions",
        {"observation": (schema.frame_dtype, schema.frame_shape, schema.codec)},
        item=Window(schema.stack, schema.n_step),
        values={
            "n_step_return": "<f4",  # r_{t+1} + ... + gamma^(m-1) r_{t+m}
            "discount": "<f4",  # gamma^m, or 0 if s_{t+m} is terminal
            "reward": "<f4",  # r_{t+1}, the reward used for learning
            "step_discount": "<f4",  # gamma, or 0 if s_{t+1} is terminal
            "action": (schema.action_dtype, schema.action_shape),
            **masks,
        },
        kept=("reward", "step_discount"),
        description=schema.actions,
    )


@cache
def sequences(schema: Schema) -> Table:
    """Returns the table of sequences of steps, as R2D2 (Kapturowski et al. 2019) learns from them.

    The values of step t have index t. Each is 0 for a step that its sequence does not train.
    """
    length = schema.sequence_length
    masks = {"next_mask": ("|u1", (length, schema.mask_bytes))} if schema.masked else {}
    return table(
        "sequences",
        {"observation": (schema.frame_dtype, schema.frame_shape, schema.codec)},
        item=Sequence(length, schema.sequence_period),
        values={
            "state": ("<f4", (schema.state_size,)),  # of the agent before the first step
            "span": ("|u1", (length,)),  # m, the steps of the n-step return
            "n_step_return": ("<f4", (length,)),  # r_{t+1} + ... + gamma^(m-1) r_{t+m}
            "discount": ("<f4", (length,)),  # gamma^m, or 0 if s_{t+m} is terminal
            "action": (schema.action_dtype, (length, *schema.action_shape)),
            **masks,
        },
        description=schema.actions,
    )


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Packs bool[..., A] into uint8[..., ceil(A / 8)]: action a is bit a % 8 of byte a // 8; bits beyond A are 0."""
    return np.packbits(mask, axis=-1, bitorder="little")


def unpack_mask(packed: NDArray[np.uint8], num_actions: int) -> NDArray[np.bool_]:
    """Returns the mask that `pack_mask` packed, bool[..., A]."""
    return np.unpackbits(packed, axis=-1, count=num_actions, bitorder="little").view(np.bool_)
