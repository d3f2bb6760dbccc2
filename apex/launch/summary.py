"""The summary that `apex train` prints at its end: the result of the run, and commands to try next."""

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from apex.config import EvaluatorConfig
from apex.facts import INTERRUPTED, Ending, EndReason
from apex.launch.start import RunOutcome, find_end
from apex.runs.checkpoints.paths import BEST, newest_update
from apex.runtime.text import duration, last_lines, number
from apex.sentences import describe_end, describe_failure, plural
from apex.transport.messages.run_status import RunStatus

LAST_LINES = 5  # number of log lines shown if the failure of a program ended the run


def summary(outcome: RunOutcome) -> list[str]:
    """Returns the lines of the summary: the end of the run, commands to try next, and at last the score."""
    config, folder, ending, status, driver_folder = outcome
    end = find_end(ending, status)
    lines = [_describe_end(ending, end, status, None if driver_folder is not None else folder)]
    if ending.failure is not None and ending.failure.kind != "no_updates":
        log = (driver_folder or folder) / "logs" / f"{ending.failure.role}.log"
        context = last_lines(log, LAST_LINES)
        is_new = len(context) > 1 or not ending.failure.detail  # Otherwise, the line is part of the cause already.
        lines += [f"    {line}" for line in context if is_new]
    score = []
    if status is not None:
        elapsed = duration(status.elapsed_seconds)
        lines.append(f"{number(status.steps)} steps, {number(status.updates)} updates in {elapsed}")
        score = [_score(status, folder, config.learner.init_from)]
        begin = config.replay.min_size_to_sample * config.steps_per_item
        if not status.updates and ending.failure is None and 0 < status.steps < begin:
            needed = f"sampling begins at {begin:,} steps (replay.min_size_to_sample)"
            lines.append(f"no update was made: {needed}")
        if status.actors.faults:
            games = f"{plural(status.actors.faults, 'game')} ended by an exception or an invalid value"
            lines.append(f"faults of the environment: {games}; see {folder / 'logs'}")
    would_end = end is not None and end.is_limit  # if it was resumed with the same limits
    train = f"{command_name('apex')} train"
    if driver_folder is not None:
        lines.append(f"run folder, on the head's host: {folder}")
        again = [f"resume: {train} --engine ray --resume {shlex.quote(str(driver_folder))}"]
        return lines + ([] if would_end else again) + score
    lines.append(f"run folder: {folder}")
    checkpoints, where = folder / "checkpoints", shlex.quote(str(folder))
    if newest_update(checkpoints) or (checkpoints / BEST).exists():  # There is a policy that was trained.
        video = "" if ":" in config.environment.id else " --video game.mp4"  # An own environment may draw no pictures.
        lines.append(f"next: {command_name('apex')} evaluate {where} --episodes 30{video}")
    if reason := _why_no_final_score(config.evaluator, end, status):
        command = f"{command_name('apex')} evaluate {where} --checkpoint last"
        lines.append(f"final policy: not evaluated, because {reason}; to play it: {command}")
    if any(checkpoints.glob("*")) and not would_end and not config.run.single_process:
        lines.append(f"resume: {train} --resume {where}")
    if any((folder / "tensorboard").glob("*")):
        where = shlex.quote(str(folder / "tensorboard"))
        lines.append(f"curves: {command_name('tensorboard')} --logdir {where}")
    return lines + score


def _describe_end(ending: Ending, end: EndReason | None, status: RunStatus | None, folder: Path | None) -> str:
    """Returns why the run ended. `folder`: the run folder if it is on this host."""
    if ending.failure is not None:
        return f"the run ended with status {ending.status}: {describe_failure(ending.failure)}"
    if end is None:
        return "finished"
    if end != INTERRUPTED:
        return f"finished: {describe_end(end)}"
    if folder is None:
        return "interrupted" if status is None else f"interrupted at update {status.updates:,}"
    newest = newest_update(folder / "checkpoints")
    return "interrupted; nothing was saved" if newest is None else f"interrupted; saved at update {newest:,}"


def _why_no_final_score(config: EvaluatorConfig, end: EndReason | None, status: RunStatus | None) -> str:
    """Returns why a run that a limit has ended has no score of its final policy; "" if it has one or needs none."""
    if status is None or not status.updates or status.evaluator.updates == status.updates:
        return ""
    if end is None or not end.is_limit or end.kind == "score":
        return ""
    if not config.enabled or not config.final_seconds:
        return "evaluator.enabled is off" if not config.enabled else "evaluator.final_seconds is 0"
    return f"no evaluator finished its games before the end (evaluator.final_seconds {config.final_seconds:g})"


def _score(status: RunStatus, folder: Path, init_from: str) -> str:
    evaluator, actors = status.evaluator, status.actors
    if evaluator.score is not None:
        is_final = evaluator.updates == status.updates
        of = "the final policy" if is_final else f"update {number(evaluator.updates)}"
        if not evaluator.updates and (init_from or not status.updates):
            of = "the policy from which it started" if init_from else "the untrained policy"
        line = f"score: {number(evaluator.score)}, mean of {plural(evaluator.episodes or 0, 'new game')} of {of}"
        count = _count_evaluations(folder)
        if count == 1 or evaluator.best is None:
            return line
        return f"{line}; best of {count or 'all'} evaluations: {number(evaluator.best)}"
    why = "no evaluation was finished"
    if evaluator.best is not None:
        why += f" since the run was resumed; best of all before: {number(evaluator.best)}"
    if actors.score is not None:
        who = f"recent games of actor {actors.highest_id}, which explores least"
        return f"training score: {number(actors.score)}, {who}; {why}"
    return f"score: none, because {'no game was finished' if evaluator.best is None else why}"


def _count_evaluations(folder: Path) -> int:
    """Returns the number of evaluations in the run's curves; 0 if these are on another host."""
    with suppress(OSError):
        return sum(path.read_bytes().count(b"\n") for path in (folder / "curves").glob("evaluator*.jsonl"))
    return 0


def command_name(name: str) -> str:
    """Returns the command that runs program `name` of this installation from the current folder."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found is not None and Path(found) == own:
        return name
    return shlex.quote(os.path.relpath(own)) if own.is_relative_to(Path.cwd()) else shlex.quote(str(own))
