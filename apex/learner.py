"""The learner: trains on what the samplers send, publishes parameters, returns priorities by key.

`apex learner` also keeps the run: it owns the run folder, the configuration, the control socket (its coordinator
process) and the curves. It is the only address that everybody must know.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from multiprocessing import Pipe

from apex.checkpoint_folder import find_latest
from apex.coordinator import FAREWELL_SECONDS
from apex.errors import ConfigError
from apex.key_folder import read_keys
from apex.learner_loop import DivergedError, LearnerLoop, send
from apex.learner_setup import (
    choose_device,
    make_trainer,
    open_run,
    prepare_torch,
    restore,
    save_checkpoint,
    start_children,
)
from apex.lifecycle import FAILED, FINISHED, HOPELESS, REFUSED, Stop, complain, configure_logging, stop_on_signals
from apex.networks import num_parameters
from apex.processes import ChildDiedError, check_children, stop_children
from apex.publishing import PublishingThread
from apex.run_folder import RunFolder
from apex.run_lock import hold
from apex.sample_ring import SampleRing
from apex.sockets import open_context
from apex.transport import PrioritySender
from apex.wire import Codec

log = logging.getLogger("apex")


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


def _run(folder: RunFolder, stop: Stop) -> int:
    config, device = folder.config, choose_device(folder.config.learner)
    keys = read_keys(config.transport.keys, "learner")
    found = find_latest(folder.checkpoints)
    ring = SampleRing.configured(config, folder.schema, cuda=device.type == "cuda")
    pipe, coordinator_pipe = Pipe()
    coordinator, loaders = start_children(folder, ring, coordinator_pipe, pipe)
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
            progress = restore(folder, trainer, found)
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


if __name__ == "__main__":
    sys.exit(main())
