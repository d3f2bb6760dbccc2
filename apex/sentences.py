"""Turns facts into English. Each sentence has one place, and tests/golden/sentences.txt holds all of them."""

import signal
import time
from collections.abc import Callable
from typing import Any

from apex.facts import (
    Bottleneck,
    Cause,
    EndKind,
    EndReason,
    Failure,
    LogEntry,
    LossCause,
    Missing,
    OtherVersion,
    Phase,
    ProgramEvent,
    Restored,
    UnitEvent,
    WarmStart,
)
from apexreplay.facts import Record, Waiting, WaitKind
from apexreplay.process.text import size


def plural(number: int, noun: str) -> str:
    """Returns the number with its noun: "1 seed", "1,200 seeds", "2 processes"."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


PHASES: dict[Phase, str] = {
    "waiting_for_replay": "waiting for replay",
    "filling_replay": "filling replay",
    "training": "training",
    "finishing": "finishing",
    "evaluating_final_policy": "evaluating the final policy",
    "finished": "finished",
}


ENDS: dict[EndKind, str] = {
    "score": "reached the score {:g}",
    "steps": "reached {:.0f} steps",
    "updates": "reached {:.0f} updates",
    "minutes": "reached {:g} min",
    "callback": "ended by a callback",
    "interrupted": "interrupted",
    "failed": "a program failed",
}


def describe_end(end: EndReason) -> str:
    """Returns why a run ended, as a phrase without a subject."""
    return ENDS[end.kind].format(end.value) + (f": {end.detail}" if end.detail else "")


def describe_outcome(end: EndReason | None, *, running: bool) -> str:
    """Returns how a run ended according to its folder."""
    if running:
        return "the run has not ended"
    if end is not None:
        return describe_end(end)
    return "no end is recorded: the learner was killed or failed; see the run's logs"


def describe_failure(failure: Failure) -> str:
    """Returns why a program could not continue, with the last line and the path of its log."""
    detail = f": {failure.detail}" if failure.detail else ""
    log = f"; see {failure.log}" if failure.log else ""
    unit = f"{failure.unit}: " if failure.unit else ""
    if failure.kind == "error":
        return f"{unit}{failure.detail}{log}"
    if failure.kind == "refused":
        return f"{unit}{failure.role} refused to run{detail}{log}"
    if failure.kind == "no_steps":
        return f"{unit}no actor has made a step: they failed, or were still starting at the end{log}"
    if failure.kind == "no_updates":
        begin = f"sampling begins at {failure.value:,.0f} transitions (replay.min_size_to_sample)"
        return f"{unit}no update was made before the limit; raise the limit: {begin}{log}"
    if failure.kind == "unsaved":
        newest = f"the newest one is of update {failure.value:,.0f}" if failure.value else "the run has no checkpoint"
        return f"{unit}the last checkpoint was not written: {newest}{log}"
    if failure.kind == "silent":
        return f"Ray's control service at {failure.detail} does not answer: the cluster has lost its head node"
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
        safe = "" if event.role.startswith(("learner", "replay")) else " (it has nothing to save)"
        return f"{event.role} did not stop within {event.seconds:.1f} s; killing it{safe}"
    if event.kind == "saving":
        return f"{event.role} is still busy, probably saving; waiting for up to {event.seconds:.0f} s (Ctrl-C kills it)"
    return f"stopping {event.role}"


def describe_unit(event: UnitEvent) -> str:
    """Returns what happens to a unit of a run on Ray."""
    match event.kind:
        case "placed":
            return f"{event.unit} is on {event.host} ({event.address})"
        case "lost":
            return f"{event.unit} was lost; Ray restarts it on a node with free CPUs"
        case "waiting":
            memory = f"{size(event.memory)} of memory"
            rest = f", {memory} and a GPU" if event.gpu else f" and {memory}"
            needs = f"{plural(event.cpus, 'CPU')}{rest}"
            free = f"{event.free_cpus:g} of {event.total_cpus:g} CPUs are free"
            return f"{event.unit} waits for a node with {needs}: {free}"
        case "learner":
            return f"learner at {event.address}; TensorBoard on that host: {event.tensorboard or 'off'}"
    cause = describe_failure(event.failure) if event.failure else event.unit
    then = "starting it again" if event.kind == "restarting" else "the run continues without this actor host"
    return f"{cause}; {then}"


def describe_restored(found: Restored) -> str:
    """Returns from what a part of a resumed run starts, and which newer save is lost or not used."""
    missing = "checkpoint" if found.part == "learner" else "snapshot"
    why = f"{found.path} has no {missing}" if found.path else f"the run never finished a {missing}"
    begin = {
        "checkpoint": f"resumes at update {found.number:,}, {found.size:,} steps",
        "memory": f"{found.size:,} transitions from {found.path}",
        "snapshot": f"{found.size:,} transitions of snapshot {found.number}",
        "nothing": f"starts {'at update 0' if found.part == 'learner' else 'with an empty memory'}; {why}",
    }[found.source]
    other = f"; loses at least {plural(found.lost, 'later update')}" if found.lost else ""
    if found.other_number and found.source == "memory":
        other = f"; snapshot {found.other_number} has {found.other_size:,} newer transitions, but is not used"
    elif found.other_number:
        other = f"; the checkpoint was saved with snapshot {found.other_number} ({found.other_size:,} transitions)"
    return f"{found.part}: {begin}{other}"


LOSSES: dict[LossCause, str] = {
    "memory_gone": "the replay memory is gone",
    "memory_damaged": "the replay memory is damaged",
    "memory_incomplete": "the creation of the replay memory was interrupted",
    "memory_older": "the replay memory is older than the newest snapshot",
    "snapshot_older": "the newest snapshot is gone, damaged or unfinished",
    "snapshot_gone": "there is no snapshot",
}


def describe_missing(missing: Missing) -> str:
    """Returns how many acknowledged transitions a resumed run lacks, and why."""
    why = ", and ".join(LOSSES[cause] for cause in missing.causes)
    share = f"at least {missing.transitions:,} of {missing.of:,} acknowledged transitions are missing"
    return f"{share}: {why}" if why else share


def describe_warm_start(start: WarmStart) -> str:
    """Returns from which policy a run starts, and which tensors of its network are new."""
    copied = f"starts from {start.path}, update {start.updates:,}: copies {plural(start.copied, 'tensor')}"
    if not start.others:
        return f"{copied}, all of the network"
    return f"{copied}, but not {', '.join(start.others)}, which the policy lacks or has in another shape"


def describe_other_version(other: OtherVersion) -> str:
    """Returns which version of this package started the run last, and which one resumes it."""
    return f"the run was last started with apex {other.saved}, and this is apex {other.present}: results may differ"


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


WAITS: dict[WaitKind, str] = {
    "host_name": "the host name {subject} to be resolved: check its spelling and DNS, or give an IPv4 address",
    "welcome_without_keys": "the learner at {subject}: check port, firewall, and whether it runs and uses --keys",
    "welcome_with_keys": "the learner at {subject}: check port, firewall, whether it runs, and keys, new at each start",
    "all_replay": "all replay servers to join the run: {subject} is missing",
    "shard": "the learner at {subject} to assign this server's shard, which another replay server may still hold",
    "actor_id": "a free actor id: all {need:,.0f} are in use; apex train --head leaves them to other hosts",
    "parameters": "the learner's first parameters",
    "newer_parameters": "newer parameters from the learner",
    "receipts": "receipts from the replay server",
    "samples": "the learner to take samples (replay.inserts_wait)",
    "learner": "the learner at {subject}",
    "more_inserts": "inserts, to keep the ratio of samples per insert",
    "credit": "the learner to acknowledge batches",
    "replay": "{subject} to join the run",
    "transitions": "transitions: {subject} has {have:,.0f} of the {need:,.0f} required for sampling",
    "inserts": "inserts into {subject}: replay.samples_per_insert {need:g} is reached",
    "batches": "batches from its loaders",
    "usable_batches": "batches: {have:,.0f} were refused, and no others arrived",
    "actor_steps": "the actors' steps",
    "trainer_start": "the trainer to create its network and read its checkpoint",
    "checkpoint": "the previous checkpoint, which is still being written: is the disk slow?",
    "own_main_thread": "its own main thread, which makes no progress",
    "child": "a heartbeat of its child process {subject}",
    "any_heartbeat": "heartbeats: no program sends any, so the machine is too busy or all programs were stopped",
    "key_of_role": "the key of the {subject} to appear in the parameter store",
    "aws": "AWS, which reports: {subject}",
    "metadata": "the metadata service, which reports: {subject}",
}

_BUSY = "busy {share:.0f} % of the time"
_IDLE = "the learner waits {learner_wait_share:.0f} % of its time for batches"
CAUSES: dict[Cause, str] = {
    "no_actors": "no actor is connected",
    "replay_absent": "{subject} is not connected",
    "samples_wait_for_inserts": "samplers wait for inserts to keep the ratio of {need:g} samples per insert",
    "repeated_draws": "each transition is drawn {have:.0f} times on average",
    "busy_learner": _BUSY,
    "busy_learner_delays_inserts": _BUSY + ", and inserts wait, to keep the ratio of {need:g} samples per insert",
    "too_many_actors": _BUSY + ", and inserts wait for it: {have:.0f} actors would be enough, there are {need:.0f}",
    "silent_trainer": "the trainer has not reported for {have:.0f} s: its update takes very long, or it is stuck",
    "busy_loaders": _IDLE + ", and its loaders are busy {share:.0f} % of the time",
    "busy_replay": "the replay writer is busy {share:.0f} % of the time",
    "other_programs": "other programs use {have:.1f} of {need:.0f} cores on the learner's host",
    "crowded_cores": _IDLE + ", and {have:.1f} threads compete for each core of its host",
    "slow_receipts": "actors wait {share:.0f} % of their time for receipts",
    "latency": _IDLE + ", and no part is busy",
}
OTHER_REMEDIES: dict[Cause, str] = {  # remedies that are not the increase or decrease of a setting
    "no_actors": "wait for local actors to start, or run apex actor --learner HOST on another host",
    "replay_absent": "run apex replay --learner HOST",
    "other_programs": "stop them, or start the run on another host",
}


def describe_entry(entry: LogEntry) -> str:
    """Returns the line of a warning or an error for the live view, with the time of day."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
    return f"{clock} {entry.role} {entry.level} {entry.message}"


def describe_wait(waiting: Waiting) -> str:
    """Returns what a program waits for and how long, as a phrase that follows "waits"."""
    subject = WAITS[waiting.what].format(subject=waiting.subject, have=waiting.have or 0, need=waiting.need or 0)
    return f"for {subject}" if waiting.seconds is None else f"for {subject} ({waiting.seconds:.0f} s)"


def describe_bottleneck(found: Bottleneck) -> str:
    """Returns the part that limits a run, and why."""
    figures = {name: 100 * (getattr(found, name) or 0) for name in ("share", "learner_wait_share")}
    cause = CAUSES[found.cause].format(subject=found.subject, have=found.have or 0, need=found.need or 0, **figures)
    return f"{found.part}: {cause}"


def advise(found: Bottleneck) -> str:
    """Returns what the user can try against a bottleneck, in the imperative; "" if nothing is known to help."""
    changes = {"increase": found.increase, "decrease": found.decrease}
    remedies = [f"{verb} {' or '.join(map(option, names))}" for verb, names in changes.items() if names]
    remedies += [OTHER_REMEDIES[found.cause]] if found.cause in OTHER_REMEDIES else []
    return ", or ".join(remedies)


def option(setting: str) -> str:
    """Returns the command-line option of a setting: learner.batch_size -> --learner.batch-size."""
    return "--" + setting.replace("_", "-")


_SENTENCES: dict[type[Record], Callable[[Any], str]] = {
    EndReason: describe_end,
    Waiting: lambda waiting: f"{waiting.who} waits {describe_wait(waiting)}",
    Bottleneck: lambda found: "; ".join(filter(None, (describe_bottleneck(found), advise(found)))),
    LogEntry: describe_entry,
    Failure: describe_failure,
    ProgramEvent: describe_event,
    UnitEvent: describe_unit,
    Restored: describe_restored,
    Missing: describe_missing,
    OtherVersion: describe_other_version,
    WarmStart: describe_warm_start,
}


def describe(record: Record) -> str:
    """Returns the sentence of a record."""
    return _SENTENCES[type(record)](record)
