"""`python -m bench confirmation`: how often new games confirm a stop score that the policy reaches only by chance."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apex.evaluation.confirmation import judge, looks
from bench.harness.command import Figures, make_parser, run_bench

EPISODES = 100

Scores = NDArray[np.float64]


class Case(NamedTuple):
    """Scores of games, and their mean, which is the goal of the simulated runs."""

    draw: Callable[[np.random.Generator, int], Scores]
    mean: float


def _bernoulli(probability: float) -> Case:
    return Case(lambda rng, size: (rng.random(size) < probability).astype(np.float64), probability)


def _capped(mean: float, deviation: float, most: float = 21.0) -> Case:
    """Returns whole scores that cannot exceed `most`, as in Pong."""

    def draw(rng: np.random.Generator, size: int) -> Scores:
        return np.minimum(np.round(rng.normal(mean, deviation, size)), most)

    return Case(draw, float(draw(np.random.default_rng(0), 10_000_000).mean()))


def _mostly_full(share: float) -> Case:
    """Returns 500 with probability `share`, else a score between 100 and 500, as in CartPole."""

    def draw(rng: np.random.Generator, size: int) -> Scores:
        return np.where(rng.random(size) < share, 500.0, rng.uniform(100, 500, size))

    return Case(draw, 500 * share + 300 * (1 - share))


CASES = {
    "normal": Case(lambda rng, size: rng.normal(size=size), 0.0),
    "bernoulli_50": _bernoulli(0.5),
    "bernoulli_80": _bernoulli(0.8),
    "bernoulli_90": _bernoulli(0.9),
    "bernoulli_97": _bernoulli(0.97),
    "capped_20": _capped(20.0, 1.5),
    "capped_22": _capped(22.0, 6.0),
    "full_90": _mostly_full(0.9),
    "full_97": _mostly_full(0.97),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; returns the exit status."""
    parser = make_parser("confirmation", "Simulates confirmations of a policy whose mean score is the goal.")
    parser.add_argument("--runs", type=int, default=100_000, metavar="N", help="of each kind of scores; default 100000")
    arguments: Any = parser.parse_args(argv)
    return run_bench(lambda folder, stop: measure(arguments.runs), show, as_json=arguments.json)


def measure(runs: int, cases: Sequence[str] = tuple(CASES)) -> Figures:
    """Returns the share of confirmed runs and the mean number of games for each kind of scores."""
    figures: Figures = {}
    for name in cases:
        case, rng = CASES[name], np.random.default_rng(1)
        outcomes = np.array([_confirm(case.draw(rng, EPISODES).tolist(), case.mean) for _ in range(runs)])
        figures[f"{name}_confirmed"], figures[f"{name}_games"] = map(float, outcomes.mean(0))
    return figures


def _confirm(scores: list[float], goal: float) -> tuple[bool, int]:
    """Returns whether the games confirm the goal, and how many were needed."""
    for count in looks(EPISODES):
        verdict = judge(scores[:count], goal, EPISODES)
        if verdict is not None:
            break
    return bool(verdict), count


def show(figures: Figures) -> None:
    """Prints the figures as a table."""
    print("scores         confirmed by chance  mean games")
    for name in CASES:
        print(f"{name:13}  {100 * figures[f'{name}_confirmed']:17.2f} %  {figures[f'{name}_games']:10.0f}")


if __name__ == "__main__":
    sys.exit(main())
