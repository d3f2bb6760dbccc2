"""The curves of a run by its own clock, through all its lives."""

from __future__ import annotations

from datetime import datetime

import pytest
from support.run_builders import EVALUATOR, add_rows, make_run

from apex.runs.folder import RunFolder
from apex.runs.history import RunHistory


def read(run, role="evaluator", tag=EVALUATOR):
    return [tuple(values) for values in zip(*RunHistory(RunFolder.open(run.path)).series(role, tag), strict=True)]


def test_the_clock_begins_with_the_run(tmp_path):
    run = make_run(tmp_path, [(4, 1_000, 9.5), (6.5, 2_000, 20)])
    assert read(run) == [(4, 1_000, 9.5), (6.5, 2_000, 20)]


def test_the_clock_of_a_resumed_run_goes_on_where_it_was_and_the_pause_counts_nothing(tmp_path):
    run = make_run(tmp_path, [(4, 1_000, 9.5)])
    run.elapsed_seconds = 10
    run.go_on(run.config, argv=[])
    again = datetime.fromisoformat(run.manifest["resumed"][0]["started"])
    add_rows(run, "evaluator", [(3, 1_500, {EVALUATOR: 30})], since=again)
    assert read(run) == [(4, 1_000, 9.5), (13, 1_500, 30)]


def test_what_was_noted_of_a_life_may_be_less_than_its_curves_tell(tmp_path):
    run = make_run(tmp_path, [(14, 1_000, 9.5)])
    run.elapsed_seconds = 10  # Its programs took 4 s to be up.
    run.go_on(run.config, argv=[])
    again = datetime.fromisoformat(run.manifest["resumed"][0]["started"])
    add_rows(run, "evaluator", [(3, 1_500, {EVALUATOR: 30})], since=again)
    assert [seconds for seconds, *_ in read(run)] == [14, 17]


def test_steps_that_were_made_again_count_as_they_were_made_last(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1), (2, 200, 2), (3, 300, 3), (4, 200, 20), (5, 250, 25)])
    assert [point[1:] for point in read(run)] == [(100, 1), (200, 2), (200, 20), (250, 25)]


def test_a_clock_that_was_set_back_does_not_go_back(tmp_path):
    run = make_run(tmp_path, [(5, 100, 1), (3, 200, 2), (-60, 300, 3)])
    assert [seconds for seconds, *_ in read(run)] == pytest.approx([5, 5, 5])


def test_what_has_no_finite_value_is_left_out(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1), (2, 200, float("nan")), (3, 300, 3)])
    assert [score for *_, score in read(run)] == [1, 3]


def test_a_figure_that_is_not_there_is_empty(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1)])
    assert (read(run, tag="evaluator/none"), read(run, role="learner")) == ([], [])


def test_a_torn_line_is_passed_over(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1)])
    with (run.curves / "evaluator.jsonl").open("a") as file:
        file.write('{"steps": 200, "time"\n{"steps": 300}\n')
    assert len(read(run)) == 1


def test_it_knows_its_figures_and_how_long_it_has_gone_on(tmp_path):
    run = make_run(tmp_path, [(7, 100, 1)])
    assert RunHistory(run).tags("evaluator") == {EVALUATOR}
    assert RunHistory(run).seconds == pytest.approx(7)
    run.elapsed_seconds = 9
    assert RunHistory(run).seconds == 9
