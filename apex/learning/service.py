"""The learner service: runs the coordinator, loaders, trainer and publisher of one run until the run ends."""

import logging
import time
from functools import partial
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess

from apex.algorithms.parameters import describe, num_parameters
from apex.config import EvaluatorConfig
from apex.facts import EndReason
from apex.learning.batch_ring import BatchRing
from apex.learning.checkpoint_writer import CheckpointWriter
from apex.learning.coordinator.link import CoordinatorLink, TrainerEnd, TrainerStart
from apex.learning.coordinator.server import run_coordinator
from apex.learning.loader import LoaderTask, start_loaders
from apex.learning.loop import LearnerLoop, Reporter
from apex.learning.parameter_publisher import PublishingThread, publish_budget
from apex.learning.run_save import save_run
from apex.learning.setup import choose_device, make_trainer, prepare_torch, restore_trainer
from apex.learning.trainer import Trainer
from apex.runs.checkpoints.folder import find_latest
from apex.runs.folder import RunFolder
from apex.sentences import describe_end
from apex.transport.curve.key_store import read_keys
from apex.transport.run_codec import RunCodec
from apex.transport.timing import END_NOTICE_SECONDS
from apex.types import Role
from apexreplay.errors import FINISHED, ChildDiedError
from apexreplay.process.children import check_children, start_child, stop_children
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.endpoints import PrioritySender
from apexreplay.transport.sockets import open_context

log = logging.getLogger("apex")


def run_service(folder: RunFolder, stop: Stop) -> int:
    """Trains until the run ends or `stop` is requested. Starts from the run's newest checkpoint if there is one.

    Returns the exit status. Raises ChildDiedError if a child process dies, and DivergedError if training diverges.
    """
    config, schema, run_id = folder.config_with_keys, folder.schema, folder.run_id
    device = choose_device(config.learner)
    gpu = device.type == "cuda"
    keys = read_keys(config.transport.keys, Role.LEARNER)
    found = find_latest(folder.checkpoints)
    folder.end = None
    ring = BatchRing.configured(config.learner, config.replay.num_shards, schema, cuda=gpu)
    pipe, coordinator_pipe = Pipe()
    # Children start before this process has a ZeroMQ context, a thread or CUDA.
    coordinator = start_child("coordinator", run_coordinator, folder, folder.next_epoch(), coordinator_pipe, pipe, gpu)
    loaders = start_loaders(LoaderTask(schema, ring, run_id, config))
    coordinator_pipe.close()  # Only the child may hold this end, so that its death closes the pipe.
    prepare_torch(config.learner, device)
    codec = RunCodec(run_id, schema)
    publisher = PublishingThread(config.transport.endpoint("parameters"), codec, stop, keys, publish_budget(config))
    saves = CheckpointWriter(partial(save_run, folder))

    def connect(endpoint: str, shard: int) -> None:
        priorities.connect(endpoint, shard)
        ring.hosts[shard] = endpoint.removeprefix("tcp://").rpartition(":")[0]

    def check() -> None:
        check_children([coordinator, *loaders], config.run.stuck_seconds)
        publisher.check()
        saves.check()

    try:
        with open_context(keys) as context:
            priorities = PrioritySender(context, codec)
            trainer = make_trainer(folder, device, ring, priorities, publisher.publish)
            progress = restore_trainer(folder, trainer, found)
            link = CoordinatorLink(pipe, config.replay, connect, progress)
            network = trainer.online
            link.send(TrainerStart(num_parameters(network), trainer.num_updates, progress, describe(network)))
            reporter, save = Reporter(ring, trainer.num_updates), partial(saves.begin, trainer.snapshot)
            loop = LearnerLoop(trainer, link, reporter, config, save=save)
            log.info("run %s, folder %s, device %s", folder.path.name, folder.path, device)
            end = loop.run(stop, check)

            def tick() -> None:
                stop.tick()
                link.drain()

            saves.wait(tick)
            loop.save()
            saves.wait(tick)
            folder.end = end
            log.info("ends after %d updates: %s", trainer.num_updates, describe_end(end))
            publisher.hurry()
            _end_run(trainer, link, coordinator, config.evaluator, end, stop)
            publisher.close()
            coordinator.join(2 * END_NOTICE_SECONDS)
        return FINISHED
    except ChildDiedError:
        coordinator.join(1.0)
        # If a child refused its configuration, raises that error instead, because a restart would not help.
        check_children([coordinator, *loaders])
        raise
    finally:
        publisher.close()
        stop_children([coordinator, *loaders])
        saves.close()


def _end_run(
    trainer: Trainer,
    link: CoordinatorLink,
    coordinator: BaseProcess,
    config: EvaluatorConfig,
    end: EndReason,
    stop: Stop,
) -> None:
    """Informs the coordinator that training has ended, and waits for the evaluation of the final policy."""
    is_evaluated = config.enabled and config.final_seconds > 0 and not stop.poll()
    if is_evaluated:
        trainer.publish_newest()
        trainer.flush()  # On a GPU, the parameters are published only after the copy to the host.
    link.send(TrainerEnd(end, trainer.num_updates if is_evaluated else None))
    until = time.monotonic() + config.final_seconds
    while is_evaluated and coordinator.is_alive() and time.monotonic() < until:
        coordinator.join(POLL_SECONDS)
        if stop.poll():
            link.send(TrainerEnd(end))
            break
