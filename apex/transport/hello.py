"""Joining a run: hello to the learner, and its welcome. Only the learner's control address must be known beforehand."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from apex.config import Config, TransportConfig, from_dict
from apex.config.arguments import Parser
from apex.errors import ConfigError
from apex.runtime.lifecycle import POLL_SECONDS, Stop, Wait
from apex.transport.control_client import ControlClient
from apex.transport.curve.key_store import read_keys
from apex.transport.header import WIRE_VERSION
from apex.transport.json_fields import printable
from apex.transport.sockets import RefusedError, open_context, split_address
from apex.types import Schema, Stream

log = logging.getLogger("apex")


HELLO_SECONDS = 0.5  # between two hellos


class Welcome(NamedTuple):
    """What the learner tells a newcomer."""

    control: str  # the endpoint that was asked
    host: str  # the learner's, as this program reaches it
    session: int
    run_id: int
    config: Config
    schema: Schema
    num_parameters: int
    memory: str  # of the learner's host, see `location.memory_id`
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
        "wire": WIRE_VERSION,
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
