"""Joining a run: hello to the learner, and its welcome. Only the learner's control address must be known beforehand."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import msgspec

from apex.config import Config, TransportConfig, from_dict
from apex.config.arguments import Parser
from apex.runtime.children import call_in_child
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import read_keys
from apex.transport.header import WIRE_VERSION
from apex.transport.messages import control
from apex.transport.messages.fields import printable
from apex.transport.sockets import RefusedError, open_context, split_address
from apex.transport.timing import HELLO_SECONDS
from apex.types import Role, Schema, Stream

log = logging.getLogger("apex")


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


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a program knows once the learner has let it in."""

    route: Route
    session: int
    run_id: int
    config: Config  # the run's, with this program's own keys
    schema: Schema
    num_parameters: int
    memory: str = ""  # of the learner's host, see `location.memory_id`
    replay: list[dict[str, str]] = []  # endpoints by name of each shard; empty before all of them have said hello
    streams: list[Stream] = []

    def endpoint(self, name: str) -> str:
        """The address of one of the learner's sockets."""
        return self.config.transport.endpoint(name, self.route.host)

    def with_transport(self, **settings: Any) -> Self:
        """The same with settings of this program's own."""
        transport = replace(self.config.transport, **settings)
        return msgspec.structs.replace(self, config=replace(self.config, transport=transport))


def local_host(transport: TransportConfig) -> str:
    """Where this host's own programs reach what is bound."""
    return "127.0.0.1" if transport.bind in ("0.0.0.0", "localhost", "*") else transport.bind


def add_route_options(parser: Parser) -> None:
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
    role: Role,
    stop: Stop,
    *,
    shard: int = 0,
    num_streams: int = 0,
    needs_replay: bool = False,
    holder_is_dead: Callable[[control.WaitAnswer], bool] = lambda answer: False,
) -> Welcome | None:
    """Says hello until the learner answers with all that the role needs.

    `shard` is a replay server's. `num_streams` > 0 leases that many actor ids at most. Returns None when `stop` is
    requested or the run is over; `holder_is_dead` tells from the learner's answer whether the program that holds this
    one's place has died. Raises RefusedError when the learner says no, ConfigError for a configuration that this
    program does not know.
    """
    hello = control.Hello(
        wire=WIRE_VERSION,
        session=secrets.randbits(63),
        role=role,
        host=host_name(),
        pid=os.getpid(),
        shard=shard,
        num_streams=num_streams,
    )
    wait = Wait(role)
    with open_context(read_keys(route.keys, role)) as context:
        client = ControlClient(context, route.endpoint)
        while not stop.requested:
            answer = _ask(client, hello, stop)
            match answer:
                case None:
                    wait.on(silent_learner(route, role))
                    continue
                case control.RefusedAnswer():
                    raise RefusedError(f"the learner at {route.endpoint} refuses this {role}: {answer.reason}")
                case control.StateAnswer(stop=True):
                    log.info("the run of the learner at %s is over", route.endpoint)
                    return None
                case control.WaitAnswer() if holder_is_dead(answer):
                    client.send(control.Goodbye(answer.holder), answer.run_id)
                    continue
                case control.WelcomeAnswer():
                    if needs_replay and not answer.replay:
                        missing = (
                            f"{answer.absent or 'a replay server'} to say hello to the learner at {route.endpoint}"
                        )
                    elif num_streams and not answer.streams:
                        missing = f"a free actor id: all {answer.num_actors} are leased"
                    else:
                        return _read_welcome(answer, route, hello.session)
                case _:
                    missing = f"the learner at {route.endpoint} to see whether its place is free"
            wait.on(missing)
            time.sleep(POLL_SECONDS)
    return None


def greet_in_child(greet: Callable[[Stop], Welcome | None], stop: Stop) -> Welcome | None:
    """Calls `greet(stop)` in a child of its own, for a program that forks afterwards: a context must not cross that."""
    answer = call_in_child("hello", lambda child_stop: msgspec.to_builtins(greet(child_stop)) or {}, stop)
    return msgspec.convert(answer, Welcome) if answer else None


def _ask(client: ControlClient, hello: control.Hello, stop: Stop) -> control.Answer | None:
    """The answer to one hello, or None if there was none for a moment."""
    client.send(hello)
    asked = time.monotonic()
    while time.monotonic() - asked < HELLO_SECONDS and not stop.requested:
        if (answer := client.receive(POLL_SECONDS)) is not None:
            return answer
    return None


def _read_welcome(answer: control.WelcomeAnswer, route: Route, session: int) -> Welcome:
    """Raises ConfigError for a configuration that this program does not know."""
    welcome = Welcome(
        route=route,
        session=session,
        run_id=answer.run_id,
        config=from_dict(answer.config),
        schema=answer.schema,
        num_parameters=answer.num_parameters,
        memory=answer.memory,
        replay=answer.replay,
        streams=answer.streams,
    )
    return welcome.with_transport(keys=route.keys, insecure_no_auth=route.insecure_no_auth)


def host_name() -> str:
    """This host's, as it is told and shown: a kernel takes any bytes for a name."""
    return printable(socket.gethostname())


def silent_learner(route: Route, role: Role) -> str:
    """Whom a program waits for. Who is not let in hears nothing, on loopback too, so a wait must say what it may be."""
    why = f"must list this {role}'s key" if route.keys else "may want --keys"
    return f"the learner at {route.endpoint}, which {why}"
