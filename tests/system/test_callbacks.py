"""Callbacks of whole runs: in processes, in one process and on Ray."""

import json
import os
import subprocess
import sys

import pytest
from support.ray_clusters import RayCluster, needs_ray

from apex.facts import EndReason
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve

SCRIPT = """
import json, sys, time
import apex

class Tape(apex.Callback):
    def take(self, *call):
        with open("calls", "a") as file:
            file.write(json.dumps(call) + "\\n")

    def on_start(self, run):
        self.take("start", str(run.folder))

    def on_status(self, run, status):
        self.take("status", status.updates)

    def on_evaluation(self, run, evaluation):
        self.take("evaluation", evaluation.updates, evaluation.score)

    def on_checkpoint(self, run, path):
        self.take("checkpoint", int(path.name))
        run.stop("saved")

    def on_end(self, run, end):
        self.take("end", end.kind, end.detail)

class Broken(apex.Callback):
    def on_status(self, run, status):
        raise ValueError("no luck")

class Stuck(apex.Callback):
    def on_start(self, run):
        time.sleep(600)

changes = json.loads(sys.argv[1])
config = apex.preset(
    "cartpole",
    actor={"num_actors": 4},
    checkpoint={"period": 50},
    evaluator={"episodes": 3, "num_envs": 3, "period_seconds": 2.0, "period_updates": 20},
    learner={"batch_size": 32},
    replay={"min_size_to_sample": 300, "samples_per_insert": 8.0},
    run={"stop_score": 501, "tensorboard": False, "name": "one", **changes},
)
callbacks = [Broken(), Stuck(), Tape()]
run = apex.train(config, quiet=True, engine=sys.argv[2], callbacks=callbacks)
print("returned", run.end.kind, run.end.detail, run.interrupted, run.updates)
"""


def script(engine="local", **changes):
    return [sys.executable, "-c", SCRIPT, json.dumps(changes), engine]


def check(folder, output):
    """The callback has asked for the end at the first checkpoint, and was called for all that the run did."""
    calls = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    kinds = [kind for kind, *_ in calls]
    assert (kinds[0], kinds[-1]) == ("start", "end")
    assert "status" in kinds
    run = RunFolder.open(folder / "runs/one")
    scores = [row["scalars"]["evaluator/score"] for row in read_curve(run.curves / "evaluator.jsonl")]
    assert [call[2] for call in calls if call[0] == "evaluation"] == scores
    saved = sorted(call[1] for call in calls if call[0] == "checkpoint")
    assert (run.checkpoints / f"{saved[-1]:09d}").exists()
    assert calls[-1] == ["end", "callback", "saved"]
    assert f"returned callback saved False {saved[-1]}" in output
    return run


@pytest.mark.parametrize("single", [False, True])
def test_a_callback_sees_a_run_and_ends_it_beside_broken_and_stuck_ones(tmp_path, single):
    ended = subprocess.run(script(single_process=single), cwd=tmp_path, capture_output=True, text=True, timeout=380)
    assert ended.returncode == 0, ended.stderr
    run = check(tmp_path, ended.stdout)
    assert run.end == EndReason("callback", detail="saved")
    log = (run.logs / ("learner.log" if single else "launcher.log")).read_text()
    assert [log.count(f"WARNING callback {name}: ") for name in ("Broken", "Stuck", "Tape")] == [1, 1, 0]


@needs_ray
def test_callbacks_run_in_the_driver_of_ray(tmp_path):
    cluster = RayCluster(tmp_path, 2)
    try:
        driver = cluster.start("driver", *script("ray", folder=os.fspath(tmp_path / "runs")))
        assert driver.wait(200) == 0, driver.output()
        check(tmp_path, driver.output())
        log = (tmp_path / "runs/ray/one/logs/driver.log").read_text()
        assert [log.count(f"WARNING callback {name}: ") for name in ("Broken", "Stuck", "Tape")] == [1, 1, 0]
    finally:
        cluster.close()
