"""The last words of `apex train`: how the run went, and what to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import RunFolder
from apex.runtime.lifecycle import FINISHED
from apex.runtime.supervisor import Ending
from apex.runtime.text import duration, last_lines, number
from apex.transport.messages.run_status import RunStatus

LAST_LINES = 5  # of the log of a program that ended the run


def summary(ending: Ending, status: RunStatus | None, folder: RunFolder) -> list[str]:
    """How the run went, and what to type next."""
    lines = how_it_went(ending, status, folder.logs)
    if ending.status == FINISHED:
        lines[1:1] = _unsaved(status, folder)
    lines.append(f"run folder: {folder.path}")
    if any(folder.checkpoints.glob("*")):
        where = shlex.quote(str(folder.path))
        lines.append(f"next: {command_name('apex')} evaluate {where} --episodes 30 --video game.mp4")
        would_end = status is not None and status.reason.startswith("reached")  # again, at once
        if not would_end and not folder.config.run.single_process:
            lines.append(f"go on: {command_name('apex')} train --resume {where}")
    if any(folder.tensorboard.glob("*")):
        where = shlex.quote(str(folder.tensorboard))
        lines.append(f"curves: {command_name('tensorboard')} --logdir {where}")
    return lines


def how_it_went(ending: Ending, status: RunStatus | None, logs: Path) -> list[str]:
    """How the run ended, and what came of it as far as `status` knows."""
    lines = []
    if ending.status != FINISHED:
        lines.append(f"the run ended with status {ending.status}: {ending.cause}")
        context = last_lines(logs / f"{ending.role}.log", LAST_LINES)
        lines += [f"    {line}" for line in context if len(context) > 1]  # The cause has the last one.
    else:
        reason = (status.reason if status is not None else "") or ending.cause
        lines.append(f"finished: {reason}" if reason else "finished")
    if status is not None:
        lines.append(f"score: {_score(status)}")
        elapsed = duration(status.elapsed_seconds)
        lines.append(f"{number(status.steps)} steps, {number(status.updates)} updates in {elapsed}")
    return lines


def _unsaved(status: RunStatus | None, folder: RunFolder) -> list[str]:
    """A run that ends well saves last: if what it is known to have learned is not there, the disk was full, say."""
    updates, newest = status.updates if status is not None else 0, newest_update(folder.checkpoints)
    if updates <= (newest or 0):
        return []
    there = "there is none" if newest is None else f"the newest is of update {newest:,}"
    return [f"the last checkpoint was not written: {there}; see {folder.logs / 'learner.log'}"]


def _score(status: RunStatus) -> str:
    evaluator, actors = status.evaluator, status.actors
    if evaluator.score is not None:
        return f"{number(evaluator.score)} by the evaluator's last games, {number(evaluator.best)} at best"
    if actors.score is not None:
        return f"{number(actors.score)} by actor {actors.highest_id}, which explores least"
    return "none yet: no game was over"


def command_name(name: str) -> str:
    """What to type in this folder to run a program of this installation."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found) == own:
        return name
    return shlex.quote(os.path.relpath(own)) if own.is_relative_to(Path.cwd()) else shlex.quote(str(own))
