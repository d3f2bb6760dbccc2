"""Tests of the history: curves over the time that a run has taken, resumed runs included."""

from datetime import datetime

import pytest
from support.run_builders import EVALUATOR, add_rows, make_run

from apex.runs.folder import RunFolder
from apex.runs.history import RunHistory
from apex.types import RunTime


def read(run, role="evaluator", tag=EVALUATOR):
    return [tuple(values) for values in zip(*RunHistory(RunFolder.open(run.path)).series(role, tag), strict=True)]


def test_seconds_count_from_the_start_of_the_run(tmp_path):
    run = make_run(tmp_path, [(4, 1_000, 9.5), (6.5, 2_000, 20)])
    assert read(run) == [(4, 1_000, 9.5), (6.5, 2_000, 20)]


def test_seconds_of_a_resumed_run_do_not_count_the_pause(tmp_path):
    run = make_run(tmp_path, [(4, 1_000, 9.5)])
    run.run_time = RunTime(10)
    run.record_resume(run.config, argv=[])
    again = datetime.fromisoformat(run.manifest["resumed"][0]["started"])
    add_rows(run, "evaluator", [(3, 1_500, {EVALUATOR: 30})], since=again)
    assert read(run) == [(4, 1_000, 9.5), (13, 1_500, 30)]


def test_seconds_continue_after_the_curves_if_the_folder_has_less(tmp_path):
    run = make_run(tmp_path, [(14, 1_000, 9.5)])
    run.run_time = RunTime(10)  # Its programs took 4 s to start.
    run.record_resume(run.config, argv=[])
    again = datetime.fromisoformat(run.manifest["resumed"][0]["started"])
    add_rows(run, "evaluator", [(3, 1_500, {EVALUATOR: 30})], since=again)
    assert [seconds for seconds, *_ in read(run)] == [14, 17]


def test_last_rows_of_repeated_steps_count(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1), (2, 200, 2), (3, 300, 3), (4, 200, 20), (5, 250, 25)])
    assert [point[1:] for point in read(run)] == [(100, 1), (200, 2), (200, 20), (250, 25)]


def test_values_of_repeated_rows_that_lacked_them_stay_away(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1)])
    add_rows(run, "learner", [(2, 200, {"a": 1, "b": 2}), (3, 300, {"a": 3}), (4, 150, {"b": 4}), (5, 400, {"a": 5})])
    assert [point[1:] for point in read(run, "learner", "a")] == [(400, 5)]
    assert [point[1:] for point in read(run, "learner", "b")] == [(150, 4)]


def test_seconds_do_not_decrease_if_the_clock_is_set_back(tmp_path):
    run = make_run(tmp_path, [(5, 100, 1), (3, 200, 2), (-60, 300, 3)])
    assert [seconds for seconds, *_ in read(run)] == pytest.approx([5, 5, 5])


def test_value_that_is_not_finite_is_omitted(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1), (2, 200, float("nan")), (3, 300, 3)])
    assert [score for *_, score in read(run)] == [1, 3]


def test_missing_tag_gives_an_empty_series(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1)])
    assert (read(run, tag="evaluator/none"), read(run, role="learner")) == ([], [])


def test_incomplete_line_is_omitted(tmp_path):
    run = make_run(tmp_path, [(1, 100, 1)])
    with (run.curves / "evaluator.jsonl").open("a") as file:
        file.write('{"steps": 200, "time"\n{"steps": 300}\n')
    assert len(read(run)) == 1


def test_history_has_tags_and_total_seconds(tmp_path):
    run = make_run(tmp_path, [(7, 100, 1)])
    assert RunHistory(run).tags("evaluator") == {EVALUATOR}
    assert RunHistory(run).seconds == pytest.approx(7)
    run.run_time = RunTime(9)
    assert RunHistory(run).seconds == 9
