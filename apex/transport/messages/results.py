"""Messages with scores: the actors' figures and the results of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from apex.config import MAX_EPISODES
from apex.facts import Number, Record
from apex.metric_tags import ACTOR_TAG_PREFIXES
from apex.transport.messages.fields import U31, U32

ActorTag = Annotated[str, Meta(max_length=128, pattern=rf"^({'|'.join(ACTOR_TAG_PREFIXES)})[A-Za-z0-9_./-]*\Z")]


class EvaluationResult(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one evaluation of the newest parameters over complete episodes."""

    updates: U32  # version of the parameters
    mean: Number
    median: Number
    low: Number | None = None  # lower end of the mean's 95 % bootstrap confidence interval; None: only one episode
    high: Number | None = None  # upper end of the same interval
    length: Number  # mean episode length in steps
    episodes: Annotated[int, Meta(ge=0, le=MAX_EPISODES)]
    scores: Annotated[list[Number], Meta(max_length=MAX_EPISODES)]
    confirmed: bool  # whether the whole interval, of at least 100 new episodes, lies above the stop score
    epsilon: Number
    seed: U31  # seed that reproduces these episodes if `num_envs` is the same
    num_envs: Annotated[int, Meta(ge=1, le=MAX_EPISODES)]  # parallel environments
    seconds: Number  # duration of the evaluation


class ActorFigures(Record, frozen=True, kw_only=True):
    """Figures of the episodes that one actor process has finished."""

    role: Literal["actor"]
    steps: None  # The coordinator fills in the steps.
    time: Number  # Unix seconds
    scalars: Annotated[Mapping[ActorTag, Number | None], Meta(max_length=4_096)]  # by TensorBoard tag; null: not finite
