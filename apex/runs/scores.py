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
    """Returns the best evaluation (the first of equal ones) and the last one; None if no evaluation has finished."""
    means = history.series(*EVALUATION)
    counts, lows, highs = (_by_place(history, f"evaluator/{tag}") for tag in ("episodes", "score_low", "score_high"))
    if not len(means.values):
        return None

    def score(at: int) -> Score:
        seconds, steps, mean = (float(values[at]) for values in means)
        place = seconds, steps
        num_games = int(counts[place]) if place in counts else None
        interval = (lows[place], highs[place]) if place in lows and place in highs else None
        return Score(mean, steps, seconds, num_games, interval)

    return score(int(means.values.argmax())), score(-1)


def _by_place(history: RunHistory, tag: str) -> dict[tuple[float, float], float]:
    """Returns the values of an evaluation metric by seconds and steps; older rows may lack the metric."""
    seconds, steps, values = (values.tolist() for values in history.series("evaluator", tag))
    return dict(zip(zip(seconds, steps, strict=True), values, strict=True))
