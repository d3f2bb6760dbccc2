"""The comparison of runs with and without Ray."""

import json

from bench.engines import read_rates


def test_rates_exclude_the_first_quarter_of_a_curve(tmp_path):
    rows = [(0, 100.0, 0), (10, 101.0, 1), (900, 102.0, 5), (1_000, 104.0, 9), (1_400, 106.0, 13)]
    lines = [{"steps": steps, "time": time, "scalars": {"learner/updates": updates}} for steps, time, updates in rows]
    path = tmp_path / "learner.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_rates(path) == (500 / 4, 8 / 4)
