"""Prepares a learner for its first update: device, trainer, restored state."""

import logging
from collections.abc import Callable

import torch

from apex.algorithms.interface import make_algorithm
from apex.config import LearnerConfig, RunConfig
from apex.learning.skipped_batches import SkippedBatches
from apex.learning.trainer import BatchProvider, PrioritySink, Trainer
from apex.learning.warm_start import start_warm
from apex.runs.checkpoints.folder import Found, set_aside
from apex.runs.folder import RunFolder
from apex.runtime.seeding import seed_generators
from apex.types import Parameters, Progress
from apexreplay.errors import UsageError
from apexreplay.process.children import call_in_child
from apexreplay.process.freed_memory import keep_freed_memory
from apexreplay.process.lifecycle import Stop

log = logging.getLogger("apex")


def choose_device(config: LearnerConfig) -> torch.device:
    """Returns the configured device; raises UsageError if CUDA is configured and there is no GPU.

    A child process asks torch for a GPU, because this initializes CUDA, after which a process must not fork.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    (sees_gpu,) = call_in_child(
        "device", lambda stop: {"gpu": torch.cuda.is_available()}, Stop(), stuck_seconds=RunConfig().stuck_seconds
    ).values()
    if config.device == "cuda" and not sees_gpu:
        raise UsageError("--device cuda, but torch finds no GPU", "use --device cpu, or repair the driver")
    return torch.device("cuda" if sees_gpu else "cpu")


def prepare_torch(config: LearnerConfig, device: torch.device) -> None:
    """Configures torch for a learner: number of threads (see also `make_trainer`), and CUDA stream or memory allocator.

    On a GPU, also allows TF32 (10 bits of mantissa) in products of float32, as torch does for convolutions by default,
    and lets cuDNN measure its algorithms for each new shape to choose the fastest.
    """
    torch.set_num_threads(max(1, config.num_threads))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        # A CUDA graph cannot be captured on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    else:
        keep_freed_memory()
        # Threads inherit the floating-point mode of the thread that starts them; `Trainer` later sets only its own.
        torch.set_flush_denormal(True)
        torch.zeros(1 << 20).add_(1)  # starts the threads
        torch.set_flush_denormal(False)


def make_trainer(
    folder: RunFolder,
    device: torch.device,
    batches: BatchProvider,
    priorities: PrioritySink,
    publish: Callable[[Parameters], None],
) -> Trainer:
    """Creates the run's trainer. Also sets the number of threads for one operation of torch.

    If the run has saved nothing yet, its networks start from `learner.init_from`; raises UsageError if they cannot.
    """
    config, schema = folder.config, folder.schema
    trainer = Trainer(
        config.learner,
        make_algorithm(config, schema),
        device=device,
        batches=batches,
        priorities=priorities,
        publish=publish,
        keep_skipped=SkippedBatches(folder.path).keep,
    )
    torch.set_num_threads(trainer.torch_threads)
    if config.learner.init_from and not folder.has_saved:
        log.info(start_warm(trainer.online, config.learner.init_from))
        trainer.target.load_state_dict(trainer.online.state_dict())
    return trainer


def restore_trainer(folder: RunFolder, trainer: Trainer, found: Found) -> Progress:
    """Restores the newest undamaged checkpoint, if there is one; returns the progress of the run.

    Then seeds the global generators by the run's seed and the number of updates: updates may draw noise from torch's.
    """
    if found.state is not None:
        trainer.restore(found.state._asdict())
    seed_generators(folder.config.seed, trainer.num_updates)
    taken = folder.run_time
    if found.state is None:
        return Progress(elapsed_seconds=taken.seconds, untrained_seconds=taken.untrained)
    try:
        set_aside(folder.checkpoints, found)
    except OSError as error:
        log.error("cannot move damaged checkpoints out of %s: %s", folder.checkpoints, error)
    log.info("resuming at update %d", trainer.num_updates)
    progress = found.state.progress
    elapsed = max(progress.elapsed_seconds, taken.seconds)
    untrained = max(progress.untrained_seconds, taken.untrained)
    return progress._replace(elapsed_seconds=elapsed, untrained_seconds=untrained)
