"""The actor of `python -m chaos`: the product's actor with a ledger between it and its sockets."""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from apex import actor
from apex.acting.worker import WorkerTask
from apex.acting.worker import run_worker as act
from apex.transport.run_codec import RunCodec
from apexreplay.process.lifecycle import Stop
from chaos.witness import witnessed


def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; arguments: the folder of the ledgers, then the options of `apex actor`."""
    folder, *rest = sys.argv[1:] if argv is None else argv
    return actor.main(rest, work=partial(work, Path(folder)))


def work(folder: Path, stop: Stop, task: WorkerTask) -> None:
    """A worker process of the actor, like `apex.acting.worker.run_worker`."""
    welcome = task.welcome
    codec = RunCodec(welcome.run_id, welcome.schema)
    act(stop, task, partial(witnessed, folder, task.streams, codec, window=welcome.config.actor.send_window))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
