"""Everything a learner makes before its first update: device, run folder, trainer, restored state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from apex.config import LearnerConfig
from apex.config.arguments import Parser
from apex.config.command_line import parse_config
from apex.config.sizing import size_to_machine
from apex.dqn.networks import make_network
from apex.environments.factory import describe, kind
from apex.errors import ConfigError, require
from apex.learning.run_save import save_run
from apex.learning.skipped_batches import SkippedBatches
from apex.learning.trainer import BatchProvider, PrioritySink, Trainer
from apex.runs.checkpoints.folder import Found, set_aside
from apex.runs.folder import RunFolder
from apex.runtime.children import call_in_child
from apex.runtime.gpu import means_gpu
from apex.runtime.hardware import read_machine
from apex.runtime.lifecycle import Stop
from apex.runtime.malloc import keep_freed_memory
from apex.types import Parameters, Progress

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


def open_run(arguments: list[str]) -> RunFolder:
    """The run that `--run-folder` names, as the launcher made it; or a new one, by the other options."""
    parser = Parser(prog="apex learner", add_help=False)
    parser.add_argument("--run-folder", metavar="DIR", help="train the run in this folder, whatever other options say")
    options, rest = parser.parse_known_args(arguments)
    if options.run_folder is not None:
        return RunFolder.open(options.run_folder)
    about = "Trains on what actors send."
    config = parse_config(rest, prog="apex learner", description=about, kind=kind, means_gpu=means_gpu, own=[parser])
    require(not config.run.single_process, "--single-process is a whole run in one process: apex train starts it")
    schema = describe(config.environment, config.actor.n_step)
    return RunFolder.create(size_to_machine(config, read_machine(), schema), schema, argv=arguments)


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
    batches: BatchProvider,
    priorities: PrioritySink,
    publish: Callable[[Parameters], None],
) -> Trainer:
    """The run's trainer, before its first update."""
    config, schema = folder.config, folder.schema
    return Trainer(
        config.learner,
        partial(make_network, config.network, schema, seed=config.seed),
        device=device,
        batches=batches,
        priorities=priorities,
        publish=publish,
        keep_skipped=SkippedBatches(folder.path).keep,
    )


def restore_trainer(folder: RunFolder, trainer: Trainer, found: Found) -> Progress:
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
    if save_run(folder.checkpoints, folder.config, folder.schema, trainer.state(), progress) is not None:
        folder.note_saved()
