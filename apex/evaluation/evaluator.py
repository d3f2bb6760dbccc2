"""The evaluator's loop: plays full games with the newest parameters and reports the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from apex.config import EvaluatorConfig
from apex.dqn.exploration import epsilon_greedy
from apex.dqn.networks import load_parameters, q_values
from apex.environments.factory import EnvironmentFailure
from apex.errors import ConfigError
from apex.evaluation.episodes import ActFunction, Episode, evaluation_seed, play, summarize
from apex.evaluation.episodes import EpisodeEnvironment as PlayableEnvironment
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.types import Array
from apex.types import Parameters as ParameterValues

log = logging.getLogger("apex")

REST_SECONDS = 5.0  # after a confirmed score, which ends the run: the programs that end it need the core


class EvaluationResult(NamedTuple):
    """The result of one evaluation."""

    updates: int  # version of the parameters
    mean: float
    median: float
    low: float | None  # 95 % interval of the mean, by the bootstrap; None: one game has no interval
    high: float | None
    length: float  # mean, in steps
    episodes: int
    scores: list[float]
    confirmed: bool  # the mean reached the stop score, and again over fresh games if evaluator.confirm_episodes is set
    epsilon: float
    seed: int  # of these games; the same seed and num_envs play them again
    num_envs: int  # games side by side
    seconds: float  # that it took

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not None by name, ready for JSON."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class ClosableEnvironment(PlayableEnvironment, Protocol):
    """Games that are closed after use."""

    def close(self) -> None:
        """Frees them."""


class LearnerLink(Protocol):
    """The learner as the evaluator uses it."""

    def newest(self, timeout: float) -> ParameterValues | None:
        """The newest parameters that were not yet returned, or None after `timeout` seconds without any."""

    def send(self, result: EvaluationResult, parameters: ParameterValues | None) -> None:
        """Sends a result, with its parameters if no earlier evaluation was better."""


class Evaluator:
    """Evaluates the learner's newest parameters. Evaluation k of a seed always plays the same games."""

    def __init__(
        self,
        config: EvaluatorConfig,
        network: nn.Module,
        *,
        stop_score: float | None,
        seed: int,
        make_environment: Callable[[int, int], ClosableEnvironment],
        learner: LearnerLink,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`make_environment(num_envs, seed)` makes the games of one evaluation."""
        self._config = config
        self._network = network.eval()
        self._stop_score = stop_score
        self._seed = seed
        self._make_environment = make_environment
        self._learner = learner
        self._clock = clock
        self._sleep = sleep
        self._wait = Wait("evaluator", clock)
        self._start_at = clock()
        self._num_plays = 0
        self._has_made = False  # an environment: a later failure is no mistake of the configuration
        self.num_evaluations = 0
        self.best: float | None = None

    def run(self, stop: Stop) -> None:
        """Evaluates, with the configured pause, until `stop` is requested."""
        while not stop.requested:
            pause = self._start_at - self._clock()
            if pause > 0:
                self._sleep(min(pause, POLL_SECONDS))
            else:
                self.step(stop)

    def step(self, stop: Stop, timeout: float = POLL_SECONDS) -> bool:
        """Evaluates the newest parameters; returns False if no newer ones come within `timeout` seconds."""
        parameters = self._learner.newest(timeout)
        if parameters is None:
            self._wait.on("newer parameters from the learner")
            return False
        self._wait.over()
        self._start_at = self._clock() + self._config.period_seconds
        try:
            self._evaluate(parameters, stop)
        except EnvironmentFailure:  # The actors have other environments.
            log.exception("no evaluation of updates %d; the run goes on", parameters.version)
        return True

    def status(self) -> dict[str, Any]:
        """The evaluator's part of a heartbeat."""
        return {"rate": f"{self.num_evaluations} done", "waiting": self._wait.reason}

    def _evaluate(self, parameters: ParameterValues, stop: Stop) -> None:
        """Plays, plays again if the stop score must be confirmed, and sends; nothing if `stop` was requested."""
        config, since = self._config, self._clock()
        load_parameters(self._network, parameters.values)
        seed, played = self._play(config.episodes, stop)
        if self._reached(played) and config.confirm_episodes and not stop.requested:
            seed, played = self._play(config.confirm_episodes, stop)  # The first games were selected for being good.
        if stop.requested:
            return
        summary = summarize(played)
        low, high = summary.interval or (None, None)
        result = EvaluationResult(
            updates=parameters.version,
            mean=summary.mean,
            median=summary.median,
            low=low,
            high=high,
            length=summary.length,
            episodes=summary.episodes,
            scores=[game.score for game in played],
            confirmed=self._reached(played),
            epsilon=config.epsilon,
            seed=seed,
            num_envs=min(config.num_envs, summary.episodes),
            seconds=self._clock() - since,
        )
        is_best = self.best is None or result.mean >= self.best
        if is_best:
            self.best = result.mean
        self.num_evaluations += 1
        self._learner.send(result, parameters if is_best else None)
        if result.confirmed:
            self._start_at = max(self._start_at, self._clock() + REST_SECONDS)

    def _reached(self, played: list[Episode]) -> bool:
        if self._stop_score is None or not played:
            return False
        return bool(np.mean([game.score for game in played]) >= self._stop_score)

    def _play(self, episodes: int, stop: Stop) -> tuple[int, list[Episode]]:
        """Plays games with a new seed and returns both; raises ConfigError if no environment could ever be made."""
        self._num_plays += 1  # `apex evaluate` uses number 0, whose games never select a policy.
        seed = evaluation_seed(self._seed, self._num_plays)
        try:
            environment = self._make_environment(min(self._config.num_envs, episodes), seed)
        except ConfigError as error:
            if self._has_made:
                raise EnvironmentFailure(str(error)) from error
            raise
        self._has_made = True
        try:
            policy = make_policy(self._network, self._config.epsilon, np.random.default_rng(seed))
            return seed, play(environment, policy, episodes, stop=stop)
        finally:
            environment.close()


def make_policy(network: nn.Module, epsilon: float, rng: np.random.Generator) -> ActFunction:
    """The epsilon-greedy policy of a network."""

    def act(observation: Array) -> NDArray[np.int64]:
        q = q_values(network, observation)
        return epsilon_greedy(q, np.full(len(q), epsilon), rng)

    return act
