"""Tests of the metrics writer: TensorBoard events, curves, full disks, and curves of resumed runs."""

import json
import math
import shutil
import struct
import time
from itertools import accumulate

import msgspec
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from apex.runs.metrics.append_file import MAX_PENDING_BYTES
from apex.runs.metrics.writer import MetricRow, MetricsWriter, cut_curves, read_curve
from apexreplay.wire.histogram import Histogram
from apexreplay.wire.json_codec import encode_json


def make_row(steps=100, **changes):
    return MetricRow(
        **{"role": "learner", "steps": steps, "time": 1000.5, "scalars": {"learner/loss": 0.25}, **changes}
    )


def make_histogram(counts=(1.0, 2.0), edges=(0.5, 1.0, 3.0)):
    return Histogram(list(counts), list(edges))


def write(folder, *rows):
    writer = MetricsWriter(folder)
    for row in rows:
        writer.accept(row)
    writer.close()
    return writer


def read_events(folder):
    """The events by the definition of the format: uint64 length, its checksum, the event, its checksum."""
    events = []
    for file in sorted((folder / "tensorboard" / folder.name).iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            body = data[12 : 12 + length]
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(body)
            events.append(Event.FromString(body))
            data = data[16 + length :]
    return events


def test_tensorboard_reads_tag_value_steps_and_time_of_a_row(tmp_path):
    histogram = {"replay/priority": make_histogram([4.0, 0.0, 1.0], [0.5, 1.5, 2.0, 4.0])}
    write(tmp_path, make_row(1), make_row(2, scalars={"learner/loss": 0.5}, histograms=histogram))
    shown = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name)).Reload()
    scalars = [(event.wall_time, event.step, event.value) for event in shown.Scalars("learner/loss")]
    assert scalars == [(1000.5, 1, 0.25), (1000.5, 2, 0.5)]
    (event,) = shown.Histograms("replay/priority")
    value = event.histogram_value
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (0.5, 4, 5, 4 + 3, 4 + 9)
    assert (list(value.bucket_limit), list(value.bucket)) == ([1.5, 2, 4], [4, 0, 1])


def test_texts_are_in_tensorboard_and_in_the_curve(tmp_path):
    texts = {"limited_by/setting": "actors: --actor.num-processes"}
    write(tmp_path, make_row(1), make_row(2, texts=texts))
    shown = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name)).Reload()
    (event,) = shown.Tensors("limited_by/setting/text_summary")
    assert (event.step, event.tensor_proto.string_val) == (2, [b"actors: --actor.num-processes"])
    assert [row.get("texts") for row in read_curve(tmp_path / "curves/learner.jsonl")] == [None, texts]


def test_each_row_is_one_json_line_in_the_curve_of_its_role(tmp_path):
    first, second = make_row(1), make_row(2, role="replay", histograms={"replay/priority": make_histogram()})
    write(tmp_path, first, make_row(np.int64(3), scalars={"a": np.float32(0.5), "b": np.int32(4)}), second)
    assert sorted(path.name for path in (tmp_path / "curves").iterdir()) == ["learner.jsonl", "replay.jsonl"]
    assert read_curve(tmp_path / "curves/learner.jsonl") == [
        {"steps": 1, "time": 1000.5, "scalars": {"learner/loss": 0.25}},
        {"steps": 3, "time": 1000.5, "scalars": {"a": 0.5, "b": 4.0}},
    ]
    assert read_curve(tmp_path / "curves/replay.jsonl")[0]["histograms"] == {
        "replay/priority": {"counts": [1, 2], "edges": [0.5, 1, 3]}
    }


def test_value_that_is_not_finite_is_null_in_the_curve(tmp_path):
    writer = write(tmp_path, make_row(1), make_row(2, scalars={"learner/loss": math.nan}))
    *_, event = read_events(tmp_path)
    assert math.isnan(event.summary.value[0].simple_value)
    assert read_curve(tmp_path / "curves/learner.jsonl")[-1]["scalars"] == {"learner/loss": None}
    assert writer.latest("learner/loss") is None


def test_latest_returns_the_newest_value_of_a_tag(tmp_path):
    writer = MetricsWriter(tmp_path)
    assert writer.latest("learner/loss") is None
    writer.accept(make_row(1, scalars={"a": 1, "b": 2}))
    writer.accept(make_row(2, scalars={"a": 3}))
    assert (writer.latest("a"), writer.latest("b")) == (3.0, 2.0)
    writer.close()


def test_rows_are_flushed_within_a_second(tmp_path):
    now = [50.0]
    writer = MetricsWriter(tmp_path, clock=lambda: now[0])
    curve = tmp_path / "curves/learner.jsonl"
    writer.accept(make_row(1))
    assert not curve.exists()
    now[0] += 1.0
    writer.accept(make_row(2))
    assert len(read_curve(curve)) == 2
    writer.accept(make_row(3))
    assert len(read_curve(curve)) == 2
    writer.flush()
    assert len(read_curve(curve)) == 3
    writer.close()


def test_full_disk_is_logged_once_and_loses_no_row_if_space_returns(tmp_path, caplog):
    curve = tmp_path / "curves/learner.jsonl"
    curve.parent.mkdir()
    curve.symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    for steps in range(3):
        writer.accept(make_row(steps))
        writer.flush()
    (record,) = caplog.records
    assert curve in record.args
    curve.unlink()
    writer.close()
    assert caplog.records[-1].args == (curve, 0)
    assert [line["steps"] for line in read_curve(curve)] == [0, 1, 2]


def test_rows_that_wait_for_a_full_disk_are_limited_and_counted(tmp_path, caplog):
    curve = tmp_path / "curves/learner.jsonl"
    curve.parent.mkdir()
    curve.symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    row = make_row(histograms={"h": make_histogram([1.0] * 1_000, range(1, 1_002))})
    size = len(msgspec.json.encode(row.histograms))
    num_rows = MAX_PENDING_BYTES // size + 10
    for _ in range(num_rows):
        writer.accept(row)
        writer.flush()
    curve.unlink()
    writer.close()
    lines = curve.read_text().splitlines()
    assert 0 < len(lines) < num_rows
    assert caplog.records[-1].args == (curve, num_rows - len(lines))
    assert len(curve.read_bytes()) <= MAX_PENDING_BYTES


def test_tensorboard_reads_all_files_although_the_clock_was_set_back(tmp_path, monkeypatch):
    for number, now in enumerate((2_000_000_000, 1_000_000_000, 1_500_000_000), start=1):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now * 10**9)
        write(tmp_path, make_row(number))
    names = sorted(path.name for path in (tmp_path / "tensorboard" / tmp_path.name).iterdir())
    assert [int(name.split(".")[3]) for name in names] == [2_000_000_000, 2_000_000_001, 2_000_000_002]
    assert [event.step for event in read_events(tmp_path) if event.HasField("summary")] == [1, 2, 3]


def test_writer_continues_without_a_folder_for_events(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("in the way")
    writer = write(tmp_path, make_row(1), make_row(2))
    assert len(read_curve(tmp_path / "curves/learner.jsonl")) == 2
    assert "cannot write" in caplog.text
    assert writer.latest("learner/loss") == 0.25


def test_incomplete_line_of_a_killed_writer_is_omitted(tmp_path):
    write(tmp_path, make_row(1), make_row(2))
    curve = tmp_path / "curves/learner.jsonl"
    curve.write_bytes(curve.read_bytes()[:-10])
    assert [line["steps"] for line in read_curve(curve)] == [1]
    write(tmp_path, make_row(3))
    assert [line["steps"] for line in read_curve(curve)] == [1, 3]


def test_line_that_is_not_an_object_is_omitted(tmp_path):
    curve = tmp_path / "x.jsonl"
    curve.write_bytes(b'{"steps": 1}\n17\n\n\xff\xfe\n{"steps": 2}\n')
    assert read_curve(curve) == [{"steps": 1}, {"steps": 2}]


def test_removed_file_is_created_again(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.accept(make_row(1))
    writer.flush()
    shutil.rmtree(tmp_path / "curves")
    writer.accept(make_row(2))
    writer.close()
    assert [line["steps"] for line in read_curve(tmp_path / "curves/learner.jsonl")] == [2]


def write_start(folder, first, *later):
    """Writes rows as a run does that starts, or is resumed, at step `first`."""
    writer = MetricsWriter(folder)
    writer.begin(first)
    cut_curves(folder / "curves", first, 0)
    for steps in later:
        writer.accept(make_row(steps, scalars={"learner/loss": float(steps)}))
    writer.close()


def test_repeated_steps_are_in_the_curve_once(tmp_path):
    write_start(tmp_path, 0, 100, 200, 300)
    write_start(tmp_path, 200, 250, 350)
    curves = [tmp_path / "curves" / "learner.jsonl", tmp_path / "curves" / "cut" / "learner.jsonl"]
    assert [[row["steps"] for row in read_curve(path)] for path in curves] == [[100, 200, 250, 350], [300]]
    events = EventAccumulator(str(tmp_path / "tensorboard" / tmp_path.name)).Reload()
    assert [event.step for event in events.Scalars("learner/loss")] in ([100, 250, 350], [100, 200, 250, 350])


def test_updates_that_only_a_new_learner_repeats_are_in_the_curve_once(tmp_path):
    """The replay servers have gone on counting steps."""
    rows = [{"steps": 10 * n, "scalars": {"learner/updates": n}} for n in range(1, 5)]
    (tmp_path / "learner.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "replay.jsonl").write_text(f"{json.dumps({'steps': 40, 'scalars': {'replay/size': 40}})}\n")
    assert cut_curves(tmp_path, 40, 2) == 2
    assert read_curve(tmp_path / "learner.jsonl") == rows[:2]
    assert read_curve(tmp_path / "cut" / "learner.jsonl") == rows[2:]
    assert len(read_curve(tmp_path / "replay.jsonl")) == 1


def test_curve_without_late_rows_is_unchanged(tmp_path):
    path = tmp_path / "learner.jsonl"
    path.write_bytes(b'{"steps":5}\n{"steps": 7, "ti')  # The last line is incomplete.
    assert cut_curves(tmp_path, 5, 0) == 0
    assert path.read_bytes() == b'{"steps":5}\n{"steps": 7, "ti'
    assert not (tmp_path / "cut").exists()


def test_a_long_curve_and_its_events_continue_in_other_files(tmp_path, monkeypatch):
    monkeypatch.setattr("apex.runs.metrics.writer.MAX_FILE_BYTES", 150)  # three rows
    for first in (0, 7):  # The second writer continues the files of the first.
        writer = MetricsWriter(tmp_path)
        for steps in range(first, first + 7):
            writer.accept(make_row(steps))
            writer.flush()
        writer.close()
    names = sorted(path.name for path in (tmp_path / "curves").iterdir())
    assert names == [*(f"learner-{number:04d}.jsonl" for number in range(1, 5)), "learner.jsonl"]
    assert len(list((tmp_path / "tensorboard" / tmp_path.name).iterdir())) > 3
    rows = read_curve(tmp_path / "curves" / "learner.jsonl")
    assert [row["steps"] for row in rows] == list(range(14))
    lengths = [len(encode_json(row)) + 1 for row in rows]
    for last_bytes in (0, 50, 300, sum(lengths)):
        num_whole = sum(length <= last_bytes for length in accumulate(reversed(lengths)))
        assert read_curve(tmp_path / "curves" / "learner.jsonl", last_bytes) == rows[len(rows) - num_whole :]
    assert cut_curves(tmp_path / "curves", 2, 0) == 11
    assert [row["steps"] for row in read_curve(tmp_path / "curves" / "learner.jsonl")] == [0, 1, 2]
