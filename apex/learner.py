"""The learner: trains on what the samplers send, publishes parameters, returns priorities by key.

`apex learner` also keeps the run: it owns the run folder, the configuration, the control socket (its coordinator
process) and the curves. It is the only address that everybody must know.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from apex.allocator import keep_freed_memory
from apex.checkpoint import load_latest, prune, save
from apex.config import Config, ConfigError, LearnerConfig
from apex.coordinator import FAREWELL_SECONDS, Desk, coordinate
from apex.environment import describe, kind
from apex.lifecycle import (
    FAILED,
    FINISHED,
    POLL_SECONDS,
    REFUSED,
    Helper,
    Stop,
    Wait,
    configure_logging,
    stop_on_signals,
)
from apex.loader import NUM_SLOTS, SampleRing, load
from apex.machine import read_machine
from apex.networks import make_network, num_parameters
from apex.options import parse_config
from apex.processes import ChildDiedError, check_children, start_child, stop_children
from apex.run_folder import RunFolder
from apex.sizing import size_to_machine
from apex.trainer import Trainer
from apex.transport import ParameterPublisher, PrioritySender, open_context
from apex.types import Parameters
from apex.wire import Codec

log = logging.getLogger("apex")

REPORT_SECONDS = 1.0  # between two reports to the coordinator


class DivergedError(RuntimeError):
    """The loss is not finite any more."""


class PublishingThread:
    """Owns the parameters' socket, so that newcomers are answered also during a long gradient step."""

    def __init__(self, endpoint: str, codec: Codec, stop: Stop) -> None:
        self._endpoint = endpoint
        self._codec = codec
        self._newest: Parameters | None = None
        self._closing = False
        self._helper = Helper("parameters", self._run, stop)
        self._helper.start()

    def publish(self, parameters: Parameters) -> None:
        """Publishes these next; what was not yet published is skipped."""
        self._newest = parameters

    def check(self) -> None:
        """Raises what ended the thread, if anything did."""
        self._helper.check()

    def close(self) -> None:
        """Publishes what is newest, and ends."""
        self._closing = True
        self._helper.join(2.0)

    def _run(self) -> None:
        published: Parameters | None = None
        with open_context() as context:
            publisher = ParameterPublisher(context, self._endpoint, self._codec)
            while True:
                closing = self._closing
                newest = self._newest
                if newest is not None and newest is not published:
                    publisher.publish(newest)
                    published = newest
                if closing:
                    return
                publisher.serve(0.02)


class Reporter:
    """Rates and means since the last report, for the coordinator."""

    def __init__(self, pipe: Connection, batch_size: int, loader_seconds: NDArray[np.float64]) -> None:
        """`loader_seconds`: float64[L], what each loader has worked, see `loader.SampleRing`."""
        self._pipe = pipe
        self._batch_size = batch_size
        self._loader_seconds = loader_seconds
        self._since = time.monotonic()
        self._updates = 0
        self._waited = 0.0
        self._loaded = loader_seconds.copy()

    def due(self) -> bool:
        """Whether a second has passed."""
        return time.monotonic() - self._since >= REPORT_SECONDS

    def report(self, trainer: Trainer, **more: Any) -> None:
        """Sends a report and starts the next interval."""
        now = time.monotonic()
        seconds = now - self._since
        rate = (trainer.num_updates - self._updates) / seconds
        loaded = self._loader_seconds.copy()
        figures = {} if trainer.figures is None else trainer.figures._asdict()
        message = {
            "updates": trainer.num_updates,
            "updates_per_second": rate,
            "samples_per_second": rate * self._batch_size,
            "wait_share": min(1.0, (trainer.wait_seconds - self._waited) / seconds),
            "loader_busy_share": min(1.0, float((loaded - self._loaded).max()) / seconds),  # of the busiest
            "policy_lag": trainer.policy_lag,
            **{name: float(value) for name, value in figures.items()},
            **more,
        }
        self._since, self._updates, self._waited, self._loaded = now, trainer.num_updates, trainer.wait_seconds, loaded
        _send(self._pipe, message)


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    try:
        pipe.send_bytes(json.dumps(message).encode())
    except BrokenPipeError as error:
        raise ChildDiedError("the coordinator process is gone") from error


class LearnerLoop:
    """Train, report, save, until something says enough."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        pipe: Connection,
        *,
        connect: Callable[[str, int], None],
        save: Callable[[int], None],
        loader_seconds: NDArray[np.float64],
        num_refused: Callable[[], int] = lambda: 0,
    ) -> None:
        """`connect` is told where the priorities of a shard go; `save` writes a checkpoint, and is told the steps.

        `num_refused` says how many messages that were no batches the loaders have refused.
        """
        self.num_steps = 0  # stored by the replay server, as far as is known here
        self._config = config
        self._trainer = trainer
        self._pipe = pipe
        self._connect = connect
        self._save = save
        self._num_refused = num_refused
        self._reporter = Reporter(pipe, config.learner.batch_size, loader_seconds)
        replay = config.replay
        self._priorities = [""] * replay.num_shards  # endpoints by shard
        self._absent = ", ".join(map(replay.shard_name, range(replay.num_shards)))  # servers that are not there
        self._wait = Wait("learner")

    def run(self, stop: Stop, check: Callable[[], None]) -> str:
        """Trains until stopped; returns why it ended. `check` raises what a child or a thread has run into."""
        trainer, config = self._trainer, self._config
        trainer.begin()
        while True:
            if trainer.step(POLL_SECONDS):
                self._wait.over()
                if trainer.num_updates % config.checkpoint.period == 0:
                    self._save(self.num_steps)
            else:
                few = "batches: a replay server has fewer transitions than its share of replay.min_size_to_sample"
                self._wait.on(f"{self._absent} to say hello" if self._absent else few)
            reason = self._hear()
            if stop.requested:
                reason = reason or "interrupted"
            if 0 < config.run.max_updates <= trainer.num_updates:
                reason = reason or f"reached {config.run.max_updates} updates"
            if reason or self._reporter.due():
                check()
                self._check_loss()
                self._reporter.report(trainer, waiting=self._wait.reason, refused_batches=self._num_refused())
            if reason:
                trainer.flush()
                return reason

    def _hear(self) -> str:
        """Takes the coordinator's news; returns why the run should end, if it should."""
        reason = ""
        while self._pipe.poll():
            try:
                news = json.loads(self._pipe.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise ChildDiedError("the coordinator process is gone") from error
            for shard, endpoints in enumerate(news["replay"]):
                endpoint = endpoints.get("priorities", "")
                if endpoint and endpoint != self._priorities[shard]:
                    self._priorities[shard] = endpoint
                    self._connect(endpoint, shard)
            self._absent = news["absent"]
            self.num_steps = news["steps"]
            reason = news["end"]
        return reason

    def _check_loss(self) -> None:
        figures = self._trainer.figures
        if figures is not None and not math.isfinite(float(figures.loss)):
            raise DivergedError(
                f"the loss is {float(figures.loss)} after {self._trainer.num_updates} updates: lower "
                "--learner.learning-rate, and go on from an earlier checkpoint"
            )


def choose_device(config: LearnerConfig) -> torch.device:
    """The configured device; raises ConfigError for CUDA where there is none: never a silent CPU."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch sees no GPU here: use --device cpu, or mend the driver")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_cuda else "cpu")


def main(argv: Sequence[str] | None = None) -> int:
    """`apex learner`: the composition root."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    configure_logging("learner")
    try:
        with stop_on_signals() as stop:
            return _run(open_run(arguments), stop)
    except ConfigError as error:
        print(f"apex learner: {error}", file=sys.stderr)
        return REFUSED
    except (DivergedError, ChildDiedError) as error:
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
    schema = describe(config.environment, config.actor.n_step)
    return RunFolder.create(size_to_machine(config, read_machine(), schema), schema, argv=arguments)


def _run(folder: RunFolder, stop: Stop) -> int:
    config, schema, run_id = folder.config, folder.schema, folder.run_id
    transport, learner = config.transport, config.learner
    device = choose_device(learner)
    trainer_pipe, coordinator_pipe = Pipe()
    num_loaders = max(1, learner.num_loaders)
    ring = SampleRing(schema, learner.batch_size, NUM_SLOTS + num_loaders - 1, config.replay.num_shards)
    desk = Desk(config, schema, run_id, config.actor.num_actors, _next_epoch(folder), folder.path)
    coordinator = start_child("coordinator", coordinate, desk, coordinator_pipe, trainer_pipe)
    loaders = [
        start_child(f"loader-{index}", load, index, config, schema, ring, run_id) for index in range(num_loaders)
    ]
    coordinator_pipe.close()  # Its other end: who dies is noticed.
    torch.set_num_threads(max(1, learner.num_threads))
    if device.type == "cuda":
        # A graph cannot be captured on the default one.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    else:
        keep_freed_memory()
    codec = Codec(run_id, schema)
    publisher = PublishingThread(transport.endpoint("parameters"), codec, stop)

    def check() -> None:
        check_children([coordinator, *loaders])
        publisher.check()

    try:
        with open_context() as context:
            priorities = PrioritySender(context, codec)
            trainer = Trainer(
                learner,
                make_network(config.network, schema, seed=config.seed),
                make_network(config.network, schema, seed=config.seed),
                device=device,
                samples=ring,
                priorities=priorities,
                publish=publisher.publish,
            )
            state = load_latest(folder.checkpoints)
            if state is not None:
                trainer.restore(state)
                log.info("goes on at update %d", trainer.num_updates)
            start = {
                "num_parameters": num_parameters(trainer.online),
                "updates": trainer.num_updates,
                "num_steps": 0 if state is None else state.num_steps,
            }
            _send(trainer_pipe, start)
            loop = LearnerLoop(
                config,
                trainer,
                trainer_pipe,
                connect=priorities.connect,
                save=lambda num_steps: _save(folder, config, trainer, num_steps),
                loader_seconds=ring.loader_seconds,
                num_refused=lambda: int(ring.refused[0]),
            )
            log.info("run %s, folder %s, device %s", folder.path.name, folder.path, device)
            reason = loop.run(stop, check)
            _save(folder, config, trainer, loop.num_steps)
            log.info("ends after %d updates: %s", trainer.num_updates, reason)
            publisher.close()
            _send(trainer_pipe, {"finished": reason})
            coordinator.join(2 * FAREWELL_SECONDS)
        return FINISHED
    except ChildDiedError:
        coordinator.join(1.0)
        check_children([coordinator, *loaders])  # If one refused, so does the learner: to start it again is no use.
        raise
    finally:
        publisher.close()
        stop_children([coordinator, *loaders])


def _next_epoch(folder: RunFolder) -> int:
    """Counts the learner's starts in this run: what it leases now is newer than all that it leased before."""
    path = folder.path / "epoch"
    epoch = int(path.read_text()) + 1 if path.exists() else 1
    partial = path.with_name(".epoch.partial")
    partial.write_text(f"{epoch}\n")
    os.replace(partial, path)
    return epoch


def _save(folder: RunFolder, config: Config, trainer: Trainer, num_steps: int) -> None:
    """Writes a checkpoint. A full disk does not end a run: the older checkpoints stay."""
    try:
        save(folder.checkpoints, trainer.state(config, folder.schema, num_steps))
        prune(folder.checkpoints, config.checkpoint.keep)
    except OSError as error:
        log.error("no checkpoint at update %d: %s", trainer.num_updates, error)


if __name__ == "__main__":
    sys.exit(main())
