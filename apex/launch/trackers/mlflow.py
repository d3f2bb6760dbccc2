"""Tracks a run with MLflow: in a local store beside the runs, unless MLFLOW_TRACKING_URI names another one."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.config import flatten
from apex.launch.callbacks import LiveRun
from apex.launch.trackers.tracker import Row, Tracker

FOLDER = "mlflow"  # beside the run folders
EXPERIMENT = "apex"
TAG = "apex.run_id"
MAX_PARAMS, MAX_METRICS = 100, 1_000  # in one request
UNUSUAL = re.compile(r"[^\w .:/-]")  # characters that no name may have


class MlflowTracker(Tracker):
    """Copies settings, curves, film, checkpoint and report page of a run to MLflow.

    The store is the folder `mlflow` beside the run folders: a SQLite database and the artifacts. MLFLOW_TRACKING_URI
    and MLFLOW_EXPERIMENT_NAME choose another store and experiment. MLflow's telemetry is off.
    """

    package = "mlflow"

    def open(self, run: LiveRun, run_id: str) -> None:
        """Opens the record."""
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        import mlflow

        self._mlflow: Any = mlflow
        for name in ("mlflow", "alembic"):  # They print to the terminal.
            logging.getLogger(name).setLevel(logging.WARNING)
        folder = run.folder.absolute().parent / FOLDER
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(exist_ok=True)
            uri, place = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = client = self._mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        try:
            experiment = self._find_experiment(name, place)
        except mlflow.exceptions.MlflowException:  # Another run may have made it meanwhile.
            experiment = self._find_experiment(name, place)
        records = client.search_runs([experiment], f"tags.`{TAG}` = '{run_id}'")
        if records:
            self._id = records[0].info.run_id  # Its parameters cannot change.
            client.update_run(self._id, "RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=run.folder.name, tags={TAG: run_id}).info.run_id
            make = self._mlflow.entities.Param
            params = [make(setting, str(value)) for setting, value in flatten(run.config).items()]
            for first in range(0, len(params), MAX_PARAMS):
                client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        client.log_artifact(self._id, str(run.folder / "config.toml"))

    def _find_experiment(self, name: str, place: str | None) -> str:
        """Returns the experiment's id; makes it if there is none."""
        found = self._client.get_experiment_by_name(name)
        identity: str = found.experiment_id if found else self._client.create_experiment(name, artifact_location=place)
        return identity

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Logs the rows, with their steps and times."""
        make = self._mlflow.entities.Metric
        metrics = [
            make(UNUSUAL.sub("_", tag), value, int(1_000 * row.time), row.steps)
            for row in rows
            for tag, value in row.figures.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MAX_METRICS])

    def keep(self, kind: str, path: Path) -> None:
        """Stores an artifact in a folder named after its kind."""
        store = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        store(self._id, str(path), f"{kind}/{path.name}" if path.is_dir() else kind)

    def finish(self, *, failed: bool) -> None:
        """Closes the record."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")
