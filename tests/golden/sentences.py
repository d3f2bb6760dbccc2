"""Writes one example of each record's sentence: `.venv/bin/python -m tests.golden.sentences`."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from apex import sentences
from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig
from apex.facts import (
    Bottleneck,
    Cause,
    EndKind,
    EndReason,
    Failure,
    FailureKind,
    LogEntry,
    LossCause,
    Missing,
    OtherVersion,
    Part,
    ProgramEvent,
    Restored,
    RestoreSource,
    UnitEvent,
    UnitEventKind,
    WarmStart,
)
from apex.launch.preflight.report import Check, describe_check, describe_limits, describe_sizes
from apex.runtime.hardware import Machine
from apex.schema import Schema
from apex.sizing import size_to_machine
from apexreplay.facts import Record, Waiting, WaitKind

GOLDEN = Path(__file__).with_suffix(".txt")
NOON = time.mktime((2025, 1, 31, 12, 0, 0, 0, 0, -1))
FAILURE = Failure(role="actor", kind="exit", value=1, detail="12:00:00 actor ERROR lost", log="logs/actor.log")
PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
CHECKS = (
    Check("GPU", 0, 1, note="no GPU was found", remedy="use --device cpu"),
    Check("cores", 1.5, want=2, unit="cores", note="the host has 8", remedy="use two or more cores"),
    Check("free memory", 2**34, 2**20, 2**30, unit="bytes"),
    Check("open files", 4_096, 64, unit="files"),
)
SIZED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cpu", {"replay": ReplayConfig(capacity=200_000, samples_per_insert=8.0, inserts_wait=True, num_shards=2)}),
    ("auto", {"replay": ReplayConfig(capacity=100_000)}),
    ("auto", {"run": RunConfig(head=True), "actor": ActorConfig(num_actors=64)}),
)


def examples() -> Iterator[Record]:
    """Each record of `apex.facts` that has a sentence, with each of its kinds."""
    for end in get_args(EndKind):
        yield EndReason(end, 475.0 if EndReason(end).is_limit else None)
    yield EndReason("callback", detail="no better score")
    for wait in get_args(WaitKind):
        yield Waiting(wait, "replay-1", 400, 50_000, "actor 7", 12.0)
    yield Waiting("receipts", who="actor")
    for cause in get_args(Cause):
        figures = {"share": 0.9, "learner_wait_share": 0.5, "have": 9.0, "need": 12.0, "subject": "replay-1"}
        yield Bottleneck(part=get_args(Part)[0], cause=cause, **figures)
    increase = ("actor.num_processes", "replay.samples_per_insert")
    yield Bottleneck(part="learner", cause="busy_learner", increase=increase, decrease=("learner.batch_size",))
    yield LogEntry(time=NOON, role="replay", level="WARNING", message="message")
    for failure in get_args(FailureKind):
        yield Failure(role="actor", kind=failure, value=9, times=2, detail="detail", log="logs/actor.log", unit="head")
    for event in get_args(get_type_hints(ProgramEvent)["kind"]):
        yield ProgramEvent("actor", event, 2.5, FAILURE)
    yield ProgramEvent("actor", "restarting", failure=FAILURE)
    for unit in get_args(UnitEventKind):
        places = {"host": "gpu1", "address": "10.0.0.7:21001", "tensorboard": "10.0.0.7:6006"}
        yield UnitEvent(
            unit="actor-1",
            kind=unit,
            cpus=4,
            memory=2**30,
            gpu=True,
            free_cpus=2,
            total_cpus=8,
            failure=FAILURE,
            **places,
        )
    for source in get_args(RestoreSource):
        for part, other in (("learner", 0), ("replay 1", 8)):
            yield Restored(part=part, source=source, number=7, size=400, path="p", other_number=other, other_size=9)
    yield Restored(part="learner", source="checkpoint", number=7, size=400, lost=1_234)
    yield Missing(transitions=4_000, of=9_000, causes=())
    for loss in get_args(LossCause):
        yield Missing(transitions=4_000, of=9_000, causes=(loss,))
    yield OtherVersion("0.1.0", "0.2.0")
    yield WarmStart(path="runs/one/checkpoints/best.safetensors", updates=12_000, copied=12)
    yield WarmStart(path="best.safetensors", updates=1, copied=1, others=("output.weight", "output.bias"))


def render() -> str:
    """Returns the sentences, one per line."""
    lines = [f"{type(record).__name__}: {sentences.describe(record)}" for record in examples()]
    lines += [f"phase: {text}" for text in sentences.PHASES.values()]
    lines += [f"outcome: {sentences.describe_outcome(None, running=running)}" for running in (True, False)]
    lines += [f"disk: {sentences.describe_disk('runs/x', flaw)}" for flaw in ("", "is full")]
    lines += [f"check: {check.name}: {check.verdict}: {describe_check(check)}" for check in CHECKS]
    limits = RunConfig(stop_score=0.0, max_steps=2_000_000, max_updates=300, max_minutes=0.5)
    lines += [describe_limits(run) for run in (RunConfig(), RunConfig(max_minutes=30), limits)]
    for device, fields in SIZED:
        config = Config(learner=LearnerConfig(bfloat16="auto", device=device), **fields)
        machine = Machine(cores=64, memory_bytes=2**39, gpu=True, cpu_bfloat16=True)
        lines += [f"sizes: {line}" for line in describe_sizes(size_to_machine(config, machine, PIXELS))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(render())
