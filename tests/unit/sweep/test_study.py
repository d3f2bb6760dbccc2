"""Which scores of a trial Optuna gets, when a trial ends early, and how a finished run is judged."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.messages import make_run_status

from apex.config import RunConfig
from apex.config.presets import PRESETS
from apex.facts import EndReason
from apex.launch.callbacks import LiveRun
from apex.sweep.study import Pruning, Sweep, judge
from apex.transport.messages.run_status import EvaluationRow
from apexreplay.process.lifecycle import Stop


class Trial:
    """A trial of Optuna that is worse than the others once it has reported `end`."""

    def __init__(self, end=None):
        self.end, self.reports = end, []

    def report(self, value, step):
        self.reports.append((value, step))

    def should_prune(self):
        return self.reports[-1][0] == self.end


def evaluate(pruning, limits, *evaluations):
    """Passes evaluations, as (score, seconds, steps, updates), to the callback of a run; returns the run."""
    config = PRESETS["cartpole"].config
    run = LiveRun(replace(config, run=replace(config.run, **limits)), Path("run"))
    for number, (score, seconds, steps, updates) in enumerate(evaluations, 1):
        run.status = make_run_status(elapsed_seconds=float(seconds))
        row = EvaluationRow(number=number, updates=updates, steps=steps, score=float(score), best=None, episodes=3)
        pruning.on_evaluation(run, row)
    return run


@pytest.mark.parametrize("limits", [{"max_minutes": 1.0}, {"max_steps": 600}, {"max_updates": 60}])
def test_each_tenth_of_the_limit_has_its_first_score_or_the_last_one_before(limits):
    trial = Trial()
    pruning = Pruning(trial, lower_is_better=False)
    rows = [(9, 5, 50, 5), (10, 6, 60, 6), (11, 7, 70, 7), (12, 31, 310, 31), (13, 61, 610, 61)]
    run = evaluate(pruning, limits, *rows)
    before = [(10, 1), (11, 2), (11, 3), (11, 4), (12, 5), (12, 6), (12, 7), (12, 8), (13, 9)]
    assert trial.reports == before
    assert run.asked is None
    pruning.report(14, 10)
    assert trial.reports == [*before, (14, 10)]


def test_a_trial_that_is_worse_than_the_others_ends_its_run():
    run = evaluate(Pruning(Trial(end=20), lower_is_better=False), {"max_steps": 100}, (20, 0, 50, 0))
    assert run.asked == EndReason("callback", detail="pruned")
    at_limit = evaluate(Pruning(Trial(end=20), lower_is_better=False), {"max_steps": 100}, (20, 0, 100, 0))
    assert at_limit.asked is None


def test_scores_are_negative_if_lower_results_are_better():
    trial = Trial()
    evaluate(Pruning(trial, lower_is_better=True), {"max_steps": 100}, (20, 0, 50, 0))
    assert trial.reports == [(-20, 5)]


@pytest.mark.parametrize(
    ("stop_score", "kind", "result"), [(None, "steps", 17.5), (475.0, "score", 12.0), (475.0, "minutes", math.inf)]
)
def test_a_run_is_judged_by_its_score_or_by_the_time_to_the_stop_score(stop_score, kind, result):
    config = SimpleNamespace(run=SimpleNamespace(stop_score=stop_score))
    assert judge(SimpleNamespace(config=config, score=17.5, seconds=12.0, end=EndReason(kind))) == result


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy
def test_optuna_ends_a_trial_below_the_median_from_the_third_tenth_on(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra sweep")
    start = replace(PRESETS["cartpole"].config, run=RunConfig(max_steps=100))
    sweep = Sweep(tmp_path, start, {"actor.n_step": [1, 2]}, Stop(), prunes=True)
    for score in (10, 20, 30, 40, 50):
        trial = sweep.study.ask()
        evaluate(Pruning(trial, lower_is_better=False), {"max_steps": 100}, (score, 0, 10, 0), (score, 0, 90, 0))
        sweep.study.tell(trial, score)
    for score, has_ended in ((29, True), (31, False)):
        trial = sweep.study.ask()
        pruning = Pruning(trial, lower_is_better=False)
        assert evaluate(pruning, {"max_steps": 100}, (score, 0, 10, 0), (score, 0, 20, 0)).asked is None
        assert (evaluate(pruning, {"max_steps": 100}, (score, 0, 31, 0)).asked is not None) == has_ended
