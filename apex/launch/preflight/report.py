"""The result of a check, and the sentences that `apex doctor` and `apex train` print about checks and sizes."""

from collections.abc import Iterable
from typing import Literal

from apex.config import RunConfig
from apex.sentences import plural
from apex.sizing import Sized
from apexreplay.errors import UsageError
from apexreplay.facts import Record
from apexreplay.process.text import size

Verdict = Literal["ok", "warning", "short"]


class Check(Record, frozen=True):
    """One row of the report: what the host has, and what a run needs. A condition counts 1 if it holds, else 0."""

    name: str
    have: float
    need: float = 0  # a run with less cannot start
    want: float = 0  # a run with less is slow or in danger
    unit: Literal["", "bytes", "cores", "environments", "files", "transitions"] = ""  # "": a condition
    note: str = ""  # what was counted
    remedy: str = ""  # what to type or to set if the host has too little

    @property
    def verdict(self) -> Verdict:
        """Whether the host has enough. short: training cannot start."""
        return "short" if self.have < self.need else "warning" if self.have < self.want else "ok"


def describe_check(check: Check) -> str:
    """Returns the figures of a check, without its name and remedy."""
    if not check.unit:
        return check.note
    have, need, want = (size(n) if check.unit == "bytes" else f"{n:,g}" for n in (check.have, check.need, check.want))
    figures = have if check.unit == "bytes" else f"{have} {check.unit}"
    figures += f", required {need}" if check.need else ""
    figures += f", recommended {want}" if check.want else ""
    return f"{figures} ({check.note})" if check.note else figures


def require_all(checks: Iterable[Check]) -> None:
    """Raises UsageError, with the figures and remedies of all checks whose verdict is short, if there are any."""
    short = [check for check in checks if check.verdict == "short"]
    if short:
        problems = (f"{check.name}: {describe_check(check)}" for check in short)
        raise UsageError("; ".join(problems), "; ".join(check.remedy for check in short))


def describe_limits(run: RunConfig) -> str:
    """Returns what ends a run by itself."""
    limits = {"{:,} steps": run.max_steps, "{:,} updates": run.max_updates, "{:g} min": run.max_minutes}
    named = [] if run.stop_score is None else [f"score {run.stop_score:g}"]
    named += [text.format(limit) for text, limit in limits.items() if limit]
    return f"limits: {' or '.join(named) or 'none; Ctrl-C ends the run'}"


def describe_sizes(sized: Sized) -> list[str]:
    """Returns the sizes that were chosen for this machine, and the reasons, as lines of text."""
    config, machine = sized.config, sized.machine
    actor, learner, replay = config.actor, config.learner, config.replay
    cores = plural(machine.cores, "core")
    processes, envs = plural(actor.num_processes, "process"), plural(actor.envs_per_process, "environment")
    busy = sized.busy_cores / max(1, sized.actor_cores)
    waiting = f", expected to be busy {busy:.0%} of the time" if busy < 1 and not sized.on_gpu else ""
    where = "on other hosts" if config.run.head else f"in {processes} x {envs}"
    asked = sized.asked.actor.num_actors, sized.asked.learner.batch_size
    by_actors, by_batch = ("" if setting else " (chosen for this machine)" for setting in asked)
    lines = [
        f"machine: {cores}, {size(machine.memory_bytes)} of memory, {'a' if machine.gpu else 'no'} GPU",
        f"actors: {actor.num_actors:,}{by_actors}, {where}",
        f"learner: {'GPU, ' if sized.on_gpu else ''}{plural(learner.num_threads, 'thread')}; actors use "
        f"{plural(sized.actor_cores, 'core')}{waiting}; replay, {plural(learner.num_loaders, 'loader')} and evaluator "
        f"share the rest of {cores}",
        f"  batches of {learner.batch_size}{by_batch}; {_describe_format(sized)}",
        f"replay: {size(replay.max_bytes)} of frames + {size(sized.table_bytes)} of records and sum-tree = "
        f"{(replay.max_bytes + sized.table_bytes) / sized.replay_host_bytes:.0%} of memory, "
        f"in {plural(replay.num_shards, 'shard')}",
        f"  frames take about {sized.transition_bytes:,} bytes per transition; replay.capacity is {replay.capacity:,}; "
        f"updates begin at {replay.min_size_to_sample:,} transitions",
    ]
    if sized.idle is not None:
        options = {"batch_size": "--learner.batch-size", "num_actors": "--actors"}
        setting = options.get(sized.idle.limit, "--replay.capacity or --actors")
        lines.insert(4, f"  about {sized.idle.cores} of {cores} are idle; raise {setting} to use them")
    return lines


def _describe_format(sized: Sized) -> str:
    device, on = "GPU" if sized.on_gpu else "CPU", sized.config.learner.bfloat16 == "on"
    reason = {
        "configured": "",
        "supported": f": this {device} supports it",
        "unsupported": f": this {device} does not support bfloat16",
        "emulated": f", which is slow on this {device}: set --learner.bfloat16 off",
        "small_network": ": bfloat16 is slower for a network of this size",
        "small_critics": ": policy and critics are too small to gain from bfloat16",
    }[sized.format]
    return ("bfloat16" if on else "float32") + reason
