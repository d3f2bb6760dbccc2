"""Scores of games: those that actors finish, and the results of evaluations."""

from itertools import islice
from typing import Annotated, NamedTuple

from msgspec import Meta, field

from apex.config.tree import MAX_EPISODES
from apex.metric_tags import MAX_METRICS
from apex.transport.messages.fields import U31, U32
from apexreplay.facts import Count, Number, Record, Text

MAX_SCORES = 1_000  # maximum actors in one message; the scores of others follow with the next message


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
    confirmed: bool  # whether these are new episodes that confirm the stop score
    epsilon: Number
    seed: U31  # of these episodes; with the same `num_envs`, the same first ones
    num_envs: Annotated[int, Meta(ge=1, le=MAX_EPISODES)]  # parallel environments
    seconds: Number  # duration of the evaluation
    metrics: Annotated[dict[Text, Number], Meta(max_length=MAX_METRICS)] = field(default_factory=dict)  # their means


class ActorScores(NamedTuple):
    """The games that one actor has finished. A lost life does not end a game."""

    actor_id: U32
    games: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    score: Number | None  # sum of the games' unclipped rewards; None: not finite
    length: Count  # sum of the games' steps


class MetricSum(NamedTuple):
    """A metric that environments report at the end of their games."""

    games: Annotated[int, Meta(ge=1, le=2**31 - 1)]  # games that reported it
    total: Number  # sum over these games


class Scores(Record, frozen=True, omit_defaults=True):
    """The games that actors have finished since the last message."""

    actors: Annotated[list[ActorScores], Meta(max_length=MAX_SCORES)]
    faults: Count = 0  # games without a score, because a fault of the environment ended them
    metrics: Annotated[dict[Text, MetricSum], Meta(max_length=MAX_METRICS)] = field(default_factory=dict)


class ScoreSums:
    """Adds scores up until they can be passed on. A long wait therefore loses no game and takes little memory."""

    def __init__(self) -> None:
        self._actors: dict[int, ActorScores] = {}
        self._faults = 0
        self._metrics: dict[str, MetricSum] = {}

    def add(self, scores: Scores) -> None:
        """Adds scores to those that wait."""
        self._faults += scores.faults
        for actor in scores.actors:
            known = self._actors.get(actor.actor_id)
            self._actors[actor.actor_id] = actor if known is None else _sum(known, actor)
        for name, (games, total) in scores.metrics.items():
            if name in self._metrics or len(self._metrics) < MAX_METRICS:
                before = self._metrics.get(name, MetricSum(0, 0.0))
                self._metrics[name] = MetricSum(before.games + games, before.total + total)

    def take(self, most: int | None = MAX_SCORES) -> Scores | None:
        """Removes and returns the scores of up to `most` actors (None: of all); None if no scores wait."""
        if not self._actors and not self._faults and not self._metrics:
            return None
        scores = Scores(list(islice(self._actors.values(), most)), self._faults, self._metrics)
        self._faults, self._metrics = 0, {}
        for actor in scores.actors:
            del self._actors[actor.actor_id]
        return scores


def _sum(one: ActorScores, other: ActorScores) -> ActorScores:
    score = None if one.score is None or other.score is None else one.score + other.score
    return ActorScores(one.actor_id, one.games + other.games, score, one.length + other.length)
