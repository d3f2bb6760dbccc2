"""A program's standing with the learner: hello, welcome, then heartbeats until one of them goes.

The learner's control address is the only one that anybody must know. Everything else comes with the welcome.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from apex.config import Config, TransportConfig, from_dict
from apex.control_client import ControlClient
from apex.errors import ConfigError
from apex.fields import printable
from apex.header import VERSION
from apex.key_folder import read_keys
from apex.lifecycle import EXPLAIN_SECONDS, POLL_SECONDS, Helper, Stop, Wait
from apex.sockets import RefusedError, open_context, split_address
from apex.types import Schema, Stream
from apex.watchdog import Silence, is_traced

HELLO_SECONDS = 0.5  # between two hellos
PATIENCE = 1.25  # times as long as whoever watches from outside, who can say more than the program itself

log = logging.getLogger("apex")


class Welcome(NamedTuple):
    """What the learner tells a newcomer."""

    control: str  # the endpoint that was asked
    host: str  # the learner's, as this program reaches it
    session: int
    run_id: int
    config: Config
    schema: Schema
    num_parameters: int
    memory: str  # of the learner's host, see `store_place.memory_id`
    replay: list[dict[str, str]]  # endpoints by name of each shard; empty before all of them have said hello
    streams: list[Stream]

    def endpoint(self, name: str) -> str:
        """The address of one of the learner's sockets."""
        return self.config.transport.endpoint(name, self.host)


class Route(NamedTuple):
    """How this program reaches the learner."""

    host: str
    port: int
    keys: str = ""  # folder of this program's keys
    insecure_no_auth: bool = False  # without keys this program still talks beyond this host

    @property
    def endpoint(self) -> str:
        """The learner's control socket."""
        return f"tcp://{self.host}:{self.port}"


def local_host(transport: TransportConfig) -> str:
    """Where this host's own programs reach what is bound."""
    return "127.0.0.1" if transport.bind in ("0.0.0.0", "localhost", "*") else transport.bind


def add_route_options(parser: argparse.ArgumentParser) -> None:
    """The options of every program that joins a run."""
    parser.add_argument("--learner", default="127.0.0.1", metavar="HOST[:PORT]", help="the learner's control address")
    parser.add_argument("--keys", default="", metavar="DIR", help="folder of this role's keys, see apex keys --help")
    parser.add_argument(
        "--insecure-no-auth", action="store_true", help="talk beyond this host without keys: anyone there is believed"
    )


def read_route(arguments: argparse.Namespace) -> Route:
    """What was typed; raises ConfigError for what is no address."""
    host, port = split_address(arguments.learner, Config().transport.control_port)
    return Route(host, port, arguments.keys, arguments.insecure_no_auth)


def greet(
    route: Route,
    role: str,
    stop: Stop,
    *,
    shard: int = 0,
    num_streams: int = 0,
    needs_replay: bool = False,
    holder_is_dead: Callable[[dict[str, Any]], bool] = lambda answer: False,
) -> dict[str, Any]:
    """Says hello until the learner answers with all that the role needs.

    Returns the welcome as it arrived, but for what this program was told about its own keys. `shard` is a replay
    server's. `num_streams` > 0 leases that many actor ids at most. Returns {} when `stop` is
    requested or the run is over; `holder_is_dead` tells from the learner's answer whether the program that holds this
    one's place has died. Raises RefusedError when the learner says no.
    """
    session = secrets.randbits(63)
    hello = {
        "type": "hello",
        "wire": VERSION,
        "session": session,
        "role": role,
        "host": host_name(),
        "pid": os.getpid(),
        "shard": shard,
        "num_streams": num_streams,
    }
    endpoint = route.endpoint
    wait = Wait(role)
    with open_context(read_keys(route.keys, role)) as context:
        client = ControlClient(context, endpoint)
        while not stop.requested:
            client.send(hello)
            asked = time.monotonic()
            while (answer := client.receive(POLL_SECONDS)) is None and time.monotonic() - asked < HELLO_SECONDS:
                if stop.requested:
                    return {}
            if answer is None:
                wait.on(silent_learner(route, role))
            elif answer["type"] == "refused":
                raise RefusedError(f"the learner at {endpoint} refuses this {role}: {answer.get('reason')}")
            elif answer["type"] == "state" and answer.get("stop"):
                log.info("the run of the learner at %s is over", endpoint)
                return {}
            elif answer["type"] == "wait" and holder_is_dead(answer):
                client.send({"type": "goodbye", "session": int(answer["holder"])}, int(answer["run_id"]))
            elif answer["type"] != "welcome":
                wait.on(f"the learner at {endpoint} to see whether its place is free")
                time.sleep(POLL_SECONDS)
            elif needs_replay and not answer["replay"]:
                wait.on(f"{answer.get('absent') or 'a replay server'} to say hello to the learner at {endpoint}")
                time.sleep(POLL_SECONDS)
            elif num_streams and not answer["streams"]:
                wait.on(f"a free actor id: all {answer['num_actors']} are leased")
                time.sleep(POLL_SECONDS)
            else:
                answer["config"]["transport"] |= {"keys": route.keys, "insecure_no_auth": route.insecure_no_auth}
                return {**answer, "session": session, "control": endpoint, "host": route.host}
    return {}


def host_name() -> str:
    """This host's, as it is told and shown: a kernel takes any bytes for a name."""
    return printable(socket.gethostname())


def silent_learner(route: Route, role: str) -> str:
    """Whom a program waits for. Who is not let in hears nothing, on loopback too, so a wait must say what it may be."""
    why = f"must list this {role}'s key" if route.keys else "may want --keys"
    return f"the learner at {route.endpoint}, which {why}"


def read_welcome(answer: dict[str, Any]) -> Welcome:
    """Checks a welcome; raises ConfigError if it is none of this version's."""
    try:
        return Welcome(
            control=str(answer["control"]),
            host=str(answer["host"]),
            session=int(answer["session"]),
            run_id=int(answer["run_id"]),
            config=from_dict(answer["config"]),
            schema=Schema.from_dict(answer["schema"]),
            num_parameters=int(answer["num_parameters"]),
            memory=str(answer["memory"]),
            replay=[{str(name): str(value) for name, value in shard.items()} for shard in answer["replay"]],
            streams=[Stream(int(actor_id), int(incarnation)) for actor_id, incarnation in answer["streams"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the learner's welcome is not understood: {error!r}") from error


class Session:
    """Heartbeats of a program, in a thread of their own that owns the control socket.

    They also tell when the main thread makes no turns. Past `run.stuck_seconds` the program is ended then: one that was
    started by hand has nobody else to see it, and its heartbeats would hold its place for ever.
    `status` is called at every heartbeat; what it returns is what `apex status` shows of this program.
    """

    def __init__(
        self,
        welcome: Welcome,
        role: str,
        stop: Stop,
        status: Callable[[], dict[str, Any]],
        endpoints: dict[str, str] | None = None,
        shard: int = 0,
    ) -> None:
        """`endpoints` and `shard` are a replay server's."""
        self.inserts_wanted = False  # samplers of a replay shard wait for inserts
        self.finished = False  # the learner has ended the run
        self.lost = False  # the learner does not know this program (any more)
        self._welcome = welcome
        self._role = role
        self._stop = stop
        self._status = status
        self._endpoints = endpoints or {}
        self._shard = shard
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._closing = False
        self._silence = Silence()  # of the main thread
        self._turns = stop.turns
        self._helper = Helper(f"{role} heartbeats", self._run, stop)
        self._helper.start()

    def post(self, frames: list[bytes]) -> None:
        """Sends an encoded message over the control socket."""
        self._outbox.put(frames)

    def check(self) -> None:
        """Raises what ended the heartbeats, if anything did."""
        self._helper.check()

    def close(self) -> None:
        """Says goodbye: leases are free at once."""
        self._closing = True
        self._helper.join(2.0)

    def _run(self) -> None:
        welcome = self._welcome
        period = welcome.config.transport.heartbeat_seconds
        wait = Wait(self._role)
        heard, beat_at = time.monotonic(), 0.0
        with open_context(read_keys(welcome.config.transport.keys, self._role)) as context:
            client = ControlClient(context, welcome.control)
            while not self._closing:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + period
                    client.send(self._heartbeat(), welcome.run_id)
                self._flush(client)
                answer = client.receive(min(POLL_SECONDS, period))
                if answer is not None:
                    heard = time.monotonic()
                    wait.over()
                    if not self.finished:
                        self._hear(answer)
                        beat_at = 0.0 if self.finished else beat_at  # Its last figures are wanted before it goes.
                elif time.monotonic() - heard > 3 * period:
                    wait.on(f"the learner at {welcome.control}")
            self._flush(client)
            client.send({"type": "goodbye", "session": welcome.session}, welcome.run_id)
            client.close()

    def _watch_main_thread(self) -> str:
        """What it waits for, in words; "" while it makes turns."""
        turns, limit = self._stop.turns, PATIENCE * self._welcome.config.run.stuck_seconds
        too_long = self._silence.look(turns != self._turns, limit)
        self._turns = turns
        if too_long and not is_traced(os.getpid()):
            log.critical("%s made no turn for %.0f s: it is stuck, and ends", self._role, self._silence.seconds)
            os.abort()  # The log says where each thread was.
        seconds = self._silence.seconds
        return f"for its own main thread ({seconds:.0f} s without a turn)" if seconds > EXPLAIN_SECONDS else ""

    def _heartbeat(self) -> dict[str, Any]:
        status = dict(self._status())
        if stuck := self._watch_main_thread():
            status["waiting"] = stuck
        return {
            "type": "heartbeat",
            "session": self._welcome.session,
            "run_id": self._welcome.run_id,
            "role": self._role,
            "host": host_name(),
            "pid": os.getpid(),
            "shard": self._shard,
            "streams": self._welcome.streams,
            "endpoints": self._endpoints,
            "status": status,
        }

    def _flush(self, client: ControlClient) -> None:
        while True:
            try:
                client.send_frames(self._outbox.get_nowait())
            except queue.Empty:
                return

    def _hear(self, answer: dict[str, Any]) -> None:
        if answer["type"] == "state":
            self.inserts_wanted = bool(answer.get("inserts_wanted"))
            if answer.get("stop"):
                self.finished = True
                self._stop.request()
        elif answer["type"] == "refused":
            self.lost = True
            self._stop.request()
