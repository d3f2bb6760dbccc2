"""Tracks a run with Weights & Biases: offline beside the runs, unless WANDB_MODE says otherwise."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apex.config import flatten
from apex.launch.callbacks import LiveRun
from apex.launch.trackers.tracker import Row, Tracker


class WandbTracker(Tracker):
    """Copies settings, curves, film, checkpoint and report page of a run to Weights & Biases.

    The store is the folder `wandb` beside the run folders, for `wandb sync`; with WANDB_MODE=online, your account.
    WANDB_PROJECT chooses the project. Stores neither console output nor code; the report page shows the typed command.
    """

    package = "wandb"

    def open(self, run: LiveRun, run_id: str) -> None:
        """Opens the record."""
        mode = os.environ.get("WANDB_MODE", "offline")
        if mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # Otherwise, wandb sends figures of its own use.
            # `wandb sync` of a resumed run replaces the record of the start before, which wandb does not read here.
            self._since = 0.0
        import wandb

        self._wandb: Any = wandb
        private = {"disable_git": True, "disable_code": True, "x_disable_meta": True, "x_disable_stats": True}
        self._record = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "apex"),
            id=run_id,
            name=run.folder.name,
            resume="allow",
            mode=mode,
            dir=str(run.folder.parent),  # Its links would make the learner refuse the run folder.
            config=flatten(run.config),
            settings=self._wandb.Settings(console="off", silent=True, **private),
        )
        self._record.define_metric("*", step_metric="steps")

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Logs the rows, with their steps and times."""
        for row in rows:
            self._record.log({"steps": row.steps, "time": row.time, **row.figures})

    def keep(self, kind: str, path: Path) -> None:
        """Stores an artifact, and shows films and pages."""
        artifact = self._wandb.Artifact(f"{self._record.id}-{kind}", type=kind)
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            artifact.add_file(str(file))
        self._record.log_artifact(artifact)
        if kind == "film":
            self._record.log({kind: self._wandb.Video(str(path), format="mp4")})
        elif kind == "report":
            self._record.log({kind: self._wandb.Html(path.read_text(), inject=False)})

    def finish(self, *, failed: bool) -> None:
        """Closes the record."""
        self._record.finish(exit_code=int(failed))
