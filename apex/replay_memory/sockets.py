"""The sockets of a replay server: pass received messages to the server and publish its receipts."""

import asyncio

from apex.facts import Waiting
from apex.replay_memory.server import ReplayServer
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.transport.async_receiver import PULL, AsyncReceiver
from apex.transport.codec import Codec
from apex.transport.endpoints import ReceiptPublisher, max_segment_bytes
from apex.transport.heartbeat import Session
from apex.transport.hello import Welcome
from apex.transport.sockets import Context
from apex.transport.timing import RECEIPT_SECONDS
from apex.types import Receipt

LIMITER_SECONDS = 0.005  # seconds between two checks whether inserts may continue


class ReplaySockets:
    """The sockets for experience, priorities and receipts of one shard, with the tasks that serve them."""

    def __init__(self, context: Context, welcome: Welcome, server: ReplayServer) -> None:
        """Binds the sockets; raises AddressError if an address cannot be bound."""
        config, schema = welcome.config, welcome.schema
        self._server = server
        self._inserts_wait = config.replay.inserts_wait
        self._experience = AsyncReceiver(
            context,
            PULL,
            config.transport.endpoint("experience", index=server.shard),
            "experience",
            high_water_mark=2 * config.actor.window * config.actor.num_actors + 8,
            max_bytes=max_segment_bytes(schema, config.actor.segment_length),
            may_pause=True,
        )
        self._priorities = AsyncReceiver(
            context,
            PULL,
            config.transport.endpoint("priorities", index=server.shard),
            "priorities",
            high_water_mark=1_000,
            max_bytes=12 * config.part_size + 1_024,
        )
        endpoint = config.transport.endpoint("receipts", index=server.shard)
        self._receipts = ReceiptPublisher(context, endpoint, Codec(welcome.run_id, schema))

    async def take_experience(self, stop: Stop, session: Session) -> None:
        """Stores segments and publishes receipts; waits while the rate limiter does not allow inserts."""
        wait = Wait("replay")
        while not stop.poll():
            messages = await self._experience.burst(POLL_SECONDS)
            # If inserts may wait, stores one segment at a time, so that a wait does not delay receipts of stored ones.
            step = 1 if self._inserts_wait else max(1, len(messages))
            for first in range(0, len(messages), step):
                while not self._server.check_limiter(inserts_wanted=session.inserts_wanted):
                    if stop.poll():
                        return
                    wait.on(Waiting("samples"))
                    await asyncio.sleep(LIMITER_SECONDS)
                wait.over()
                self._publish(self._server.insert(messages[first : first + step]))

    async def take_priorities(self, stop: Stop) -> None:
        """Applies new priorities until `stop`."""
        while not stop.poll():
            self._server.update_priorities(await self._priorities.burst(POLL_SECONDS))

    async def repeat_receipts(self, stop: Stop) -> None:
        """Publishes the receipts of all active streams every RECEIPT_SECONDS."""
        while not stop.poll():
            await asyncio.sleep(RECEIPT_SECONDS)
            self._publish(self._server.receipts())

    def _publish(self, receipts: list[Receipt]) -> None:
        for receipt in receipts:
            self._receipts.publish(receipt, self._server.shard)
