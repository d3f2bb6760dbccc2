"""The best and the last evaluation of a run, read from its curves."""

from typing import NamedTuple

from apex.runs.history import EVALUATION, RunHistory


class Score(NamedTuple):
    """The score of one evaluation."""

    mean: float
    steps: float
    seconds: float
    num_games: int | None  # None: not recorded
    interval: tuple[float, float] | None  # 95 % confidence interval of the mean; None: one game, or not recorded


def find_scores(history: RunHistory) -> tuple[Score, Score] | None:
    """Returns the best evaluation (the first of equal ones) and the last one; None if no evaluation has finished.

    The score of an untrained policy is luck, and counts as the best one only if there is no other.
    """
    means = history.series(*EVALUATION)
    tags = ("episodes", "score_low", "score_high", "best_score")
    counts, lows, highs, trained = (_by_place(history, f"evaluator/{tag}") for tag in tags)
    if not len(means.values):
        return None

    def score(at: int) -> Score:
        seconds, steps, mean = (float(values[at]) for values in means)
        place = seconds, steps
        num_games = int(counts[place]) if place in counts else None
        interval = (lows[place], highs[place]) if place in lows and place in highs else None
        return Score(mean, steps, seconds, num_games, interval)

    places = zip(means.seconds.tolist(), means.steps.tolist(), strict=True)
    candidates = [at for at, place in enumerate(places) if place in trained] or range(len(means.values))
    return score(max(candidates, key=lambda at: means.values[at])), score(-1)


def _by_place(history: RunHistory, tag: str) -> dict[tuple[float, float], float]:
    """Returns the values of an evaluation metric by seconds and steps; older rows may lack the metric."""
    seconds, steps, values = (values.tolist() for values in history.series("evaluator", tag))
    return dict(zip(zip(seconds, steps, strict=True), values, strict=True))
