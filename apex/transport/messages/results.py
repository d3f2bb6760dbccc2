"""Scores: what actors say of their games, and what evaluations come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from apex.config import MAX_EPISODES
from apex.metric_tags import ACTOR_TAG_PREFIXES
from apex.transport.messages.fields import U31, U32, Number, Record

ActorTag = Annotated[str, Meta(max_length=128, pattern=rf"^({'|'.join(ACTOR_TAG_PREFIXES)})[A-Za-z0-9_./-]*\Z")]


class EvaluationResult(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One evaluation of the newest parameters, over full games."""

    updates: U32  # version of the parameters
    mean: Number
    median: Number
    low: Number | None = None  # 95 % interval of the mean, by the bootstrap; None: of one game there is none
    high: Number | None = None
    length: Number  # mean, in steps
    episodes: Annotated[int, Meta(ge=0, le=MAX_EPISODES)]
    scores: Annotated[list[Number], Meta(max_length=MAX_EPISODES)]
    confirmed: bool  # the mean reached the stop score, and again over fresh games where that was asked for
    epsilon: Number
    seed: U31  # of these games: with it, and as many side by side, they can be played again
    num_envs: Annotated[int, Meta(ge=1, le=MAX_EPISODES)]  # games side by side
    seconds: Number  # that it took


class ActorFigures(Record, frozen=True, kw_only=True):
    """Figures of the games that one actor process has finished."""

    role: Literal["actor"]
    steps: None  # The coordinator knows them.
    time: Number  # Unix seconds
    scalars: Annotated[Mapping[ActorTag, Number | None], Meta(max_length=4_096)]  # by TensorBoard tag; null: not finite
