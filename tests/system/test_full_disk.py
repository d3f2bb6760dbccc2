"""A full disk loses only new data: no role ends, and all earlier lines stay."""

import json

from support.small_disks import needs_mounts, run_on_a_small_disk


@needs_mounts
def test_a_full_disk_leaves_whole_lines_and_events(tmp_path):
    """The disk accepts only a part of a write. Readers find whole records only, none lost or doubled."""
    output = run_on_a_small_disk(
        tmp_path,
        """
        import json, logging, os, sys
        from pathlib import Path
        from apex.runs.metrics.writer import MetricRow, MetricsWriter, read_curve
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        folder = Path(os.environ["FOLDER"])
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(56_000))
        writer = MetricsWriter(folder)
        curve = folder / "curves/learner.jsonl"
        for steps in range(150):
            writer.accept(MetricRow("learner", steps, {"loss": steps}, 1.0))
            writer.flush()
            assert curve.read_bytes().endswith(b"\\n")
        full = len(read_curve(curve))
        ballast.unlink()
        writer.close()
        steps = [line["steps"] for line in read_curve(curve)]
        shown = EventAccumulator(str(folder / "tensorboard" / folder.name)).Reload()
        print(json.dumps([full, steps, [event.step for event in shown.Scalars("loss")]]))
        """,
    ).splitlines()
    full, steps, events = json.loads(output[-1])
    assert 0 < full < 150
    assert steps == events == list(range(150))
    lines = [line for line in output if "No space left" in line or "records were lost" in line]
    assert [line.partition(" ")[0] == "cannot" for line in lines] == [True, True, False, False]
