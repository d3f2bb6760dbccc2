"""The evaluator plays the newest parameters, reports honestly, confirms what would end a run, and knows how to wait."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from support.builders import PIXELS, RUN
from support.clocks import Clock
from support.messages import as_json
from support.scripted import ScriptedEnvironment
from torch import nn

from apex.algorithms.parameters import flatten_parameters
from apex.config import Config, EvaluatorConfig, RunConfig
from apex.dqn.algorithm import DqnAgent
from apex.errors import ConfigError, EnvironmentFailure, UsageError
from apex.evaluation.episodes import Episode, evaluation_seed, summarize
from apex.evaluation.evaluator import Evaluator, make_policy
from apex.learning.coordinator.metric_rows import evaluation_row
from apex.runtime.lifecycle import Stop
from apex.transport.codec import Codec
from apex.transport.messages.status import RoleStatus
from apex.types import Parameters


class Table(nn.Module):
    """Q-values of two actions, whatever it sees."""

    def __init__(self, *values):
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values or (0.0, 0.0)))

    def forward(self, observation):
        return self.values.expand(len(observation), -1)


def make_parameters(version, *values):
    return Parameters(version, flatten_parameters(Table(*values)))


class Learner:
    """Hands out parameters one by one (None: nothing new), and then asks to stop. Keeps the results."""

    def __init__(self, *entries, stop, clock):
        self._entries = list(entries)
        self._stop = stop
        self._clock = clock
        self.asked_at = []
        self.results = []
        self.versions = []  # of the parameters that came with them

    def newest(self, timeout):
        self.asked_at.append(self._clock.now)
        if not self._entries:
            self._stop.request()
            return None
        entry = self._entries.pop(0)
        if entry is None:
            self._clock.now += timeout
        return entry

    def keep(self, result, parameters):
        self.results.append(result)
        self.versions.append(None if parameters is None else parameters.version)


class ShortSleeps(Clock):
    """Fails a program that would take long to end when asked."""

    def sleep(self, seconds):
        assert 0 < seconds <= 0.2
        super().sleep(seconds)


class Trial:
    """One evaluator with everything around it. Plays `scores` in order, one list of games per play."""

    def __init__(self, *parameters, scores=(), stop_score=None, seed=3, life=0, on_play=lambda trial: None, **settings):
        self.stop, self.clock = Stop(), ShortSleeps()
        self.learner = Learner(*parameters, stop=self.stop, clock=self.clock)
        self.made = []  # (num_envs, seed)
        self.environments = []
        self._scores = list(scores)
        self._on_play = on_play
        settings = {"period_seconds": 0.0, "episodes": 2, "num_envs": 2, "epsilon": 0.0, **settings}
        self.evaluator = Evaluator(
            Config(seed=seed, run=RunConfig(stop_score=stop_score), evaluator=EvaluatorConfig(**settings)),
            DqnAgent(Table()),
            newest=self.learner.newest,
            keep=self.learner.keep,
            life=life,
            make_environment=self.make_environment,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def make_environment(self, num_envs, seed):
        self.made.append((num_envs, seed))
        self._on_play(self)
        scores = self._scores.pop(0) if self._scores else [1.0, 1.0]
        games = [[[score] for score in scores[i::num_envs]] for i in range(num_envs)]
        self.environments.append(ScriptedEnvironment(games))
        return self.environments[-1]

    def run(self, final=lambda: None):
        self.evaluator.run(self.stop, final)
        return self.learner.results


def test_reports_the_games_of_the_parameters_it_was_given():
    (result,) = Trial(make_parameters(30), scores=[[2.0, 7.0, 3.0]], episodes=3, num_envs=3).run()
    assert (result.updates, result.mean, result.median, result.episodes) == (30, 4.0, 3.0, 3)
    assert (result.scores, result.length, result.confirmed) == ([2.0, 7.0, 3.0], 1.0, False)


def test_the_interval_is_that_of_the_games_and_one_game_has_none():
    (result,) = Trial(make_parameters(30), scores=[[2.0, 7.0, 3.0]], episodes=3, num_envs=3).run()
    assert (result.low, result.high) == summarize([Episode(score, 1) for score in (2.0, 7.0, 3.0)]).interval
    row = evaluation_row(70, result, 9.0).scalars
    assert (row["evaluator/score_low"], row["evaluator/score_high"]) == (result.low, result.high)
    (alone,) = Trial(make_parameters(30), scores=[[2.0]], episodes=1, num_envs=1).run()
    assert not {"low", "high"} & as_json(alone).keys()
    assert set(row) - set(evaluation_row(70, alone, 9.0).scalars) == {
        "evaluator/score_low",
        "evaluator/score_high",
    }


def test_a_result_travels_as_it_is():
    (result,) = Trial(make_parameters(30)).run()
    assert Codec(RUN, PIXELS).decode_evaluation(Codec(RUN, PIXELS).encode_evaluation(result, None), 1) == (result, None)


def test_the_parameters_choose_the_actions():
    trial = Trial(make_parameters(1, 0.0, 1.0), make_parameters(2, 1.0, 0.0))
    trial.run()
    assert [environment.actions for environment in trial.environments] == [[[1, 1]], [[0, 0]]]


def test_parameters_come_with_a_result_that_none_before_has_beaten():
    scores = [[1.0, 3.0], [1.0, 1.0], [2.0, 2.0], [5.0, 0.0], [0.0, 0.0]]
    trial = Trial(*[make_parameters(version) for version in range(5)], scores=scores)
    trial.run()
    assert [result.mean for result in trial.learner.results] == [2.0, 1.0, 2.0, 2.5, 0.0]
    assert trial.learner.versions == [0, None, 2, 3, None]
    assert trial.evaluator.best == 2.5


# --- the stop score -------------------------------------------------------------------------------------------------


def games(mean, spread, count=100):
    """Scores with that mean, half of them above it."""
    return [mean - spread, mean + spread] * (count // 2)


def test_a_mean_below_the_stop_score_is_not_played_again():
    (result,) = Trial(make_parameters(1), scores=[[9.0, 10.0]], stop_score=10.0).run()
    assert (result.confirmed, result.mean, result.episodes) == (False, 9.5, 2)


def test_a_mean_at_the_stop_score_is_confirmed_by_more_games_of_which_alone_it_reports():
    trial = Trial(make_parameters(1), scores=[[10.0, 10.0], games(11.0, 1.0)], stop_score=10.0, num_envs=100)
    (result,) = trial.run()
    assert (result.confirmed, result.mean, sorted(result.scores)) == (True, 11.0, sorted(games(11.0, 1.0)))


@pytest.mark.parametrize(("mean", "confirmed"), [(480.0, False), (490.0, True)])
def test_a_mean_above_the_stop_score_is_confirmed_once_its_95_percent_interval_lies_above(mean, confirmed):
    """A standard deviation of 40 over 100 games is one of 4 of their mean: the interval reaches 8 below it."""
    trial = Trial(make_parameters(1), scores=[[500.0] * 2, games(mean, 40.0)], stop_score=475.0, num_envs=100)
    (result,) = trial.run()
    assert result.mean == mean
    assert result.low == pytest.approx(mean - 8, abs=1)
    assert result.confirmed == confirmed


def test_fewer_than_100_games_cannot_confirm_a_score():
    with pytest.raises(ConfigError, match=r"confirm_episodes must be an integer from 100 to 10000, got 99"):
        EvaluatorConfig(confirm_episodes=99)


def test_luck_is_not_confirmed():
    trial = Trial(make_parameters(1), scores=[[20.0, 20.0], games(2.0, 1.0)], stop_score=10.0, num_envs=100)
    (result,) = trial.run()
    assert (result.confirmed, result.mean) == (False, 2.0)


def test_without_a_stop_score_nothing_is_confirmed():
    (result,) = Trial(make_parameters(1), scores=[[1e9, 1e9]]).run()
    assert (result.confirmed, result.episodes) == (False, 2)


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_every_play_has_fresh_games_and_the_same_seed_plays_the_same_ones():
    def seeds(seed):
        parameters = [make_parameters(version) for version in range(3)]
        trial = Trial(*parameters, scores=[[1.0] * 100] * 6, seed=seed, stop_score=1.0)
        trial.run()
        return [seed for _, seed in trial.made]

    assert len(set(seeds(3))) == 6
    assert seeds(3) == seeds(3)
    assert not set(seeds(3)) & set(seeds(4))


def test_an_evaluator_that_starts_again_plays_none_of_the_games_of_its_earlier_lives():
    seeds = []
    for life in (1, 2):
        trial = Trial(*[make_parameters(version) for version in range(3)], life=life)
        trial.run()
        seeds += [seed for _, seed in trial.made]
    assert len(set(seeds)) == 6


def test_a_result_tells_which_games_it_is_of():
    scores = [[1.0] * 100] * 4
    trial = Trial(make_parameters(1), make_parameters(2), scores=scores, stop_score=1.0, num_envs=2)
    for result in trial.run():
        assert (result.num_envs, result.seed) in trial.made[1::2]  # Those that confirm, which alone it reports.
    assert len({result.seed for result in trial.learner.results}) == 2


def test_its_games_are_not_those_of_apex_evaluate():
    trial = Trial(*[make_parameters(version) for version in range(3)], seed=3)
    trial.run()
    assert evaluation_seed(3) not in [seed for _, seed in trial.made]


def test_no_more_environments_than_games():
    trial = Trial(make_parameters(1), episodes=2, num_envs=5)
    trial.run()
    assert [num_envs for num_envs, _ in trial.made] == [2]


def test_environments_are_closed_after_use():
    trial = Trial(make_parameters(1), make_parameters(2))
    trial.run()
    assert [environment.closed for environment in trial.environments] == [True, True]


# --- waiting --------------------------------------------------------------------------------------------------------


def test_the_next_evaluation_starts_a_period_after_the_last_one_started():
    trial = Trial(make_parameters(1), make_parameters(2), period_seconds=60.0)
    trial.run()
    starts = trial.learner.asked_at
    assert [round(start - starts[0], 6) for start in starts] == [0.0, 60.0, 120.0]


@pytest.mark.parametrize(("period", "starts"), [(1.0, [0.0, 5.0, 6.0]), (60.0, [0.0, 60.0, 120.0])])
def test_rests_when_a_confirmed_score_should_end_the_run(period, starts):
    parameters = [make_parameters(version) for version in (1, 2)]
    scores = [[9.0, 11.0], games(12.0, 1.0), [1.0, 1.0]]
    trial = Trial(*parameters, scores=scores, stop_score=10.0, period_seconds=period)
    trial.run()
    assert [result.confirmed for result in trial.learner.results] == [True, False]
    assert [round(start - trial.learner.asked_at[0], 6) for start in trial.learner.asked_at] == starts


def test_evaluates_at_once_when_parameters_come_late():
    trial = Trial(make_parameters(1), None, None, make_parameters(2), period_seconds=60.0)
    trial.run()
    assert [result.updates for result in trial.learner.results] == [1, 2]
    assert trial.clock.now - 100.0 < 121.0


def test_a_long_wait_for_parameters_is_explained(caplog):
    with caplog.at_level(logging.WARNING):
        Trial(*[None] * 60, make_parameters(1)).run()
    assert [record.getMessage() for record in caplog.records] == [
        "evaluator waits for newer parameters from the learner (10 s)"
    ]


def test_the_status_says_what_is_waited_for():
    trial = Trial(make_parameters(1), None)
    assert trial.evaluator.status() == RoleStatus(rate="0 done", waiting="")
    trial.run()
    waiting = "for newer parameters from the learner (0 s)"
    assert trial.evaluator.status() == RoleStatus(rate="1 done", waiting=waiting)


def test_a_stop_during_the_games_sends_nothing():
    trial = Trial(make_parameters(1), on_play=lambda trial: trial.stop.request())
    assert trial.run() == []
    assert [environment.closed for environment in trial.environments] == [True]


def test_a_stop_during_the_confirming_games_sends_nothing():
    def on_play(trial):
        if len(trial.made) == 2:
            trial.stop.request()

    assert Trial(make_parameters(1), stop_score=1.0, on_play=on_play).run() == []


# --- the end of training ----------------------------------------------------------------------------------------------


def test_the_final_parameters_are_evaluated_without_the_pause():
    trial = Trial(make_parameters(1), make_parameters(2), period_seconds=60.0)
    results = trial.run(lambda: 2 if trial.made else None)
    assert results[-1].updates == 2
    assert trial.clock.now - 100.0 < 1.0


def test_games_of_older_parameters_are_given_up_for_the_final_ones():
    trial = Trial(make_parameters(1), make_parameters(2), scores=[[1.0, 1.0], [5.0, 7.0]], period_seconds=60.0)
    results = trial.run(lambda: 2 if trial.made else None)
    assert [(result.updates, result.mean) for result in results] == [(2, 6.0)]
    assert [environment.closed for environment in trial.environments] == [True, True]


def test_the_score_of_the_final_parameters_is_not_confirmed_because_it_ends_nothing():
    trial = Trial(make_parameters(2), scores=[[11.0, 13.0]], stop_score=10.0)
    (result,) = trial.run(lambda: 2)
    assert (result.mean, result.episodes, result.confirmed) == (12.0, 2, False)
    assert len(trial.made) == 1


def test_training_that_ends_during_the_confirming_games_ends_them_and_the_first_games_count():
    trial = Trial(make_parameters(2), scores=[[11.0, 13.0], games(20.0, 1.0)], stop_score=10.0, num_envs=100)
    (result,) = trial.run(lambda: 2 if len(trial.made) == 2 else None)
    assert (result.mean, result.episodes, result.confirmed) == (12.0, 2, False)
    assert (result.num_envs, result.seed) == trial.made[0]
    assert trial.environments[1].actions == []


# --- the policy -----------------------------------------------------------------------------------------------------


def test_a_policy_is_greedy_but_for_epsilon():
    observation = np.zeros((4000, 1, 1), np.float32)
    greedy = make_policy(DqnAgent(Table(0.0, 1.0)), 0.0, np.random.default_rng(0))
    assert (greedy(observation, None) == 1).all()
    explores = make_policy(DqnAgent(Table(0.0, 1.0)), 0.5, np.random.default_rng(0))
    # Off-greedy with probability 0.5 / 2; four standard deviations of a binomial's mean.
    assert abs((explores(observation, None) == 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5


def test_environments_that_fail_cost_one_evaluation_and_not_the_run(caplog):
    def fail_once(trial):
        if len(trial.made) == 1:
            raise EnvironmentFailure("maze: environment 0 of 2 raised KeyError: 'door'")

    trial = Trial(make_parameters(1), make_parameters(2), on_play=fail_once)
    (result,) = trial.run()
    assert result.updates == 2
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said.getMessage() == "evaluation of update 1 failed; the run continues"
    assert "environment 0 of 2 raised KeyError: 'door'" in caplog.text


def test_environments_that_cannot_be_made_any_more_cost_one_evaluation_and_not_the_run(caplog):
    def fail_second(trial):
        if len(trial.made) == 2:
            raise UsageError("environment.id 'maze' cannot be made: OSError: no space for its window")

    trial = Trial(*[make_parameters(version) for version in (1, 2, 3)], on_play=fail_second)
    assert [result.updates for result in trial.run()] == [1, 3]
    assert "evaluation of update 2 failed; the run continues" in caplog.text
    assert "OSError: no space for its window" in caplog.text


def test_environments_that_were_never_made_are_refused():
    def fail(trial):
        raise UsageError("environment.id 'maze' cannot be made")

    with pytest.raises(UsageError, match="'maze' cannot be made"):
        Trial(make_parameters(1), on_play=fail).run()
