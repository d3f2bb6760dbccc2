"""Runs with real trackers, whose local stores are complete. Needs the extras wandb and mlflow."""

import json
import os
import struct
import subprocess
import sys

import pytest
from support.programs import FEW_GAMES, TINY

from apex.config import flatten
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve

KINDS = {"policy", "checkpoint", "film", "report"}
BLOCK = 32_768  # bytes of a block in wandb's file, which has the format of LevelDB's log after a header of 7 bytes


def train(folder, tracker, *options):
    """Trains, and resumes the run once; returns its folder and the rows of its curves."""
    pytest.importorskip(tracker, reason=f"needs the extra {tracker}")
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": path, "WANDB_DATA_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    common = ["--track", tracker, "--run.no-tensorboard"]
    new = [*TINY, *FEW_GAMES, "--name", "one", "--checkpoint.period", "50", "--max-updates", "150"]
    for arguments in (new, ["--resume", "runs/one", "--max-updates", "300"]):
        command = [sys.executable, "-m", "apex", "train", *arguments, *common]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert tracker not in ended.stderr
    run = RunFolder.open(folder / "runs/one")
    assert "WARNING callback" not in (run.logs / "launcher.log").read_text()
    rows = [row for path in sorted(run.curves.glob("*.jsonl")) for row in read_curve(path)]
    assert len(rows) > 8
    return run, rows


def wandb_records(path):
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the only, or the last part of a record
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_settings_curves_and_artifacts_offline(tmp_path):
    run, rows = train(tmp_path, "wandb")
    first, second = sorted((tmp_path / "runs/wandb").glob("offline-run-*/run-*.wandb"))
    records = [*wandb_records(second)]  # `wandb sync` replaces the first record by the second.
    runs = [record.run for record in records if record.HasField("run")]
    assert {each.run_id for each in runs} == {f"{run.run_id}"}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["environment.id"] == flatten(run.config)["environment.id"]
    assert set(flatten(run.config)) <= set(config)
    history = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    logged = {(row["steps"], row["time"]): row for row in history if "time" in row}
    for row in rows:
        found = logged[row["steps"], row["time"]]
        assert {tag: found[tag] for tag in row["scalars"]} == pytest.approx(row["scalars"], nan_ok=True)
    assert {record.run.run_id for record in wandb_records(first) if record.HasField("run")} == {f"{run.run_id}"}
    artifacts = [record.artifact for record in records if record.HasField("artifact")]
    assert {artifact.type for artifact in artifacts} == KINDS
    assert all(os.path.getsize(file.local_path) for artifact in artifacts for file in artifact.manifest.contents)
    assert list(first.parent.glob("files/media/videos/*.mp4"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of SQLAlchemy, for MLflow
def test_mlflow_has_settings_curves_and_artifacts_in_its_local_store(tmp_path):
    run, rows = train(tmp_path, "mlflow")
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow/mlflow.db")
    (record,) = client.search_runs([client.get_experiment_by_name("apex").experiment_id])
    assert (record.info.run_name, record.info.status) == ("one", "FINISHED")
    params = {setting: str(value) for setting, value in flatten(run.config).items()}
    assert record.data.params == {**params, "run.max_updates": "150"}
    for tag in ("learner/loss", "evaluator/score", "replay/size"):
        values = {
            (each.step, each.timestamp): each.value for each in client.get_metric_history(record.info.run_id, tag)
        }
        expected = {
            (row["steps"], int(1_000 * row["time"])): row["scalars"][tag] for row in rows if tag in row["scalars"]
        }
        assert expected
        assert {at: values[at] for at in expected} == expected
    artifacts = {each.path for each in client.list_artifacts(record.info.run_id)}
    assert artifacts == {*KINDS, "config.toml"}
