"""The rule by which new games confirm a stop score. It looks at the games three times, so that clear cases end early.

Early looks must be much surer than the last one (Haybittle 1971, Peto et al. 1976), and all their errors add up to the
error of the rule. `python -m bench confirmation` measures it.
"""

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

# Share of the games, and probability that games of a policy whose mean is the goal confirm it at this look.
LOOKS = ((0.2, 0.0005), (0.4, 0.0015), (1.0, 0.02))
LEAST_BELOW_BEST = 5  # Games below the best one. With fewer, early looks could miss a policy that rarely fails.


def looks(episodes: int) -> list[int]:
    """Returns the numbers of games after which `judge` is asked, if the last look has `episodes`."""
    return [round(share * episodes) for share, _ in LOOKS]


def judge(scores: Sequence[float], goal: float, episodes: int) -> bool | None:
    """Returns whether the policy's mean score is at least `goal`; None: more games, up to `episodes`, must decide.

    The lower end of Student's one-sided interval must reach the goal, computed for these games and one more with the
    lowest of their scores, because scores near a limit have a long tail below.
    """
    at = looks(episodes).index(len(scores))
    games = np.sort(np.array(scores, np.float64))
    mean, is_last = float(games.mean()), at == len(LOOKS) - 1
    if mean < goal:
        return False
    if not is_last and (games < games[-1]).sum() < LEAST_BELOW_BEST:
        return None
    games = np.concatenate([games[:1], games])
    error = float(games.std(ddof=1)) / len(games) ** 0.5
    reached = float(games.mean()) - students_quantile(1 - LOOKS[at][1], len(games) - 1) * error >= goal
    return True if reached else False if is_last else None


def students_quantile(probability: float, freedom: int) -> float:
    """Returns the quantile of Student's t distribution (Abramowitz and Stegun 1964, 26.7.5); for `freedom` >= 15."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))
