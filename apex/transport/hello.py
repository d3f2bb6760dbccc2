"""Joins a run: sends Hello to the learner and reads its welcome. Needs only the learner's control address."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import msgspec
import psutil

from apex.config import Config, RunConfig, TransportConfig, from_dict
from apex.config.arguments import Parser
from apex.errors import RefusedError
from apex.transport.curve.key_store import read_keys
from apex.transport.messages import control
from apex.transport.messages.fields import printable
from apex.transport.timing import HELLO_SECONDS
from apex.types import Role
from apexreplay.errors import UsageError
from apexreplay.facts import Waiting
from apexreplay.process.children import call_in_child
from apexreplay.process.lifecycle import POLL_SECONDS, Stop, Wait
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.handshakes import NO_KEY
from apexreplay.transport.sockets import open_context, reachable_address
from apexreplay.wire.header import WIRE_VERSION
from apexreplay.wire.json_codec import decode_other

ELSEWHERE = "192.0.2.1"  # an address of no network (RFC 5737): which of this host's addresses leads to other hosts

log = logging.getLogger("apex")


class Route(NamedTuple):
    """How this program connects to the learner."""

    host: str
    port: int
    keys: str = ""  # folder of this program's keys; "": no keys
    insecure_no_auth: bool = False  # whether connections to other hosts are allowed without keys

    @property
    def endpoint(self) -> str:
        """Address of the learner's control socket."""
        return f"tcp://{self.host}:{self.port}"


class Welcome(control.RunFacts, frozen=True, kw_only=True):
    """What a program knows after it has joined a run."""

    route: Route
    session: int
    config: Config  # configuration of the run, but with this program's keys

    def endpoint(self, name: str) -> str:
        """Returns the address of one of the learner's sockets."""
        return self.config.transport.endpoint(name, self.route.host)

    def with_transport(self, **settings: Any) -> Self:
        """Returns a copy with other transport settings."""
        transport = replace(self.config.transport, **settings)
        return msgspec.structs.replace(self, config=replace(self.config, transport=transport))


def local_host(transport: TransportConfig) -> str:
    """Returns the address at which programs on this host reach the bound sockets."""
    return "127.0.0.1" if transport.binds_to_all or transport.bind == "localhost" else transport.bind


def advertised_host(transport: TransportConfig) -> str:
    """Returns the name or address at which other hosts reach this one. Raises OSError if this host has no route."""
    return transport.advertise or reachable_address("" if transport.binds_to_all else transport.bind, ELSEWHERE)


def add_route_options(parser: Parser) -> None:
    """Adds the options that a program needs to join a run."""
    learner = "the learner's control address; default: the newest run in ./runs that is running on this host"
    parser.add_argument("--learner", metavar="HOST[:PORT]", help=learner)
    parser.add_argument("--keys", default="", metavar="DIR", help="folder with this role's keys (see apex keys --help)")
    insecure = "allow connections to other hosts without keys, encryption or authentication"
    parser.add_argument("--insecure-no-auth", action="store_true", help=insecure)


def split_address(text: str, default_port: int) -> tuple[str, int]:
    """Parses HOST or HOST:PORT; raises UsageError for anything else."""
    host, _, port = text.partition(":")
    number = port or str(default_port)
    if not host or not number.isdecimal() or not 0 < int(number) < 65_536:
        raise UsageError(f"--learner must be HOST or HOST:PORT with a port from 1 to 65535, got {text!r}")
    return host, int(number)


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
    """Sends Hello until the learner's welcome has all that the role needs. Returns None if stopped or the run is over.

    shard: number of the shard, for a replay server. num_streams: maximum number of actor ids to lease. needs_replay:
    wait until all replay servers have joined. holder_is_dead: takes the learner's answer that another program holds the
    shard, and returns whether that program is dead.
    Raises RefusedError if the learner refuses this program, and UsageError for an unknown setting of the run.
    """
    hello = control.Hello(
        wire=WIRE_VERSION,
        session=secrets.randbits(53),
        role=role,
        host=host_name(),
        pid=os.getpid(),
        shard=shard,
        num_streams=num_streams,
    )
    wait = Wait(role)
    with open_context(read_keys(route.keys, role)) as context:
        client = ControlSocket(context, route.endpoint, control.decode_answer)
        while not stop.poll():
            answer = _ask(client, hello, stop)
            match answer:
                case None:
                    _require_agreement(client, route)
                    wait.on(_absence(route))
                    continue
                case control.RefusedAnswer():
                    raise RefusedError(f"the learner at {route.endpoint} refuses this {role}: {answer.reason}")
                case control.StateAnswer(stop=True, interrupted=True):  # The learner ends in a moment.
                    missing = _absence(route)
                case control.StateAnswer(stop=True):
                    log.info("the run of the learner at %s is over", route.endpoint)
                    return None
                case control.WaitAnswer() if holder_is_dead(answer):
                    client.send(control.Goodbye(answer.holder), answer.run_id)
                    continue
                case control.WelcomeAnswer():
                    if needs_replay and not answer.replay:
                        missing = Waiting("all_replay", answer.absent)
                    elif num_streams and not answer.streams:
                        missing = Waiting("actor_id", need=answer.num_actors)
                    else:
                        return _read_welcome(answer, route, hello.session)
                case _:
                    missing = Waiting("shard", route.endpoint)
            wait.on(missing)
            time.sleep(POLL_SECONDS)
    return None


def has_address(route: Route) -> bool:
    """Returns whether the learner's host name can be resolved."""
    try:
        socket.getaddrinfo(route.host, route.port)
    except (OSError, UnicodeError):
        return False
    return True


def _absence(route: Route) -> Waiting:
    """Returns what a program waits for whose learner does not answer."""
    if not has_address(route):
        return Waiting("host_name", route.host)
    return Waiting("welcome_with_keys" if route.keys else "welcome_without_keys", route.endpoint)


def greet_in_child(greet: Callable[[Stop], Welcome | None], stop: Stop) -> Welcome | None:
    """Calls `greet(stop)` in a child process, because a program that forks later must not have a ZeroMQ context."""
    answer = call_in_child(
        "hello",
        lambda child_stop: msgspec.to_builtins(greet(child_stop), enc_hook=int) or {},
        stop,
        stuck_seconds=RunConfig().stuck_seconds,
    )
    return msgspec.convert(answer, Welcome, dec_hook=decode_other) if answer else None


def _require_agreement(client: ControlSocket[control.Answer], route: Route) -> None:
    """Raises RefusedError if only one of the learner and this program uses keys: they can never connect."""
    if client.refused[NO_KEY] and route.keys:
        raise RefusedError(f"the learner at {route.endpoint} uses no keys", "leave out --keys")
    if client.refused[NO_KEY]:
        remedy = "run this command in the folder of apex train, or pass --keys RUN_FOLDER/keys or a bundle of keys"
        raise RefusedError(f"the learner at {route.endpoint} accepts only programs with its keys", remedy)


def _ask(client: ControlSocket[control.Answer], hello: control.Hello, stop: Stop) -> control.Answer | None:
    """Sends one Hello; returns the answer, or None after HELLO_SECONDS."""
    client.send(hello)
    asked = time.monotonic()
    while time.monotonic() - asked < HELLO_SECONDS and not stop.poll():
        if (answer := client.receive(POLL_SECONDS)) is not None:
            return answer
    return None


def _read_welcome(answer: control.WelcomeAnswer, route: Route, session: int) -> Welcome:
    """Converts the learner's answer; raises UsageError if this program does not know a setting of the run."""
    facts = {name: getattr(answer, name) for name in control.RunFacts.__struct_fields__}
    welcome = Welcome(route=route, session=session, config=from_dict(answer.config), **facts)
    return welcome.with_transport(keys=route.keys, insecure_no_auth=route.insecure_no_auth)


def owner_name() -> str:
    """Returns the name of this process's user and of this host, as USER@HOST."""
    user = psutil.Process().username()  # the number of a user without a name, as in some containers
    return printable(f"{user}@{host_name()}")


def host_name() -> str:
    """Returns this host's name with printable characters only: the kernel allows any bytes."""
    return printable(socket.gethostname())
