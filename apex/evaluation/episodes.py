"""Plays full games in parallel and scores them by their raw rewards, without a bias towards short games."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.algorithms.interface import Mask, check_allowed
from apex.environments.interface import VectorEnvironment
from apex.metric_tags import MAX_METRICS
from apex.types import Step
from apexreplay.item_kinds import Array

NUM_RESAMPLES = 10_000  # resamples of the bootstrap
MAX_DRAWS = 2_000_000  # scores that are drawn at a time, which bounds the memory
ENDLESS_STEPS = 100_000  # steps of one game after which a warning is logged; the longest Atari games have 27,000
_EVALUATION = 2  # spawn key of evaluation seeds; training uses 0 and 1

log = logging.getLogger("apex")

# observation [E, S, *F], and allowed actions [E, A] or None -> action [E] or [E, K]
ActFunction = Callable[[Array, Mask], Array]


class Episode(NamedTuple):
    """One full game."""

    score: float  # sum of the raw rewards
    length: int  # number of steps
    metrics: Mapping[str, float] = {}  # what the environment reported at the end, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of the scores of some games."""

    episodes: int
    mean: float
    median: float
    min: float
    max: float
    length: float  # mean number of steps
    # 95 % bootstrap confidence interval of the mean; too narrow for fewer than ten games. None: only one game
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that the environment reported at the end of some games. Of "success", the mean is a share of them."""

    games: int  # games that reported it
    mean: float
    interval: tuple[float, float] | None  # 95 % bootstrap confidence interval of the mean; None: only one game


def play(
    environment: VectorEnvironment,
    policy: ActFunction,
    episodes: int,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[Step], None] = lambda step: None,
    on_game: Callable[[Episode], None] = lambda game: None,
    on_end: Callable[[int], None] = lambda i: None,
    forget: Callable[[NDArray[np.bool_] | None], None] = lambda ended: None,
    endless_steps: int = ENDLESS_STEPS,
) -> list[Episode]:
    """Plays `episodes` full games, fewer if `stop` returns True; returns them in the order in which they ended.

    Environment i of E plays `episodes // E` games, and one more if i < episodes % E, however long they take. (The first
    `episodes` games to end would include too many short ones.) A game in which the environment failed is played again.
    A warning is logged for a game that reaches `endless_steps`. `forget` is called with None at first, and then after
    each step with the environments whose episode has ended, bool[E]; a recurrent agent needs it. `on_end` is called
    with the environment of each game that counts, before `on_game`.
    """
    num_envs = environment.num_envs
    missing = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    scores, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    games: list[Episode] = []
    observation, mask = environment.reset(), environment.action_mask
    forget(None)
    while missing.any() and not stop():
        action = policy(observation, mask)
        check_allowed(action, mask)
        step = environment.step(action)
        observation, mask = step.observation, step.action_mask
        scores += step.reward
        lengths += 1
        on_step(step)
        forget(step.over)
        for i in np.flatnonzero((lengths == endless_steps) & (missing > 0)):
            message = "environment %d (of %d): its game has not ended after %d steps; give it a time limit"
            log.warning(message, i, num_envs, endless_steps)
        for i in np.flatnonzero(step.terminated | step.truncated):
            if missing[i]:
                games.append(Episode(float(scores[i]), int(lengths[i]), step.metrics.get(int(i), {})))
                on_end(int(i))
                on_game(games[-1])
                missing[i] -= 1
                if not missing[i]:
                    environment.rest(int(i))
            scores[i], lengths[i] = 0.0, 0
        if step.unplayed is not None:
            scores[step.unplayed], lengths[step.unplayed] = 0.0, 0
    return games


def summarize(games: Sequence[Episode]) -> Summary:
    """Returns the statistics of one or more games. The same games give the same interval."""
    scores = np.array([game.score for game in games])
    return Summary(
        episodes=len(games),
        mean=float(scores.mean()),
        median=float(np.median(scores)),
        min=float(scores.min()),
        max=float(scores.max()),
        length=float(np.mean([game.length for game in games])),
        interval=_bootstrap(scores) if len(games) > 1 else None,
    )


def metrics_of(games: Sequence[Episode]) -> dict[str, Metric]:
    """Returns the metrics of the games by name, at most MAX_METRICS."""
    names = islice(dict.fromkeys(name for game in games for name in game.metrics), MAX_METRICS)
    found = {name: np.array([game.metrics[name] for game in games if name in game.metrics]) for name in names}
    return {
        name: Metric(games=len(each), mean=float(each.mean()), interval=_bootstrap(each) if len(each) > 1 else None)
        for name, each in found.items()
    }


def evaluation_seed(seed: int, number: int = 0, life: int = 0) -> int:
    """Returns a 31-bit seed for the environments of evaluation `number`, from a sequence that training does not use.

    `life`: a different number for each start of the evaluator, because each start numbers its evaluations from 1.
    """
    sequence = np.random.SeedSequence([seed, number, life], spawn_key=(_EVALUATION,))
    return int(sequence.generate_state(1)[0]) % 2**31


def _bootstrap(scores: NDArray[Any]) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the means of samples drawn from `scores` with replacement."""
    rng, rows = np.random.default_rng(0), max(1, MAX_DRAWS // len(scores))
    parts = [min(rows, NUM_RESAMPLES - begin) for begin in range(0, NUM_RESAMPLES, rows)]
    means = np.concatenate([scores[rng.integers(len(scores), size=(part, len(scores)))].mean(1) for part in parts])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
