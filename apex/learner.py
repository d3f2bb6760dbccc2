"""The learner: trains on what the samplers send, publishes parameters, returns priorities by key.

`apex learner` also keeps the run: it owns the run folder, the configuration, the control socket (its coordinator
process) and the curves. It is the only address that everybody must know.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from apex.allocator import keep_freed_memory
from apex.bad_batches import BadBatches
from apex.checkpoint_folder import Found, find_latest, set_aside
from apex.config import ConfigError, LearnerConfig, require
from apex.coordinator import FAREWELL_SECONDS, Desk, coordinate
from apex.environment import describe, kind
from apex.key_folder import read_keys
from apex.learner_loop import DivergedError, LearnerLoop, send
from apex.lifecycle import FAILED, FINISHED, HOPELESS, REFUSED, Stop, complain, configure_logging, stop_on_signals
from apex.loader import load
from apex.machine import read_machine
from apex.networks import make_network, num_parameters
from apex.options import parse_config
from apex.processes import ChildDiedError, call_in_child, check_children, start_child, stop_children
from apex.publishing import PublishingThread
from apex.run_folder import RunFolder
from apex.run_lock import hold
from apex.sample_ring import SampleRing
from apex.saves import NotFiniteError, save_run
from apex.sizing import size_to_machine
from apex.sockets import open_context
from apex.trainer import Priorities, Samples, Trainer
from apex.transport import PrioritySender
from apex.types import Parameters, Progress
from apex.wire import Codec

log = logging.getLogger("apex")


def choose_device(config: LearnerConfig) -> torch.device:
    """The configured device; raises ConfigError for CUDA where there is none: never a silent CPU.

    Torch is asked in a child: to ask is to begin with CUDA, and who has begun cannot fork another that uses it.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    (sees_gpu,) = call_in_child("device", lambda stop: {"gpu": torch.cuda.is_available()}, Stop()).values()
    if config.device == "cuda" and not sees_gpu:
        raise ConfigError("--device cuda, but torch sees no GPU here: use --device cpu, or mend the driver")
    return torch.device("cuda" if sees_gpu else "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """`apex learner`: the composition root."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    configure_logging("learner")
    try:
        with stop_on_signals() as stop:
            folder = open_run(arguments)
            with hold(folder.path, or_parent=True):  # The launcher holds it for the learner that it has started.
                return _run(folder, stop)
    except ConfigError as error:
        complain(f"apex learner: {error}")
        return REFUSED
    except DivergedError as error:
        log.error("%s", error)
        return HOPELESS
    except ChildDiedError as error:
        log.error("%s", error)
        return FAILED


def open_run(arguments: list[str]) -> RunFolder:
    """The run that `--run-folder` names, as the launcher made it; or a new one, by the other options."""
    if "--run-folder" in arguments:
        at = arguments.index("--run-folder")
        if len(arguments) < at + 2:
            raise ConfigError("--run-folder needs a folder")
        return RunFolder.open(Path(arguments[at + 1]))
    config = parse_config(arguments, prog="apex learner", description="Trains on what actors send.", kind=kind)
    require(not config.run.single_process, "--single-process is a whole run in one process: apex train starts it")
    schema = describe(config.environment, config.actor.n_step)
    return RunFolder.create(size_to_machine(config, read_machine(), schema), schema, argv=arguments)


def _run(folder: RunFolder, stop: Stop) -> int:
    config, device = folder.config, choose_device(folder.config.learner)
    keys = read_keys(config.transport.keys, "learner")
    found = find_latest(folder.checkpoints)
    ring = SampleRing.configured(config, folder.schema, cuda=device.type == "cuda")
    pipe, coordinator_pipe = Pipe()
    coordinator, loaders = _start_children(folder, ring, coordinator_pipe, pipe)
    coordinator_pipe.close()  # Its other end: who dies is noticed.
    prepare_torch(config.learner, device)
    codec = Codec(folder.run_id, folder.schema)
    publisher = PublishingThread(config.transport.endpoint("parameters"), codec, stop, keys)

    def check() -> None:
        check_children([coordinator, *loaders], config.run.stuck_seconds)
        publisher.check()

    try:
        with open_context(keys) as context:
            priorities = PrioritySender(context, codec)
            trainer = make_trainer(folder, device, ring, priorities, publisher.publish)
            progress = _go_on(folder, trainer, found)
            start = {"num_parameters": num_parameters(trainer.online), "updates": trainer.num_updates}
            send(pipe, {**start, "progress": progress._asdict()})
            loop = LearnerLoop(
                config,
                trainer,
                pipe,
                connect=priorities.connect,
                save=lambda progress: save_checkpoint(folder, trainer, progress),
                loaders=ring.loaders,
                progress=progress,
                num_refused=lambda: int(ring.refused[0]),
            )
            log.info("run %s, folder %s, device %s", folder.path.name, folder.path, device)
            reason = loop.run(stop, check)
            loop.save()
            log.info("ends after %d updates: %s", trainer.num_updates, reason)
            publisher.close()
            send(pipe, {"finished": reason})
            coordinator.join(2 * FAREWELL_SECONDS)
        return FINISHED
    except ChildDiedError:
        coordinator.join(1.0)
        check_children([coordinator, *loaders])  # If one refused, so does the learner: to start it again is no use.
        raise
    finally:
        publisher.close()
        stop_children([coordinator, *loaders])


def _start_children(
    folder: RunFolder, ring: SampleRing, pipe: Connection, trainer_end: Connection
) -> tuple[BaseProcess, list[BaseProcess]]:
    """The coordinator and the loaders: before this process has a ZeroMQ context, a thread or CUDA."""
    config, schema, run_id = folder.config, folder.schema, folder.run_id
    desk = Desk(config, schema, run_id, config.actor.num_actors, folder.next_epoch(), folder.path)
    coordinator = start_child("coordinator", coordinate, desk, pipe, trainer_end)
    loaders = [
        start_child(f"loader-{index}", load, index, config, schema, ring, run_id)
        for index in range(max(1, config.learner.num_loaders))
    ]
    return coordinator, loaders


def prepare_torch(config: LearnerConfig, device: torch.device) -> None:
    """Sets this process up as a learner's: its threads (see also `make_update`), its stream or its allocator."""
    torch.set_num_threads(max(1, config.num_threads))
    if device.type == "cuda":
        # A graph cannot be captured on the default one.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    else:
        keep_freed_memory()


def make_trainer(
    folder: RunFolder,
    device: torch.device,
    samples: Samples,
    priorities: Priorities,
    publish: Callable[[Parameters], None],
) -> Trainer:
    """The run's trainer, before its first update."""
    config, schema = folder.config, folder.schema
    online, target = (make_network(config.network, schema, seed=config.seed) for _ in range(2))
    return Trainer(
        config.learner,
        online,
        target,
        device=device,
        samples=samples,
        priorities=priorities,
        publish=publish,
        keep_skipped=BadBatches(folder.path).keep,
    )


def _go_on(folder: RunFolder, trainer: Trainer, found: Found) -> Progress:
    """Takes up the newest checkpoint that is whole, if there is one; returns how far the run was."""
    if found.state is None:
        return Progress(elapsed_seconds=folder.elapsed_seconds)
    trainer.restore(found.state._asdict())
    try:
        set_aside(folder.checkpoints, found)
    except OSError as error:
        log.error("what is damaged in %s stays where it is: %s", folder.checkpoints, error)
    log.info("goes on at update %d", trainer.num_updates)
    progress = found.state.progress
    return progress._replace(elapsed_seconds=max(progress.elapsed_seconds, folder.elapsed_seconds))


def save_checkpoint(folder: RunFolder, trainer: Trainer, progress: Progress) -> None:
    """Writes one, as far as the disk takes it; raises DivergedError for a network that is not finite."""
    try:
        if save_run(folder.checkpoints, folder.config, folder.schema, trainer.state(), progress) is not None:
            folder.note_saved()
    except NotFiniteError as error:
        raise DivergedError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
