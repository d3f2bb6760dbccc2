"""Records of learning runs."""

from dataclasses import replace

from bench.learning.records import Record, RecordedScore
from bench.learning.tasks import TASKS

MACHINE = {"cores": 2, "cpu": "AMD EPYC", "memory_bytes": 24 * 2**30, "gpus": []}
SCORE = RecordedScore(mean=8.0, median=8.0, interval=(8.0, 8.0), episodes=2, epsilon=0.001, seed=7, scores=[8.0, 8.0])


def make_record(task="cartpole", system="apex", seed=1, *, mean=490.0, seconds=15.0, **changes):
    score = RecordedScore(
        mean=mean, median=mean, interval=(mean, mean), episodes=2, epsilon=0.001, seed=7, scores=[mean, mean]
    )
    record = Record(
        task=task,
        system=system,
        seed=seed,
        command=f"apex train --preset {task} --seed {seed} --max-minutes 3",
        score=score,
        reached=TASKS[task].reached(mean, seconds),
        seconds=seconds,
        steps=1000,
        updates=100,
        date="2026-01-02T03:04:05+00:00",
        commit="0123456789abcdef",
        dirty=False,
        load=0.1,
        machine=MACHINE,
        versions={"apex": "0.1.0"},
        settings={},
    )
    return replace(record, **changes)
