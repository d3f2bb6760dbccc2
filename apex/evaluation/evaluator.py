"""The evaluator's loop: plays full games with the newest parameters and reports the scores."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from apex.algorithms.interface import Agent, forget
from apex.algorithms.parameters import load_parameters
from apex.config import Config
from apex.environments import factory
from apex.environments.interface import VectorEnvironment
from apex.errors import EnvironmentFailure
from apex.evaluation.confirmation import judge, looks
from apex.evaluation.episodes import ActFunction, Episode, evaluation_seed, metrics_of, play, summarize
from apex.runtime.seeding import seeded_generators
from apex.transport.messages.results import EvaluationResult
from apex.transport.messages.status import EvaluatorStatus
from apex.types import Parameters
from apexreplay.errors import UsageError
from apexreplay.facts import Waiting
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait

log = logging.getLogger("apex")

REST = 9.0  # least time between evaluations, as a multiple of the last one's: at most a tenth of the time
REST_SECONDS = 5.0  # pause after a confirmed score, which ends the run; leaves the CPU to the run's other programs


class Learner(Protocol):
    """The learner, as the evaluator sees it."""

    def newest(self, timeout: float) -> Parameters | None:
        """Returns newer parameters; None if there are none within `timeout` seconds."""

    def final(self) -> int | None:
        """Returns the version of the run's last parameters; None while training continues."""

    def keep(self, result: EvaluationResult, parameters: Parameters | None) -> None:
        """Keeps a result, and the evaluated parameters if the result is the best so far."""


class Played(NamedTuple):
    """Games, and whose they are."""

    parameters: Parameters
    seed: int
    num_envs: int
    games: list[Episode]
    confirmed: bool = False  # whether the games confirm the stop score


class Evaluator:
    """Evaluates the learner's newest parameters. With the same `seed` and `life`, evaluation k plays the same games."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        learner: Learner,
        *,
        life: int = 0,
        make_environment: Callable[[int, int], VectorEnvironment] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`make_environment(num_envs, seed)` creates environments; None: as configured.

        `life` is a different number for each start of the evaluator, so that each start plays different games.
        """
        self._config = config.evaluator
        self._agent = agent
        self._learner = learner
        self._stop_score = config.run.stop_score
        self._seed, self._life = config.seed, life
        self._make_environment = make_environment or (
            lambda num_envs, seed: factory.make_environment(config.environment, num_envs, seed=seed)
        )
        self._clock, self._sleep = clock, sleep
        self._wait = Wait("evaluator", clock)
        self._start_at = clock()
        self._unplayed: Parameters | None = None  # taken for a confirmation that the end of training abandoned
        self._has_failed = False  # whether the last evaluation's games did not confirm its score
        self._kept: int | None = None  # version of the parameters whose result was kept last
        self._num_plays = 0
        self._has_made = False  # an environment; then a later failure is not a mistake in the settings
        self.num_evaluations = 0
        self.best: float | None = None
        self._starts_trained = bool(config.learner.init_from)

    def run(self, stop: Stop) -> None:
        """Evaluates the newest parameters at the configured interval until `stop` is requested.

        Once the last parameters exist, these are evaluated at once, and the games of older parameters are abandoned.
        """
        while not stop.poll():
            pause = self._start_at - self._clock()
            if pause > 0 and self._learner.final() is None:
                self._sleep(min(pause, POLL_SECONDS))
            else:
                self.step(stop)

    def step(self, stop: Stop, timeout: float = POLL_SECONDS) -> bool:
        """Evaluates the newest parameters; returns False if no newer ones come within `timeout` seconds.

        The learner repeats its parameters. Those whose result was kept last are passed over, unless they are the run's
        last ones: the best of several scores of one policy would be luck.
        """
        parameters, self._unplayed = self._unplayed or self._learner.newest(timeout), None
        if parameters is None:
            self._wait.on(Waiting("newer_parameters"))
            return False
        self._wait.over()
        if parameters.version == self._kept != self._learner.final():
            return False
        began = self._clock()
        self._start_at = began + self._config.period_seconds
        try:
            self._evaluate(parameters, stop)
        except EnvironmentFailure:  # The actors' environments are not affected.
            log.exception("evaluation of update %d failed; the run continues", parameters.version)
        # With a stop score, the run waits for evaluations. The untrained policy, which is evaluated once, may play the
        # longest games: they would delay all other evaluations.
        if self._stop_score is None and self._is_trained(parameters.version):
            ended = self._clock()
            self._start_at = max(self._start_at, ended + REST * (ended - began))
        return True

    def _is_trained(self, version: int) -> bool:
        return version > 0 or self._starts_trained

    def status(self) -> EvaluatorStatus:
        """Returns the evaluator's part of a heartbeat."""
        return EvaluatorStatus(waiting=self._wait.waiting, num_evaluations=self.num_evaluations)

    def _evaluate(self, parameters: Parameters, stop: Stop) -> None:
        """Plays games and keeps the result. If the mean reaches the stop score, the newest parameters play new games.

        In that case, keeps only the result of the new games, because the score of the first is biased by selection.
        If these did not confirm it, the next evaluation has no such games, because its policy would hardly be newer.
        Does not confirm a score once training has ended, because it ends nothing then, and the games may take longer
        than the run waits. Keeps nothing if a stop was requested or if training has ended with other parameters.
        """
        since, goal, final = self._clock(), self._stop_score, self._learner.final
        had_failed, self._has_failed = self._has_failed, False

        def is_over(version: int) -> bool:
            return stop.poll() or final() not in (None, version)

        played = self._play(parameters, [self._config.episodes], lambda: is_over(parameters.version))
        reached = goal is not None and bool(played.games) and summarize(played.games).mean >= goal
        if goal is not None and reached and not had_failed and not stop.poll() and final() is None:
            played = self._confirm(played, goal, stop)
        if not is_over(played.parameters.version):
            self._keep(played, self._clock() - since)

    def _confirm(self, first: Played, goal: float, stop: Stop) -> Played:
        """Returns new games of the newest parameters, and whether they confirm the goal.

        Returns the first games if the run or its training ends meanwhile.
        """
        counts = looks(self._config.confirm_episodes)

        def is_over() -> bool:
            return stop.poll() or self._learner.final() is not None

        def verdict(games: Sequence[Episode]) -> bool | None:
            return judge([game.score for game in games], goal, counts[-1])

        newest = self._learner.newest(0.0) or first.parameters
        played = self._play(newest, counts, is_over, lambda games: verdict(games) is not None)
        if is_over():
            self._unplayed = newest if newest is not first.parameters else None  # They may be the last ones.
            return first
        confirmed = bool(verdict(played.games))
        self._has_failed = not confirmed
        return played._replace(confirmed=confirmed)

    def _keep(self, played: Played, seconds: float) -> None:
        """Keeps the result of the games."""
        config, summary = self._config, summarize(played.games)
        low, high = summary.interval or (None, None)
        result = EvaluationResult(
            updates=played.parameters.version,
            mean=summary.mean,
            median=summary.median,
            low=low,
            high=high,
            length=summary.length,
            episodes=summary.episodes,
            scores=[game.score for game in played.games],
            confirmed=played.confirmed,
            epsilon=config.epsilon,
            seed=played.seed,
            num_envs=played.num_envs,
            seconds=seconds,
            metrics={name: metric.mean for name, metric in metrics_of(played.games).items()},
        )
        # The score of an untrained policy is luck. A confirmed one ends the run, whatever lucky games came before.
        is_best = self._is_trained(result.updates) and (
            result.confirmed or self.best is None or result.mean >= self.best
        )
        if is_best:
            self.best = result.mean
        self.num_evaluations += 1
        self._kept = result.updates
        self._learner.keep(result, played.parameters if is_best else None)
        if result.confirmed:
            self._start_at = max(self._start_at, self._clock() + REST_SECONDS)

    def _play(
        self,
        parameters: Parameters,
        counts: Sequence[int],
        is_over: Callable[[], bool],
        is_enough: Callable[[Sequence[Episode]], bool] = lambda games: False,
    ) -> Played:
        """Plays as many games as one of `counts`, the first that `is_enough`, with a new seed.

        Plays fewer if `is_over` becomes True. Raises UsageError if the first environment cannot start.
        """
        load_parameters(self._agent.network, parameters.values)
        self._num_plays += 1  # `apex evaluate` uses number 0, so that its games differ from those that select a policy.
        seed = evaluation_seed(self._seed, self._num_plays, self._life)
        with seeded_generators(seed):
            return self._play_seeded(parameters, seed, counts, is_over, is_enough)

    def _play_seeded(
        self,
        parameters: Parameters,
        seed: int,
        counts: Sequence[int],
        is_over: Callable[[], bool],
        is_enough: Callable[[Sequence[Episode]], bool],
    ) -> Played:
        num_envs = min(self._config.num_envs, counts[0])
        try:
            environment = self._make_environment(num_envs, seed)
        except UsageError as error:
            if self._has_made:
                raise EnvironmentFailure(str(error)) from error
            raise
        self._has_made = True
        games: list[Episode] = []
        try:
            policy = make_policy(self._agent, self._config.epsilon, np.random.default_rng(seed))
            for count in counts:
                games += play(
                    environment, policy, count - len(games), stop=is_over, forget=partial(forget, self._agent)
                )
                if is_over() or is_enough(games):
                    break
        finally:
            environment.close()
        return Played(parameters, seed, num_envs, games)


def make_policy(agent: Agent, exploration: float, rng: np.random.Generator) -> ActFunction:
    """Returns an agent's policy. `exploration`: epsilon; for continuous actions, standard deviation of the noise."""
    return lambda observation, mask: agent.act(observation, mask, exploration, rng)
