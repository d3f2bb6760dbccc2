"""`--env chaos.witness:make --env-arg ledgers=FOLDER`: writes ledgers in runs that other programs start, such as Ray.

A worker creates its environments before its sender, so that the environment can add the ledger to the sender.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from apex.acting import worker
from apexreplay.client.reliable_sender import Outlet, Receipts, ReliableSender
from apexreplay.types import Stream
from apexreplay.wire.codec import Codec
from chaos.environment import PacedEnvironment
from chaos.ledger import Ledger, WitnessedOutlet, WitnessedReceipts


def make(ledgers: str, **options: Any) -> PacedEnvironment:
    """Makes this worker write a ledger of sent and acknowledged segments below `ledgers`; returns an environment."""
    vars(worker)["ReliableSender"] = partial(witnessed, Path(ledgers))
    return PacedEnvironment()


def witnessed(
    folder: Path,
    streams: Sequence[Stream],
    codec: Codec,
    outlets: Sequence[Outlet],
    receipts: Receipts,
    *,
    window: int,
) -> ReliableSender:
    """A sender with a ledger between it and its sockets."""
    ledger = Ledger(folder)
    outlets = [WitnessedOutlet(o, ledger, partial(codec.decode_segment, shard=i)) for i, o in enumerate(outlets)]
    return ReliableSender(streams, codec, outlets, WitnessedReceipts(receipts, ledger), window=window)
