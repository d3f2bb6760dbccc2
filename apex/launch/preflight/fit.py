"""Chooses a run's sizes for this host before any program starts. Refuses the run if a check of `apex doctor` fails."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from apex.config import Config
from apex.launch.preflight.checks import check_gpu, check_kept, check_room, check_sizes, read_room
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.preflight.report import describe_check, describe_sizes, require_all
from apex.launch.preflight.requirements import files_needed
from apex.runtime.gpu import read_cuda
from apex.runtime.hardware import Machine, raise_file_limit, read_machine
from apex.runtime.ports import OFFSET_STEP, choose_ports, is_free, ports
from apex.runtime.provenance import describe_versions
from apex.schema import Schema
from apex.sentences import plural
from apex.sizing import Sized, size_to_machine
from apex.transport.curve.key_store import read_keys
from apex.transport.hello import advertised_host
from apex.types import Role
from apexreplay.errors import UsageError, require

# Samples per insert of a single-process run if no ratio is configured: a batch of 32 every 4 steps, as in DQN.
FREE_RATIO = 8.0


def fit(
    config: Config,
    schema: Schema,
    tell: Callable[[str], None],
    own: Path | None = None,
    *,
    free: Callable[[str, int], bool] = is_free,
) -> tuple[Config, list[str]]:
    """Returns the configuration with all sizes and free ports, and lines that explain how each size was computed.

    Raises UsageError, which has the remedies, if any check is short. `tell` is called with a sentence for each port
    that differs from the configured one. `own` is the replay memory file of a run that is to be resumed.
    `free(host, port)` returns whether a port is free.
    """
    cuda = read_cuda()
    machine, leftovers = read_machine(cuda), find_leftovers(own)
    checks = [check_gpu(config.learner.device, cuda, describe_versions()["torch"] or "")]
    require_all(checks)
    sized = size_beside(leftovers.kept, config, machine, schema)
    config = choose_ports(sized.config, free, tell)
    room = read_room(machine, cuda, leftovers, own, config.learner.device)
    checks += [*check_sizes(sized), *check_room(config, schema, room), check_kept(leftovers.kept)]
    require_all(checks)
    raise_file_limit(files_needed(config))
    warnings = [check for check in checks if check.verdict == "warning"]
    return config, [
        *describe_sizes(sized),
        *(f"warning: {check.name}: {describe_check(check)} -> {check.remedy}" for check in warnings),
    ]


def size_beside(kept: Mapping[Path, int], config: Config, machine: Machine, schema: Schema) -> Sized:
    """Chooses sizes as `size_to_machine`, so that the kept memories of killed runs can stay if that is possible."""
    with suppress(UsageError):
        rest = replace(machine, memory_bytes=machine.memory_bytes - sum(kept.values()))
        return size_to_machine(config, rest, schema)._replace(machine=machine)
    return size_to_machine(config, machine, schema)


def require_head(config: Config) -> None:
    """Raises UsageError if actors on other hosts could not join a run with --head."""
    actors, bind = config.actor.num_actors, config.transport.bind
    require(actors > 0, "--head needs --actors N", remedy="set the total number of actors on all hosts")
    require(not config.run.single_process, "--head and --single-process exclude each other", remedy="leave one out")
    try:
        advertised_host(config.transport)
    except OSError as error:
        remedy = "set --transport.advertise to a name or an address of this host that the actor hosts can reach"
        raise UsageError(f"--transport.bind {bind}: this host has no route to other hosts ({error})", remedy) from error


def require_announced_ports(config: Config) -> None:
    """Raises UsageError if a port of a run with --head is taken, because users type it on the hosts of the actors."""
    bind, offset = config.transport.bind, config.transport.port_offset
    taken = [port for port in ports(config) if not is_free(bind, port)] if config.run.head else []
    problem = f"--head: port {min(taken, default=0)} of {bind} is in use"
    remedy = f"stop the run that uses it, or choose other ports with --transport.port-offset {offset + OFFSET_STEP}"
    require(not taken, problem, remedy=remedy)


def require_keys(config: Config) -> None:
    """Raises UsageError if the keys of any program of the run are missing or cannot be used."""
    for role in Role:
        read_keys(config.transport.keys, role)


def fit_one_process(config: Config, schema: Schema) -> tuple[Config, list[str]]:
    """Does the same as `fit` for a run in one process. Sizes that are not configured are chosen for one CPU core.

    Therefore the curve does not depend on the number of cores. Settings that affect only runs of several processes
    are set to the values that one process has, so that the run folder records what was run.
    """
    require(
        config.learner.device != "cuda",
        "--single-process computes on the CPU, where one thread gives reproducible results",
        remedy="leave out --device cuda",
    )
    require(
        config.replay.num_shards == 1,
        f"--single-process allows replay.num_shards 1 only, got {config.replay.num_shards}",
    )
    cuda, leftovers = read_cuda(), find_leftovers()
    config = replace(config, learner=replace(config.learner, device="cpu", num_loaders=1))
    machine = replace(read_machine(cuda), cores=1, gpu=False)
    sized = size_beside(leftovers.kept, config, machine, schema).config
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
    require_all(check_room(sized, schema, read_room(machine, cuda, leftovers, None, "cpu")))
    evaluations = f"evaluations every {sized.evaluator.period_updates:,} updates"
    return sized, [
        f"one process, one thread: {plural(actor.num_actors, 'actor')}, batches of {learner.batch_size}, "
        f"{sized.replay.samples_per_insert:g} samples per insert",
        f"  parameters are published every {learner.publish_period} updates, and loaded by the actors every "
        f"{actor.parameters_period} steps; {evaluations if sized.evaluator.enabled else 'no evaluations'}",
    ]
