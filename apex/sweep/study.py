"""The trials of a sweep: Optuna chooses their settings, and ends those early that are worse than the others."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from apex.config import Config, flatten
from apex.errors import TrainingError
from apex.launch.api import Run, train
from apex.launch.callbacks import Callback, LiveRun
from apex.launch.terminal.view import print_line
from apex.runs.folder import MANIFEST, RunFolder
from apex.sweep.space import Search, with_settings
from apex.transport.messages.run_status import EvaluationRow
from apexreplay.errors import UsageError, require
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import discard, store_path

TENTHS = 10  # A trial is compared with the others at each tenth of its limit,
FIRST_TENTH = 3  # from this one on.


class Sweep:
    """A sweep in its folder: the database of its study, and its runs."""

    def __init__(self, folder: Path, start: Config, search: Search, stop: Stop, *, prunes: bool) -> None:
        """Opens the study, or creates it. Raises UsageError if it was created for other settings or another search."""
        import optuna

        self.folder, self.start, self.stop, self._search, self._optuna = folder, start, stop, search, optuna
        self._cores = SimpleQueue[set[int]]()  # those that a trial may take
        self.study = optuna.create_study(
            storage=f"sqlite:///{(folder / 'study.db').absolute()}",
            study_name=folder.name,
            direction="maximize" if start.run.stop_score is None else "minimize",
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=FIRST_TENTH) if prunes else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        asked = json.loads(json.dumps({**flatten(start), "search": search}))
        saved = self.study.user_attrs.get("asked", asked)
        differing = ", ".join(name for name in asked if asked[name] != saved.get(name, asked[name]))
        problem = f"{folder}: this study began with other settings: {differing}"
        require(not differing, problem, remedy="add --study NAME to begin another one")
        self.study.set_user_attr("asked", asked)

    def run_trials(self, count: int, jobs: int) -> None:
        """Runs trials until the study has `count`, `jobs` at once. Those that were killed run again with their seed."""
        states, cores = self._optuna.trial.TrialState, sorted(os.sched_getaffinity(0))
        for trial in self.study.get_trials(states=[states.RUNNING]):
            self.study.tell(trial.number, state=states.FAIL)
            self.study.enqueue_trial(trial.params, {"first": first_number(trial)})
        for job in range(jobs):
            self._cores.put({*cores[job::jobs]})
        waiting = {first_number(trial) for trial in self.study.get_trials(states=[states.WAITING])}
        begun = {first_number(trial) for trial in self.study.trials} - waiting
        # With the same seed as before, a continued study would choose the same settings again.
        self.study.sampler = self._optuna.samplers.TPESampler(seed=self.start.seed + len(self.study.trials))
        if count > len(begun):
            self.study.optimize(self._run_trial, n_trials=count - len(begun), n_jobs=jobs)

    def _run_trial(self, trial: Any) -> float:
        """Returns the result of a trial; NaN if it failed or was interrupted. Raises TrialPruned if it ended early."""
        chosen: dict[str, Any] = {"seed": self.start.seed + first_number(trial)}
        for name, values in self._search.items():
            if isinstance(values, list):
                chosen[name] = trial.suggest_categorical(name, values)
            else:
                suggest = trial.suggest_float if isinstance(values["low"], float) else trial.suggest_int
                chosen[name] = suggest(name, **values)
        pruning, cores, run = Pruning(trial, self.start.run.stop_score is not None), self._cores.get(), None
        os.sched_setaffinity(0, cores)  # of this thread, and of the programs that it starts
        try:
            run = self.train(with_settings(self.start, chosen), f"trial-{first_number(trial)}", [pruning])
        except KeyboardInterrupt:
            self.stop.request()
        except (UsageError, TrainingError) as error:
            if not self.stop.poll():
                print_line(f"trial {trial.number}: {error}")
                return math.nan
        finally:
            self._cores.put(cores)
        if run is None:
            self.study.enqueue_trial(trial.params, {"first": first_number(trial)})
            self.study.stop()
            return math.nan
        has_final = run.end is not None and run.end.kind in ("steps", "updates", "minutes")
        is_older = has_final and run.score_updates != run.updates
        note = f" of update {run.score_updates}: the evaluation of the final policy did not end" if is_older else ""
        print_line(f"trial {trial.number}: {run.reason}, score {run.score:.4g}{note}")
        if run.end is not None and run.end.is_limit:
            pruning.report(run.score or 0.0, TENTHS)
            if math.isfinite(result := judge(run)):
                return result
        raise self._optuna.TrialPruned

    def train(self, config: Config, name: str, callbacks: Sequence[Callback] = ()) -> Run | None:
        """Trains a run; returns None if a stop was requested. Raises UsageError, or TrainingError if the run failed.

        It saves no replay memory and has no TensorBoard. Removes the run of this name, which was killed.
        """
        path = self.folder / "runs" / name
        if (path / MANIFEST).exists():
            run_id = RunFolder.open(path).run_id
            for shard in range(config.replay.num_shards):
                discard(store_path(run_id, shard))
        if path.exists():  # The removal of a killed run may have been killed, too.
            shutil.rmtree(path)
        own = replace(config.run, folder=str(path.parent), name=name, tensorboard=False)
        config = replace(config, run=own, checkpoint=replace(config.checkpoint, replay=False))
        # Without its guard, which refuses calls in the programs of this package.
        run: Run = unwrap(train)(config, quiet=True, stop=self.stop.poll, callbacks=callbacks)
        if run.interrupted:
            self.stop.request()  # Ctrl-C has reached only the run.
            return None
        if run.score is None:
            raise TrainingError(f"{path}: no evaluation was finished", path)
        return run


class Pruning(Callback):
    """Reports the evaluations of a trial to Optuna, and ends the run if the trial is worse than the others."""

    def __init__(self, trial: Any, lower_is_better: bool) -> None:
        self._trial, self._sign = trial, -1 if lower_is_better else 1
        self._tenth, self._score = 0, math.nan  # the last ones

    def on_evaluation(self, run: LiveRun, evaluation: EvaluationRow) -> None:
        """Reports the score if a tenth of the limit has passed since the last report."""
        limit, minutes = run.config.run, 0.0 if run.status is None else run.status.trained_seconds / 60
        parts = ((minutes, limit.max_minutes), (evaluation.steps, limit.max_steps))
        share = max(done / most for done, most in (*parts, (evaluation.updates, limit.max_updates)) if most)
        is_new = self.report(evaluation.score, min(TENTHS - 1, int(TENTHS * share)))
        if is_new and share < 1 and self._trial.should_prune():  # At its limit, the run ends by itself.
            run.stop("pruned")

    def report(self, score: float, tenth: int) -> bool:
        """Reports the score for this tenth, and the one before for those since then; returns whether it did."""
        begin, self._tenth = self._tenth + 1, max(tenth, self._tenth)
        for each in range(begin, tenth + 1):
            value = score if each == tenth else self._score
            if math.isfinite(value):
                self._trial.report(self._sign * value, each)
        self._score = score
        return tenth >= begin


def first_number(trial: Any) -> int:
    """Returns the number of the trial or, if it repeats a killed one, of that one."""
    return int(trial.user_attrs.get("first", trial.number))


def judge(run: Run) -> float:
    """Returns the result of a finished run: the score of its last evaluation.

    With a stop score, it is the seconds until the run reached it; infinity if the run did not.
    """
    if run.config.run.stop_score is None:
        return run.score or 0.0
    return (run.seconds or 0.0) if run.end is not None and run.end.kind == "score" else math.inf
