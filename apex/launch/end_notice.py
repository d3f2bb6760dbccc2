"""Tells programs of other hosts that a run is over, if a repeated command finds that it has ended."""

import asyncio
import time

from apex.config import Config
from apex.transport.curve.key_store import read_keys
from apex.transport.messages.control import RefusedAnswer, StateAnswer, decode_request
from apex.types import Role
from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.transport.async_receiver import ROUTER, AsyncReceiver
from apexreplay.transport.sockets import open_context
from apexreplay.wire.header import WireError
from apexreplay.wire.json_codec import MAX_JSON_BYTES, encode_control

# Actors of the same deployment start within this time. Without an answer, they would wait for ever.
NOTICE_SECONDS = 120.0


def tell_over(config: Config, run_id: int, stop: Stop, seconds: float = NOTICE_SECONDS) -> None:
    """For `seconds`, answers each program that joins: the run is over.

    Raises UsageError if the keys cannot be read or the control port is taken.
    """
    asyncio.run(_serve(config, run_id, stop, time.monotonic() + seconds))


async def _serve(config: Config, run_id: int, stop: Stop, until: float) -> None:
    endpoint, over = config.transport.endpoint("control"), encode_control(StateAnswer(stop=True), run_id)
    with open_context(read_keys(config.transport.keys, Role.LEARNER)) as context:
        control = AsyncReceiver(context, ROUTER, endpoint, "control", high_water_mark=1_000, max_bytes=MAX_JSON_BYTES)
        while not stop.poll() and time.monotonic() < until:
            for identity, *frames in await control.burst(POLL_SECONDS):
                try:
                    request = decode_request(frames, run_id)
                except WireError as error:
                    control.refuse(error)
                    continue
                is_refused = isinstance(request, RefusedAnswer)
                control.reply(identity, encode_control(request, run_id) if is_refused else over)
