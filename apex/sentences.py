"""Turns facts into English. Each sentence has one place, and tests/golden/sentences.txt holds all of them."""

from __future__ import annotations

import signal

from apex.facts import EndReason, Failure, Phase, ProgramEvent, UnitEvent


def plural(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 seed", "1,200 seeds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


PHASES: dict[Phase, str] = {
    "waiting_for_replay": "waiting for replay",
    "filling_replay": "filling replay",
    "training": "training",
    "finishing": "finishing",
    "evaluating_final_policy": "evaluating the final policy",
    "finished": "finished",
}


def describe_end(end: EndReason) -> str:
    """Returns why a run ended, as a phrase without a subject."""
    match end.kind:
        case "score":
            return f"reached the score {end.value:g}"
        case "steps":
            return f"reached {end.value:.0f} steps"
        case "updates":
            return f"reached {end.value:.0f} updates"
        case "minutes":
            return f"reached {end.value:g} min"
        case "interrupted":
            return "interrupted"


def describe_outcome(end: EndReason | None, *, running: bool) -> str:
    """Returns how a run ended according to its folder."""
    if running:
        return "the run has not ended"
    if end is not None:
        return describe_end(end)
    return "no end is recorded: the learner was killed or failed, or an older version made the run; see the run's logs"


def describe_failure(failure: Failure) -> str:
    """Returns why a program could not continue, with its last words and its log."""
    detail = f": {failure.detail}" if failure.detail else ""
    log = f"; see {failure.log}" if failure.log else ""
    unit = f"{failure.unit}: " if failure.unit else ""
    if failure.kind == "error":
        return f"{unit}{failure.detail}{log}"
    if failure.kind == "refused":
        return f"{unit}{failure.role} refused to run{detail}{log}"
    times = {1: "once", 2: "twice"}.get(failure.times, f"{failure.times} times")
    return f"{unit}{failure.role} {_describe_exit(failure)} {times}{detail}{log}"


def describe_event(event: ProgramEvent) -> str:
    """Returns what the supervisor does with a program, and why."""
    failure = event.failure
    if event.kind == "restarting" and failure is not None:
        start = f"it starts again in {event.seconds:.1f} s" if event.seconds else "it starts again"
        return f"{event.role} {_describe_exit(failure)}; {start}; see {failure.log}"
    if event.kind == "abandoned" and failure is not None:
        return f"continuing without {event.role}: {describe_failure(failure)}"
    if event.kind == "killing":
        return f"{event.role} did not stop within {event.seconds:.1f} s; killing it"
    return f"stopping {event.role}"


def describe_unit(event: UnitEvent) -> str:
    """Returns what happens to a unit of a run on Ray."""
    match event.kind:
        case "placed":
            return f"{event.unit} is on {event.host} ({event.address})"
        case "lost":
            return f"{event.unit} was lost; Ray restarts it on a node with free CPUs"
        case "waiting":
            needs = f"{event.cpus} CPUs and a GPU" if event.gpu else f"{event.cpus} CPUs"
            free = f"{event.free_cpus:g} of {event.total_cpus:g} CPUs are free"
            return f"{event.unit} waits for a node with {needs}: {free}"
        case "learner":
            return f"learner at {event.address}; TensorBoard on that host: {event.tensorboard or 'off'}"
    cause = describe_failure(event.failure) if event.failure else event.unit
    then = "starting it again" if event.kind == "restarting" else "the run continues without this actor host"
    return f"{cause}; {then}"


def describe_disk(folder: str, flaw: str) -> str:
    """Returns why the run folder cannot be written, or that it can be written again if `flaw` is empty."""
    if not flaw:
        return f"the run folder {folder} is writable again"
    return f"the run folder {folder} {flaw}; the run continues, but logs, curves and checkpoints are lost until then"


def _describe_exit(failure: Failure) -> str:
    match failure.kind:
        case "stuck":
            return f"had no heartbeat for {failure.value:.0f} s and was killed (--run.stuck-seconds)"
        case "signal":
            return f"was ended by signal {failure.value:.0f} ({signal.strsignal(int(failure.value))})"
        case _:
            return f"ended with status {failure.value:.0f}"
