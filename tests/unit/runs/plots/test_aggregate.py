"""Tests of the curves of `apex plot`: groups of runs, bands of seeds, and CSV files."""

import numpy as np
import pytest
from support.run_builders import ACTOR, make_run

from apex.runs.history import Series
from apex.runs.plots.aggregate import CurveGroup, band, group_runs, reached, read_csv, read_run
from apexreplay.errors import UsageError

SCORES = [(5, 1_000, 10), (10, 2_000, 100)]


def curve(*points):
    return Series(*np.array(points, float).T)


def group(*runs):
    return [(each.label, len(each.curves)) for each in group_runs([read_run(run) for run in runs])]


def test_runs_that_differ_in_seed_name_ports_and_limits_are_one_group(tmp_path):
    runs = [
        make_run(tmp_path, SCORES, name="one"),
        make_run(tmp_path / "elsewhere", SCORES, seed=2),
        make_run(tmp_path, SCORES, seed=3, transport={"port_offset": 100, "control_port": 5_000}),
        make_run(tmp_path, SCORES, seed=4, run={"max_minutes": 5.0, "tensorboard": False}),
    ]
    assert group(*runs) == [("apex", 4)]


def test_groups_are_labelled_by_the_settings_that_differ(tmp_path):
    runs = [
        make_run(tmp_path, SCORES, seed=1, learner={"learning_rate": 3e-4}),
        make_run(tmp_path, SCORES, seed=1, learner={"learning_rate": 1e-3}),
        make_run(tmp_path, SCORES, seed=2, learner={"learning_rate": 3e-4}),
    ]
    assert group(*runs) == [("learner.learning_rate 0.0003", 2), ("learner.learning_rate 0.001", 1)]


@pytest.mark.parametrize(
    ("branches", "labels"),
    [
        ({"network": {"dueling": False}}, ["network.dueling on", "network.dueling off"]),
        ({"environment": {"id": "CartPole-v0"}}, ["CartPole-v1", "CartPole-v0"]),
        ({"environment": {"id": "CartPole-v0"}, "replay": {"max_bytes": 10**7}}, ["CartPole-v1", "CartPole-v0"]),
        (
            {"learner": {"batch_size": 64, "loss": "squared", "target_period": 7}},
            [
                "learner.batch_size 128, learner.loss huber, 1 more",
                "learner.batch_size 64, learner.loss squared, 1 more",
            ],
        ),
    ],
)
def test_label_has_at_most_two_settings(tmp_path, branches, labels):
    runs = [make_run(tmp_path, SCORES), make_run(tmp_path, SCORES, **branches)]
    assert [label for label, _ in group(*runs)] == labels


def test_groups_with_equal_labels_also_have_the_name_of_a_run(tmp_path):
    runs = [
        make_run(tmp_path, SCORES, name=name, replay={"capacity": capacity})
        for name, capacity in (("a", 2_000_000), ("b", 2_000_001))
    ]
    assert group(*runs) == [("replay.capacity 2M, a", 1), ("replay.capacity 2M, b", 1)]


def test_run_without_evaluations_is_a_group_with_a_note(tmp_path):
    evaluated = read_run(make_run(tmp_path, SCORES))
    played = read_run(make_run(tmp_path, SCORES, seed=2, role="actor", tag=ACTOR))
    assert (evaluated.is_evaluated, played.is_evaluated) == (True, False)
    assert list(evaluated.curve.values) == [10, 100]
    groups = group_runs([evaluated, played])
    assert [bool(each.note) for each in groups] == [False, True]
    assert list(groups[1].curves[0].values) == [10, 100]
    assert "actor 7" in groups[1].note
    assert groups[1].title.endswith(groups[1].note)


def test_run_without_scores_is_refused(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(UsageError, match=f"{run.path}.* no scores"):
        read_run(run)


def test_title_counts_the_seeds():
    assert CurveGroup("DQN", [curve((1, 2, 3))]).title == "DQN"
    assert CurveGroup("DQN", [curve((1, 2, 3))] * 3, "raw").title == "DQN · 3 seeds · raw"


def test_band_has_median_lowest_and_highest_at_every_evaluation():
    seeds = [
        curve((0, 0, 0), (10, 100, 10)),
        curve((0, 0, 0), (5, 100, 20), (10, 200, 40)),
        curve((0, 0, 3), (10, 1, 3)),
    ]
    x, median, low, high, first_end = band(seeds, "seconds")
    assert x.tolist() == [0, 5, 10]
    assert (median.tolist(), low.tolist(), high.tolist()) == ([0, 5, 10], [0, 3, 3], [3, 20, 40])
    assert first_end == 10
    assert band(seeds[:2], "steps").median.tolist() == [0, 15, 25]


def test_band_of_one_seed_is_its_curve_with_repeated_steps():
    one = curve((0, 0, 1), (5, 100, 20), (6, 100, 30))
    x, median, low, high, first_end = band([one], "steps")
    assert (x.tolist(), first_end) == ([0, 100, 100], 100)
    assert median.tolist() == low.tolist() == high.tolist() == [1, 20, 30]


def test_band_begins_where_every_seed_has_been_evaluated():
    seeds = [curve((1, 0, 0), (11, 0, 100)), curve((6, 0, 8), (16, 0, 8))]
    result = band(seeds, "seconds")
    assert result.x.tolist() == [6, 11, 16]
    assert result.high.tolist() == [50, 100, 100]


def test_ended_seed_keeps_its_last_score():
    seeds = [curve((0, 0, 0), (2, 0, 500)), curve((0, 0, 0), (4, 0, 100), (8, 0, 300))]
    result = band(seeds, "seconds")
    assert (result.x.tolist(), result.first_end) == ([0, 2, 4, 8], 2)
    assert (result.low.tolist(), result.high.tolist()) == ([0, 50, 100, 300], [0, 500, 500, 500])


def test_threshold_is_reached_by_the_first_evaluation_that_is_as_high():
    scores = curve((1, 10, 400), (2, 20, 475), (3, 30, 480))
    assert (reached(scores, 475), reached(scores, 481)) == ((2, 20), None)


def test_csv_file_is_read(tmp_path):
    path = tmp_path / "dqn.csv"
    path.write_bytes(b"\xef\xbb\xbfseconds,steps,score\r\n1.5,1000,-21\r\n\r\n1.5,2e3,-20.5\r\n")
    assert [values.tolist() for values in read_csv(path)] == [[1.5, 1.5], [1_000, 2_000], [-21, -20.5]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"dqn.csv, line 1: .*seconds,steps,score, got ''"),
        ("steps,seconds,score\n1,2,3\n", "line 1: .*seconds,steps,score, got 'steps,seconds,score'"),
        ("seconds,steps,score\n", "no scores"),
        ("seconds,steps,score\n1,2,3\n4,5\n", "line 3: .*three numbers, got '4,5'"),
        ("seconds,steps,score\n1,2,3\n\n4,many,6\n", "line 4: steps .*>= 0, got 'many'"),
        ("seconds,steps,score\n1,2,nan\n", "line 2: score .*number, got 'nan'"),
        ("seconds,steps,score\n-1,2,3\n", "line 2: seconds .*>= 0, got '-1'"),
        ("seconds,steps,score\n2,2,3\n1,3,3\n", "line 3: seconds .*got 1 after 2"),
        ("seconds,steps,score\n2,2,3\n3,1,3\n", "line 3: steps .*got 1 after 2"),
        ("seconds,steps,score\n1,2,\xff\n", r"dqn\.csv"),
    ],
)
def test_malformed_csv_file_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "dqn.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        read_csv(path)


def test_missing_csv_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.csv"):
        read_csv(tmp_path / "none.csv")
