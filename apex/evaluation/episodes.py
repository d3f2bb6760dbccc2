"""Plays full games side by side and scores them by their raw rewards, without a bias to short games."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.environments.interface import VectorEnvironment
from apex.runtime.lifecycle import Stop
from apex.types import Array, Step

NUM_RESAMPLES = 10_000  # of the bootstrap
ENDLESS_STEPS = 100_000  # of one game, after which a warning is logged; Atari's longest have 27,000
_EVALUATION = 2  # spawn key; training uses 0 and 1

log = logging.getLogger("apex")

ActFunction = Callable[[Array], NDArray[np.int64]]  # observation [E, S, *F] -> action [E]


class Episode(NamedTuple):
    """One full game."""

    score: float  # the sum of raw rewards
    length: int  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Statistics of the scores of some games."""

    episodes: int
    mean: float
    median: float
    min: float
    max: float
    length: float  # mean, in steps
    interval: tuple[float, float] | None  # 95 % of the mean, by bootstrap; too narrow below ten games


def play(
    environment: VectorEnvironment,
    policy: ActFunction,
    episodes: int,
    *,
    stop: Stop | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_game: Callable[[Episode], None] = lambda game: None,
) -> list[Episode]:
    """Plays `episodes` full games and returns them in the order in which they ended; fewer if `stop` is requested.

    Environment i plays `episodes // E` games, and one more if i < episodes % E, however long they take. (The first
    `episodes` games to end would contain too many short ones.) A game in which the environment failed is played again.
    """
    num_envs = environment.num_envs
    missing = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
    scores, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    games: list[Episode] = []
    observation = environment.reset()
    while missing.any() and not (stop is not None and stop.requested):
        step = environment.step(policy(observation))
        observation = step.observation
        scores += step.reward
        lengths += 1
        on_step(step)
        for i in np.flatnonzero((lengths == ENDLESS_STEPS) & (missing > 0)):
            log.warning(
                "game %d of %d has not ended in %s steps: without a time limit in the environment there is no score",
                *(i, num_envs, f"{ENDLESS_STEPS:,}"),
            )
        for i in np.flatnonzero(step.terminated | step.truncated):
            if missing[i]:
                games.append(Episode(float(scores[i]), int(lengths[i])))
                on_game(games[-1])
                missing[i] -= 1
                if not missing[i]:
                    environment.rest(int(i))
            scores[i], lengths[i] = 0.0, 0
        if step.failed is not None:
            scores[step.failed], lengths[step.failed] = 0.0, 0
    return games


def summarize(games: Sequence[Episode]) -> Summary:
    """The statistics of at least one game. The same games give the same interval."""
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


def evaluation_seed(seed: int, number: int = 0) -> int:
    """A 31-bit seed for the environments of evaluation `number`, from a sequence that training does not use."""
    sequence = np.random.SeedSequence([seed, number], spawn_key=(_EVALUATION,))
    return int(sequence.generate_state(1)[0]) % 2**31


def _bootstrap(scores: NDArray[Any]) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn from `scores` with replacement."""
    rng = np.random.default_rng(0)
    means = scores[rng.integers(len(scores), size=(NUM_RESAMPLES, len(scores)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
