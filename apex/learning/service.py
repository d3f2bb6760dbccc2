"""The learner service: coordinator, loaders, trainer and publisher of one run, until it ends."""

from __future__ import annotations

import logging
from multiprocessing import Pipe

from apex.dqn.networks import num_parameters
from apex.learning.batch_ring import BatchRing
from apex.learning.coordinator.link import CoordinatorLink, TrainerEnd, TrainerStart
from apex.learning.coordinator.server import run_coordinator
from apex.learning.loader import LoaderTask, start_loaders
from apex.learning.loop import LearnerLoop, Reporter
from apex.learning.parameter_publisher import PublishingThread
from apex.learning.setup import choose_device, make_trainer, prepare_torch, restore_trainer, save_checkpoint
from apex.runs.checkpoints.folder import find_latest
from apex.runs.folder import RunFolder
from apex.runtime.children import ChildDiedError, check_children, start_child, stop_children
from apex.runtime.lifecycle import FINISHED, Stop
from apex.transport.codec import Codec
from apex.transport.curve.key_store import read_keys
from apex.transport.endpoints import PrioritySender
from apex.transport.sockets import open_context
from apex.transport.timing import END_NOTICE_SECONDS
from apex.types import Role

log = logging.getLogger("apex")


def run_service(folder: RunFolder, stop: Stop) -> int:
    """Trains until the run ends or `stop` is requested, from its newest checkpoint if there is one.

    Returns the exit status. Raises ChildDiedError when the coordinator or a loader dies, and DivergedError.
    """
    config, schema, run_id = folder.config, folder.schema, folder.run_id
    device = choose_device(config.learner)
    keys = read_keys(config.transport.keys, Role.LEARNER)
    found = find_latest(folder.checkpoints)
    ring = BatchRing.configured(config.learner, config.replay.num_shards, schema, cuda=device.type == "cuda")
    pipe, coordinator_pipe = Pipe()
    # Children start before this process has a ZeroMQ context, a thread or CUDA.
    coordinator = start_child("coordinator", run_coordinator, folder, folder.next_epoch(), coordinator_pipe, pipe)
    loaders = start_loaders(LoaderTask(schema, ring, run_id, config))
    coordinator_pipe.close()  # Its other end: who dies is noticed.
    prepare_torch(config.learner, device)
    codec = Codec(run_id, schema)
    publisher = PublishingThread(config.transport.endpoint("parameters"), codec, stop, keys)

    def check() -> None:
        check_children([coordinator, *loaders], config.run.stuck_seconds)
        publisher.check()

    try:
        with open_context(keys) as context:
            priorities = PrioritySender(context, codec)
            trainer = make_trainer(folder, device, ring, priorities, publisher.publish)
            progress = restore_trainer(folder, trainer, found)
            link = CoordinatorLink(pipe, config.replay, priorities.connect, progress)
            link.send(TrainerStart(num_parameters(trainer.online), trainer.num_updates, progress))
            loop = LearnerLoop(
                trainer,
                link,
                Reporter(ring),
                config,
                save=lambda progress: save_checkpoint(folder, trainer, progress),
            )
            log.info("run %s, folder %s, device %s", folder.path.name, folder.path, device)
            reason = loop.run(stop, check)
            loop.save()
            log.info("ends after %d updates: %s", trainer.num_updates, reason)
            publisher.close()
            link.send(TrainerEnd(reason))
            coordinator.join(2 * END_NOTICE_SECONDS)
        return FINISHED
    except ChildDiedError:
        coordinator.join(1.0)
        check_children([coordinator, *loaders])  # If one refused, so does the learner: to start it again is no use.
        raise
    finally:
        publisher.close()
        stop_children([coordinator, *loaders])
