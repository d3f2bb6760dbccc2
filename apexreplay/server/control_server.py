"""Answers the clients of a server of tables on its control socket: leases, addresses, status."""

from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from apexreplay.process.lifecycle import POLL_SECONDS, Stop
from apexreplay.server.leases import Full, Leases
from apexreplay.server.place import MEMORY_SAMPLERS, Place, first_port
from apexreplay.server.table_settings import TableSettings
from apexreplay.store.location import memory_id
from apexreplay.transport.async_receiver import ROUTER, AsyncReceiver
from apexreplay.transport.sockets import Context
from apexreplay.types import Stream
from apexreplay.wire import control
from apexreplay.wire.header import WireError
from apexreplay.wire.json_codec import MAX_JSON_BYTES, decode_json, encode_control
from apexreplay.wire.status import ReplayStatus


class ServedTable(NamedTuple):
    """A table, as the control socket sees it."""

    settings: TableSettings
    position: int
    run_id: int
    pipe: Connection
    leases: Leases


class ControlServer:
    """Answers clients: leases, addresses, status."""

    def __init__(self, context: Context, place: Place, served: Sequence[ServedTable]) -> None:
        """Binds the control socket."""
        self._context = context
        self._place = place
        self._memory = memory_id()
        self._served = {each.settings.table.name: each for each in served}
        self._status: dict[str, ReplayStatus] = {}
        endpoint = f"tcp://{place.bind}:{place.port}"
        self._socket = AsyncReceiver(
            context, ROUTER, endpoint, "control", high_water_mark=1_000, max_bytes=MAX_JSON_BYTES
        )

    async def answer(self, stop: Stop) -> None:
        """Answers requests until `stop`."""
        while not stop.poll():
            for peer, *frames in await self._socket.burst(POLL_SECONDS):
                try:
                    answer = self._answer(control.decode_message(frames, control.Request), getattr(peer, "role", ""))
                except WireError as error:
                    self._socket.refuse(error)
                    continue
                if isinstance(answer, control.Refusal):
                    self._socket.refused[answer.reason] += 1
                if answer is not None:
                    self._socket.reply(peer, encode_control(answer))

    def collect(self) -> bool:
        """Reads what the tables have reported; returns whether all of them have."""
        for name, served in self._served.items():
            with suppress(EOFError, OSError):  # The process of the table has ended, which is reported elsewhere.
                while served.pipe.poll():
                    self._status[name] = decode_json(served.pipe.recv_bytes(), ReplayStatus)
                    served.leases.open()
        return len(self._status) == len(self._served)

    def _answer(self, request: control.Request, role: str) -> control.Answer | None:
        session = request.session
        if isinstance(request, control.StatusRequest):
            return self._report(session)
        if isinstance(request, control.Hello):
            wanted = {"writer": "writer", "sampler": "reader"}[request.role]
            if role not in ("", wanted, "administrator"):
                return control.Refusal(session=session, reason="role", subject=role)
            return self._join(request)
        for served in self._served.values():
            if isinstance(request, control.Bye):
                served.leases.end(session)
            elif isinstance(request, control.Beat) and served.leases.beat(session):
                return control.Alive(session=session)
        return None if isinstance(request, control.Bye) else control.Refusal(session=session, reason="unknown_lease")

    def _join(self, hello: control.Hello) -> control.Answer:
        served = self._served.get(hello.table)
        if served is None:
            return control.Refusal(session=hello.session, reason="no_table", subject=", ".join(self._served)[:200])
        known_run = int(hello.run_id, 16)
        if known_run not in (0, served.run_id):
            return control.Refusal(session=hello.session, reason="new_memory")
        if hello.role == "sampler" and hello.table not in self._status:
            return control.Later(session=hello.session)  # The memory may not exist yet.
        settings, first = served.settings, first_port(self._place, served.position)
        is_writer = hello.role == "writer"
        shared = hello.memory == self._memory and settings.order == "priority"  # Whether it reads the memory itself.
        place = hello.stream if is_writer else hello.row - settings.num_samplers
        known = Stream(place, int(hello.incarnation, 16)) if known_run else None
        lease: Stream | Full | None
        if is_writer:
            lease = served.leases.writer(hello.session, known)
        elif shared:
            lease = served.leases.sampler(hello.session, known)
        else:
            lease = served.leases.remote(hello.session)
        if lease is None:
            return control.Later(session=hello.session)
        if isinstance(lease, Full):
            return control.Refusal(session=hello.session, reason=lease.reason, subject=str(lease.limit))
        return control.Welcome(
            session=hello.session,
            run_id=f"{served.run_id:x}",
            table=settings.table.to_dict(),
            experience=first,
            priorities=first + 1,
            receipts=first + 2,
            batches=[first + 3 + sampler for sampler in range(settings.num_samplers)],
            stream=lease.actor_id if is_writer else -1,
            incarnation=f"{lease.incarnation:x}",
            window=settings.window,
            segment_length=settings.segment_length,
            row=settings.num_samplers + lease.actor_id if shared and not is_writer else -1,
            num_rows=settings.num_samplers + MEMORY_SAMPLERS,
            max_batch=settings.max_batch,
            limiter=(settings.min_size, settings.samples_per_insert, settings.tolerance, settings.inserts_wait),
        )

    def _report(self, session: int) -> control.ServerStatus:
        tables = {}
        for name, served in self._served.items():
            writers, samplers = served.leases.count()
            tables[name] = control.TableStatus(
                capacity=served.settings.capacity, writers=writers, samplers=samplers, replay=self._status.get(name)
            )
        return control.ServerStatus(
            session=session,
            tables=tables,
            refused_connections=self._context.refused_connections,
            refusals=dict(self._socket.refused),
        )
