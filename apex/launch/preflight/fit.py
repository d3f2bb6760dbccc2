"""Fits a run to this host before any program of it is started, or refuses it by the checks of `apex doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from apex.config import Config
from apex.config.sizing import explain, size_to_machine
from apex.errors import require
from apex.launch.preflight.checks import check_gpu, check_room, read_room, require_all
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.preflight.requirements import files_needed
from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import raise_file_limit, read_machine
from apex.runtime.ports import choose_ports, is_free
from apex.runtime.provenance import describe_versions
from apex.types import Schema

FREE_RATIO = 8.0  # samples per insert by turns, where programs would run free: a batch of 32 every 4 steps [DQN]


def fit(
    config: Config,
    schema: Schema,
    tell: Callable[[str], None],
    own: Path | None = None,
    *,
    free: Callable[[str, int], bool] = is_free,
) -> tuple[Config, list[str]]:
    """Returns the configuration with every size and free ports, and the lines that say by what arithmetic.

    Raises ConfigError with the remedy where anything is short. `tell` hears of ports that are not those that were asked
    for; `own` is the store of a run that is to go on; `free` tells whether a port of a host may be had.
    """
    cuda = read_cuda()
    machine = read_machine(cuda)
    gpu = check_gpu(config.learner.device, cuda, describe_versions()["torch"] or "")
    require_all([gpu])
    sizes = explain(config, machine, schema)
    if gpu.verdict == "warning":
        sizes.append(f"GPU: {gpu.figures}: {gpu.remedy}")
    config = choose_ports(size_to_machine(config, machine, schema), free, tell)
    require_all(check_room(config, schema, read_room(machine, cuda, find_leftovers(), own, config.learner.device)))
    raise_file_limit(files_needed(config)[0])
    return config, sizes


def fit_one_process(config: Config, schema: Schema) -> tuple[Config, list[str]]:
    """The same for a run whose roles take turns: what is left to the machine is what one core would have.

    So the curve does not depend on how many cores there are. What a mode without clocks, children and sockets has no
    use for is set to what holds, so that the run folder says what was run.
    """
    require(
        config.learner.device != "cuda",
        "--single-process computes on the processor, where one thread gives one result; leave --device cuda out",
    )
    require(
        config.replay.num_shards == 1,
        f"--single-process has one replay memory, got replay.num_shards {config.replay.num_shards}",
    )
    cuda = read_cuda()
    config = replace(config, learner=replace(config.learner, device="cpu", num_loaders=1))
    machine = replace(read_machine(cuda), cores=1, gpu=False)
    sized = size_to_machine(config, machine, schema)
    actor, replay, learner = sized.actor, sized.replay, sized.learner
    sized = replace(
        sized,
        actor=replace(actor, num_processes=1, envs_per_process=actor.num_actors, num_threads=1),
        replay=replace(replay, samples_per_insert=replay.samples_per_insert or FREE_RATIO, inserts_wait=True),
        learner=replace(learner, num_threads=1, publish_seconds=0.0),
        evaluator=replace(sized.evaluator, num_threads=1),
        checkpoint=replace(sized.checkpoint, replay=False),
        run=replace(sized.run, tensorboard=False),
    )
    require_all(check_room(sized, schema, read_room(machine, cuda, find_leftovers(), None, "cpu")))
    evaluations = f"games to be scored every {sized.evaluator.period_updates:,} updates"
    actors = f"{actor.num_actors} actor{'s' * (actor.num_actors != 1)}"
    return sized, [
        f"one process, one thread, by turns: {actors}, batches of {learner.batch_size}, "
        f"{sized.replay.samples_per_insert:g} samples per insert",
        f"  parameters go to the actors every {learner.publish_period} updates, which look every "
        f"{actor.parameters_period} steps; {evaluations if sized.evaluator.enabled else 'no games to be scored'}",
    ]
