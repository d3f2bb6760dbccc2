"""The actor of `python -m chaos unusable`: the product's actor, with some damaged segments."""

import os
import sys
from collections.abc import Sequence
from functools import partial

from apex import actor
from apex.acting.worker import WorkerTask
from apex.acting.worker import run_worker as act
from apex.transport.run_codec import RunCodec
from apexreplay.client.reliable_sender import Outlet, Receipts, ReliableSender
from apexreplay.process.lifecycle import Stop
from chaos.unusable.spoil import SpoilingSender


def main(argv: Sequence[str] | None = None) -> int:
    """The composition root; arguments: kinds and share of the damage, then the options of `apex actor`."""
    kinds, share, *rest = sys.argv[1:] if argv is None else argv
    return actor.main(rest, work=partial(work, [kind for kind in kinds.split(",") if kind], float(share)))


def work(kinds: Sequence[str], share: float, stop: Stop, task: WorkerTask) -> None:
    """A worker process of the actor, like `apex.acting.worker.run_worker`."""
    welcome = task.welcome
    codec, window = RunCodec(welcome.run_id, welcome.schema), welcome.config.actor.send_window

    def connect(outlets: Sequence[Outlet], receipts: Receipts) -> ReliableSender:
        return SpoilingSender(kinds, share, task.streams, codec, outlets, receipts, window=window)

    act(stop, task, connect)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
