"""Finds ports that nobody listens on, so that runs stand side by side."""

from __future__ import annotations

import dataclasses
import errno
import socket
from collections.abc import Callable
from typing import Self

from apex.config import REPLAY_SOCKETS, Config
from apex.errors import ConfigError

OFFSET_STEP = 100  # between two port offsets that are tried


class PortClaims:
    """Ports that no other launcher on this host takes while this one lives, although nobody listens on them yet.

    A program binds its port seconds after the launcher chose it. Meanwhile a second run would find the port free, and
    its programs would join the first run. A claim is the name of an abstract socket, which ends with its process.
    """

    def __init__(self) -> None:
        self._claims: dict[int, socket.socket] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for claim in self._claims.values():
            claim.close()

    def claim(self, host: str, port: int) -> bool:
        """Whether a server could listen there now, and the port is ours until the end; raises as `is_free` does."""
        free = is_free(host, port)
        if free and port not in self._claims:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                name.bind(f"\0apex-port-{port}")
            except OSError:  # Another launcher has it.
                name.close()
                return False
            self._claims[port] = name
        return free


def choose_ports(config: Config, free: Callable[[str, int], bool], tell: Callable[[str], None]) -> Config:
    """Returns `config` with ports that nobody listens on; says aloud which are not those that were asked for."""
    asked, run = config.transport, config.run
    while taken := [port for port in ports(config) if not free(asked.bind, port)]:
        offset = config.transport.port_offset + OFFSET_STEP
        try:
            config = dataclasses.replace(config, transport=dataclasses.replace(asked, port_offset=offset))
        except ConfigError as error:
            raise ConfigError(
                f"no {len(ports(config))} free ports on {asked.bind} from "
                f"--transport.port-offset {asked.port_offset} on; the last one tried was {taken[0]}"
            ) from error
    if config.transport != asked:
        offset = config.transport.port_offset
        tell(f"a port is taken on {asked.bind}: this run uses --transport.port-offset {offset}")
    if run.tensorboard:
        own, numbers = ports(config), range(run.tensorboard_port, 65_536)
        port = next((n for n in numbers if n not in own and free(run.tensorboard_bind, n)), None)
        if port is None:
            raise ConfigError(f"no free port for TensorBoard from --run.tensorboard-port {run.tensorboard_port} on")
        if port != run.tensorboard_port:
            tell(f"port {run.tensorboard_port} is taken: TensorBoard will be on {port}")
            run = dataclasses.replace(run, tensorboard_port=port)
    return dataclasses.replace(config, run=run)


def ports(config: Config) -> list[int]:
    """Every port that a run listens on, TensorBoard's aside."""
    transport = config.transport
    names = [name.removesuffix("_port") for name in dataclasses.asdict(transport) if name.endswith("_port")]
    shards, loaders = range(1, config.replay.num_shards), range(1, config.learner.num_loaders)
    more = [transport.port(name, shard) for shard in shards for name in REPLAY_SOCKETS]
    return [*map(transport.port, names), *more, *(transport.port("batches", loader) for loader in loaders)]


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now; raises ConfigError for an address that this host does not have."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As ZeroMQ does: closing connections do not count.
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; name an address of this host"
            ) from error
    return True
