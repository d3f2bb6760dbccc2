"""Run folders with curves, written by the product's own functions."""

from dataclasses import replace
from datetime import datetime

from support.builders import VECTORS

from apex.config import EnvironmentConfig, RunConfig
from apex.config.presets import VECTOR
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import MetricRow, MetricsWriter

NOON = datetime(2025, 1, 31, 12, 0, 5)
EVALUATOR, ACTOR = "evaluator/score", "actor_highest_id/score"


def make_config(folder, *, name="", seed=1, **branches):
    """Returns settings of CartPole until 475, without tuning; `learner={"batch_size": 64}` changes settings of a
    branch.
    """
    config = replace(
        VECTOR, environment=EnvironmentConfig(id="CartPole-v1", clip_rewards=False), run=RunConfig(stop_score=475.0)
    )
    branches["run"] = {"name": name, "folder": str(folder), **branches.get("run", {})}
    changed = {branch: replace(getattr(config, branch), **settings) for branch, settings in branches.items()}
    return replace(config, seed=seed, **changed)


def make_run(folder, scores=(), *, role="evaluator", tag=EVALUATOR, argv=("--preset", "cartpole"), **config):
    """Creates a run that started at NOON; `scores` are (seconds since then, steps, score)."""
    run = RunFolder.create(make_config(folder, **config), VECTORS, argv=list(argv), started=NOON)
    add_rows(run, role, [(seconds, steps, {tag: score}) for seconds, steps, score in scores])
    return run


def add_rows(run, role, rows, *, since=None):
    """Writes rows of curves: (seconds since `since`, by default NOON, steps, scalars)."""
    began = (NOON.astimezone() if since is None else since).timestamp()
    writer = MetricsWriter(run.path)
    for seconds, steps, scalars in rows:
        writer.accept(MetricRow(role, steps, scalars, began + seconds))
    writer.close()
