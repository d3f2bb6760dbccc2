"""Finds unused ports, so that several runs can share a host."""

import dataclasses
import errno
import socket
from collections.abc import Callable
from contextlib import ExitStack

from apex.config import Config
from apexreplay.errors import UsageError

OFFSET_STEP = 100  # difference between two port offsets that are tried


class PortClaims(ExitStack):
    """Reserves ports: no other launcher on this host takes them while this launcher runs.

    A process binds its port seconds after the launcher has chosen it. Without a claim, a second run could find the port
    free meanwhile, and its processes would join the first run. A claim is the name of an abstract socket, which
    disappears when the launcher ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ports: set[int] = set()

    def claim(self, host: str, port: int) -> bool:
        """Reserves a port for this process; returns False if it is in use. Raises UsageError as `is_free` does."""
        free = is_free(host, port)
        if free and port not in self._ports:
            name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                name.bind(f"\0apex-port-{port}")
            except OSError:  # Another launcher has reserved the port.
                name.close()
                return False
            self.enter_context(name)
            self._ports.add(port)
        return free


def choose_ports(config: Config, free: Callable[[str, int], bool], tell: Callable[[str], None]) -> Config:
    """Returns `config` with unused ports; calls `tell` with a message if they differ from the configured ports."""
    asked, run = config.transport, config.run
    while taken := [port for port in ports(config) if not free(asked.bind, port)]:
        offset = config.transport.port_offset + OFFSET_STEP
        try:
            config = dataclasses.replace(config, transport=dataclasses.replace(asked, port_offset=offset))
        except UsageError as error:
            raise UsageError(
                f"cannot find {len(ports(config))} free ports on {asked.bind} at or above "
                f"--transport.port-offset {asked.port_offset}; the last port tried was {taken[0]}"
            ) from error
    if config.transport != asked:
        offset = config.transport.port_offset
        tell(f"a port on {asked.bind} is in use: this run uses --transport.port-offset {offset}")
    if run.tensorboard:
        own, numbers = ports(config), range(run.tensorboard_port, 65_536)
        port = next((n for n in numbers if n not in own and free(run.tensorboard_bind, n)), None)
        if port is None:
            raise UsageError(f"no free port for TensorBoard at or above --run.tensorboard-port {run.tensorboard_port}")
        if port != run.tensorboard_port:
            tell(f"port {run.tensorboard_port} is in use: TensorBoard uses port {port}")
            run = dataclasses.replace(run, tensorboard_port=port)
    return dataclasses.replace(config, run=run)


def ports(config: Config) -> list[int]:
    """Returns every port that a run listens on, except TensorBoard's."""
    return [port for _, port in config.ports]


def is_free(host: str, port: int) -> bool:
    """Returns whether a server could listen on the port now; raises UsageError if `host` is no local address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Ignores closing connections, as ZeroMQ does.
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}", "choose an address of this host"
            ) from error
    return True
