"""Makes the rows that are added to a run's curves once a second: learner, replay servers and bottleneck."""

import math
from collections.abc import Collection, Iterator

from msgspec.structs import asdict

from apex.learning.coordinator.state import RunState
from apex.metric_tags import (
    ACTOR_METRIC,
    EPISODES,
    EVALUATOR_METRIC,
    FAULTS,
    LENGTH,
    MEAN_SCORE,
    SCORE,
    has_curve,
    score_tag,
    shard_tag,
)
from apex.runs.metrics.writer import MetricRow
from apex.sentences import advise
from apex.transport.messages.results import EvaluationResult, Scores
from apex.transport.messages.status import LearnerStatus
from apexreplay.wire.histogram import Histogram
from apexreplay.wire.status import ReplayStatus

SHARD_PERIOD = 10


class MetricRows:
    """Makes rows from the current state of the run."""

    def __init__(self, state: RunState, omit: Collection[str] = ()) -> None:
        """`omit`: tags of replay figures to leave out."""
        self._state = state
        self._omit = omit
        self._histogram: Histogram | None = None  # the histogram that was last added to a row
        self._num_rows = 0
        self._advice = ""  # the text of `limited_by/setting` that was last added to a row

    def next(self) -> Iterator[MetricRow]:
        """Yields a row for the learner's curves and one for the replay curves, each if its part has reported."""
        state = self._state
        if state.learner is not None:
            bottleneck = state.bottleneck()
            advice = f"{bottleneck.part}: {advise(bottleneck) or '-'}" if bottleneck is not None else self._advice
            texts = {"limited_by/setting": advice} if advice != self._advice else {}
            self._advice = advice
            yield MetricRow(
                "learner", state.num_steps, _figures("learner", state.learner) | state.scalars(), texts=texts
            )
        replay = state.members.replay
        if replay is not None:
            scalars = _figures("replay", replay) | {"replay/samples_per_insert": replay.samples_per_insert}
            newest, histograms = replay.priority_histogram, {}
            if newest is not None and newest != self._histogram:  # Does not repeat an old histogram.
                self._histogram, histograms = newest, {"replay/priority": newest}
            scalars = {tag: value for tag, value in scalars.items() if tag not in self._omit} | self._shards()
            yield MetricRow("replay", state.num_steps, scalars, histograms=histograms)

    def _shards(self) -> dict[str, float]:
        """Returns what each of several shards has stored, from which `--resume` counts what is missing.

        Many shards are only in every SHARD_PERIOD-th row.
        """
        self._num_rows += 1
        num_shards = self._state.config.replay.num_shards
        if num_shards == 1 or (num_shards > SHARD_PERIOD and self._num_rows % SHARD_PERIOD):
            return {}
        return {
            shard_tag(name, shard): getattr(server.heartbeat.status, name)
            for shard, server in self._state.members.replay_servers.items()
            for name in ("size", "num_inserted")
        }


def score_row(state: RunState, scores: Scores) -> MetricRow:
    """Returns the row of the games that actors have finished since the last row: mean scores, and counts in total."""
    exploration, num_actors = state.exploration, state.config.actor.num_actors
    scalars: dict[str, float] = {EPISODES: state.num_episodes}
    total = 0.0
    for actor_id, games, score, length in scores.actors:
        score = math.nan if score is None else score
        total += score
        if has_curve(actor_id, num_actors):
            scalars[score_tag(actor_id, exploration.amounts[actor_id], exploration.name)] = score / games
        if actor_id == num_actors - 1:
            scalars |= {SCORE: score / games, LENGTH: length / games}
    if scores.actors:
        scalars[MEAN_SCORE] = total / sum(actor.games for actor in scores.actors)
    scalars |= {ACTOR_METRIC + name: metric.total / metric.games for name, metric in scores.metrics.items()}
    if state.num_faults:
        scalars[FAULTS] = state.num_faults
    return MetricRow("actor", state.num_steps, scalars)


def evaluation_row(steps: int, result: EvaluationResult, best: float | None) -> MetricRow:
    """Returns the row of an evaluation; `best`: the highest mean of a trained policy so far; None: there is none."""
    names = {"score": "mean", "score_median": "median", "score_low": "low", "score_high": "high"}
    names |= {"length": "length", "episodes": "episodes"}
    figures = {f"evaluator/{tag}": getattr(result, name) for tag, name in names.items()} | {
        "evaluator/best_score": best
    }
    scalars = {tag: value for tag, value in figures.items() if value is not None}
    scalars |= {EVALUATOR_METRIC + name: value for name, value in result.metrics.items()}
    return MetricRow("evaluator", steps, scalars)


def _figures(part: str, status: LearnerStatus | ReplayStatus) -> dict[str, float]:
    """Returns the numbers of a status by TensorBoard tag."""
    figures = asdict(status)
    figures |= figures.pop("figures", {})
    return {f"{part}/{name}": value for name, value in figures.items() if type(value) in (int, float)}
