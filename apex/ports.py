"""Finds ports that nobody listens on, so that runs stand side by side."""

from __future__ import annotations

import dataclasses
import errno
import socket
from collections.abc import Callable

from apex.config import Config, ConfigError, TransportConfig

OFFSET_STEP = 100  # between two port offsets that are tried


def choose_ports(config: Config, free: Callable[[str, int], bool], tell: Callable[[str], None]) -> Config:
    """Returns `config` with ports that nobody listens on; says aloud which are not those that were asked for."""
    transport, run = config.transport, config.run
    while taken := [port for port in ports(transport) if not free(transport.bind, port)]:
        try:
            transport = dataclasses.replace(transport, port_offset=transport.port_offset + OFFSET_STEP)
        except ConfigError as error:
            raise ConfigError(
                f"no {len(ports(transport))} free ports on {transport.bind} from "
                f"--transport.port-offset {config.transport.port_offset} on; the last one tried was {taken[0]}"
            ) from error
    if transport != config.transport:
        tell(f"a port is taken on {transport.bind}: this run uses --transport.port-offset {transport.port_offset}")
    if run.tensorboard:
        numbers = range(run.tensorboard_port, 65_536)
        port = next((n for n in numbers if n not in ports(transport) and free(run.tensorboard_bind, n)), None)
        if port is None:
            raise ConfigError(f"no free port for TensorBoard from --run.tensorboard-port {run.tensorboard_port} on")
        if port != run.tensorboard_port:
            tell(f"port {run.tensorboard_port} is taken: TensorBoard will be on {port}")
            run = dataclasses.replace(run, tensorboard_port=port)
    return dataclasses.replace(config, transport=transport, run=run)


def ports(transport: TransportConfig) -> list[int]:
    """Every port that a run listens on, TensorBoard's aside."""
    names = [knob.name for knob in dataclasses.fields(transport) if knob.name.endswith("_port")]
    return [getattr(transport, name) + transport.port_offset for name in names]


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
