"""The evaluator's loop: plays full games with the newest parameters and reports the scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from apex.config import Config
from apex.dqn.exploration import epsilon_greedy
from apex.dqn.networks import load_parameters, q_values
from apex.environments import factory
from apex.environments.factory import EnvironmentFailure, VectorEnvironment
from apex.errors import ConfigError
from apex.evaluation.episodes import ActFunction, Episode, evaluation_seed, play, summarize
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.status import RoleStatus
from apex.types import Array
from apex.types import Parameters as ParameterValues

log = logging.getLogger("apex")

REST_SECONDS = 5.0  # after a confirmed score, which ends the run: the programs that end it need the core


Newest = Callable[[float], ParameterValues | None]  # parameters not yet returned; None after so many seconds without
Keep = Callable[[EvaluationResult, ParameterValues | None], None]  # with its parameters when none before was better


class Evaluator:
    """Evaluates the learner's newest parameters. Evaluation k of a seed always plays the same games."""

    def __init__(
        self,
        config: Config,
        network: nn.Module,
        *,
        newest: Newest,
        keep: Keep,
        make_environment: Callable[[int, int], VectorEnvironment] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`keep` takes each result; `make_environment(num_envs, seed)` makes games, None: the configured ones."""
        self._config = config.evaluator
        self._network = network.eval()
        self._stop_score = config.run.stop_score
        self._seed = config.seed
        self._make_environment = make_environment or (
            lambda num_envs, seed: factory.make_environment(config.environment, num_envs, seed=seed, num_threads=1)
        )
        self._newest = newest
        self._keep = keep
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
            if (pause := self._start_at - self._clock()) > 0:
                self._sleep(min(pause, POLL_SECONDS))
            else:
                self.step(stop)

    def step(self, stop: Stop, timeout: float = POLL_SECONDS) -> bool:
        """Evaluates the newest parameters; returns False if no newer ones come within `timeout` seconds."""
        parameters = self._newest(timeout)
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

    def status(self) -> RoleStatus:
        """The evaluator's part of a heartbeat."""
        return RoleStatus(rate=f"{self.num_evaluations} done", waiting=self._wait.reason)

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
        self._keep(result, parameters if is_best else None)
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
