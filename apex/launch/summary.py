"""The summary that `apex train` prints at its end: the result of the run, and commands to try next."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from apex.errors import FINISHED
from apex.facts import INTERRUPTED, Ending, EndReason
from apex.launch.start import RunOutcome
from apex.runs.checkpoints.paths import newest_update
from apex.runtime.text import duration, last_lines, number
from apex.sentences import describe_end, describe_failure
from apex.transport.messages.run_status import RunStatus

LAST_LINES = 5  # number of log lines shown if the failure of a program ended the run


def summary(outcome: RunOutcome) -> list[str]:
    """Returns the lines of the summary: the result of the run, and commands to try next."""
    config, folder, ending, status, driver_folder = outcome
    lines = _describe_result(ending, status, (driver_folder or folder) / "logs")
    end = find_end(ending, status)
    would_end = end is not None and end.is_limit  # if it was resumed with the same limits
    train = f"{command_name('apex')} train"
    if driver_folder is not None:
        lines.append(f"run folder, on the head's host: {folder}")
        again = [f"resume: {train} --engine ray --resume {shlex.quote(str(driver_folder))}"]
        return lines + ([] if would_end else again)
    if ending.status == FINISHED:
        lines[1:1] = _unsaved(status, folder)
    lines.append(f"run folder: {folder}")
    if any((folder / "checkpoints").glob("*")):
        where = shlex.quote(str(folder))
        lines.append(f"next: {command_name('apex')} evaluate {where} --episodes 30 --video game.mp4")
        if not would_end and not config.run.single_process:
            lines.append(f"resume: {train} --resume {where}")
    if any((folder / "tensorboard").glob("*")):
        where = shlex.quote(str(folder / "tensorboard"))
        lines.append(f"curves: {command_name('tensorboard')} --logdir {where}")
    return lines


def find_end(ending: Ending, status: RunStatus | None) -> EndReason | None:
    """Returns why a finished run ended; None if that is not known."""
    if status is not None and status.end is not None:
        return status.end
    return None if ending.role else INTERRUPTED


def _describe_result(ending: Ending, status: RunStatus | None, logs: Path) -> list[str]:
    if ending.failure is not None:
        lines = [f"the run ended with status {ending.status}: {describe_failure(ending.failure)}"]
        context = last_lines(logs / f"{ending.role}.log", LAST_LINES)
        lines += [f"    {line}" for line in context if len(context) > 1]  # A single line is part of the cause already.
    else:
        end = find_end(ending, status)
        lines = ["finished" if end is None else f"finished: {describe_end(end)}"]
    if status is not None:
        lines.append(f"score: {_score(status)}")
        elapsed = duration(status.elapsed_seconds)
        lines.append(f"{number(status.steps)} steps, {number(status.updates)} updates in {elapsed}")
    return lines


def _unsaved(status: RunStatus | None, folder: Path) -> list[str]:
    """Returns a warning if the last checkpoint is missing. A run saves it before the end, unless the disk is full."""
    updates, newest = status.updates if status is not None else 0, newest_update(folder / "checkpoints")
    if updates <= (newest or 0):
        return []
    there = "the run has no checkpoint" if newest is None else f"the newest checkpoint is of update {newest:,}"
    return [f"the last checkpoint was not written: {there}; see {folder / 'logs' / 'learner.log'}"]


def _score(status: RunStatus) -> str:
    evaluator, actors = status.evaluator, status.actors
    if evaluator.score is not None:
        of = "the final policy" if evaluator.updates == status.updates else f"update {number(evaluator.updates)}"
        return f"{number(evaluator.score)} in the evaluator's games of {of}, best evaluation {number(evaluator.best)}"
    if actors.score is not None:
        return f"{number(actors.score)} of actor {actors.highest_id}, which explores least"
    return "none: no game was finished"


def command_name(name: str) -> str:
    """Returns the command that runs program `name` of this installation from the current folder."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found) == own:
        return name
    return shlex.quote(os.path.relpath(own)) if own.is_relative_to(Path.cwd()) else shlex.quote(str(own))
