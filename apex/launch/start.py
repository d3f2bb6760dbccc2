"""What to run: a new or a resumed run, on this machine, in one process or on Ray; and how the run ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from apex.config import Config
from apex.environments.inspection import Inspector
from apex.facts import INTERRUPTED, Ending, EndReason, Failure
from apex.launch.callbacks import Callbacks
from apex.launch.engine import RayEngine
from apex.runs.checkpoints.paths import newest_update
from apex.runs.folder import RunFolder
from apex.runtime.supervisor import Program
from apex.transport.messages.run_status import RunStatus
from apexreplay.errors import FAILED

TOO_SHORT = ("steps", "minutes")  # ends of a run that without an update has failed; a score may need none


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run. `apex.launch.train.execute` carries it out."""

    config: Config  # a size of 0 is chosen for the machine
    argv: Sequence[str]  # command line of the user, for the run's manifest
    folder: Path | None = None  # run to resume: its folder or, on Ray, the driver's folder of it; None: a new run
    accept_changes: bool = False  # a resumed run may lose saved data
    restored_from: str = ""  # the mirror from which `folder` was made; "": it was here
    repeated: Config | None = None  # what a command with --continue asks for; None: another command
    is_over: bool = False  # the run to resume has ended at its limit: nothing is to be run
    asks: bool = False  # a person at a terminal must accept that a resumed run lacks transitions
    engine: RayEngine | None = None  # None: this machine
    inspector: Inspector = field(default_factory=Inspector)  # knows the environment if the preset depended on it
    environment: Mapping[str, str] = field(default_factory=dict)  # additional variables for the programs
    callbacks: Callbacks = field(default_factory=Callbacks)
    edit_programs: Callable[[list[Program]], list[Program]] = list  # fault tests change the programs of the run


class RunOutcome(NamedTuple):
    """How a run ended."""

    config: Config  # with the sizes that were chosen
    folder: Path  # the run folder; on Ray it is on the head's host
    ending: Ending
    status: RunStatus | None  # the last status that the learner reported; None: the learner reported no status
    driver_folder: Path | None = None  # on Ray: the driver's folder of the run


def judge(ending: Ending, status: RunStatus | None, folder: RunFolder) -> Ending:
    """Returns the ending of a run on this host. Records a failure, or an end by a callback, in the run folder.

    A run has failed if its last checkpoint was not written or, unless it was stopped, if it made no step or no update.
    The end of a run without an update stays its limit, so that `--resume` names the limit to raise.
    """
    failure, newest = ending.failure, newest_update(folder.checkpoints) or 0
    if failure is None and status is not None and status.updates > newest:
        log = str(folder.logs / "learner.log")  # Its last lines have the cause.
        failure = Failure(role="learner", kind="unsaved", value=newest, log=log)
    elif failure is None and status is not None and ending.role and not status.steps and not _is_confirmed(status):
        actors = folder.logs / "actor.log"  # There is none if all actors ran on other hosts or in this process.
        failure = Failure(role="actor", kind="no_steps", log=str(actors if actors.exists() else folder.logs))
    elif failure is None and status is not None and not status.updates and status.end and status.end.kind in TOO_SHORT:
        return Ending(FAILED, ending.role, Failure(role="learner", kind="no_updates", value=status.replay.min_size))
    if failure is None:
        if status is not None and status.end is not None and status.end.kind == "callback":
            folder.end = status.end  # The learner has recorded an interruption.
        return ending
    folder.end = EndReason("failed")
    return Ending(max(FAILED, ending.status), ending.role, failure)


def _is_confirmed(status: RunStatus) -> bool:
    """Whether a score has ended the run, perhaps that of the policy from which it started, before any step."""
    return status.end is not None and status.end.kind == "score"


def find_end(ending: Ending, status: RunStatus | None) -> EndReason | None:
    """Returns why a finished run ended; None if that is not known."""
    if status is not None and status.end is not None:
        return status.end
    return None if ending.role else INTERRUPTED
