"""Addresses and ports of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from apex.config.validation import Branch, Port, PositiveFloat
from apex.errors import require

PORT_STEP = 10  # between a port of one replay shard, or loader, and the same port of the next
REPLAY_SOCKETS = ("experience", "priorities", "receipts")  # that each replay shard binds


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig(Branch):
    """Addresses and ports. Other hosts need to know only the learner's control port."""

    bind: str = "127.0.0.1"  # interface that this host's sockets bind to; beyond loopback it needs keys
    keys: str = ""  # folder of keys, see apex keys --help: encrypts every socket, and says who may connect
    insecure_no_auth: bool = False  # bind beyond loopback without keys: anyone who reaches a port is trusted
    port_offset: int = 0  # added to every port below, so that several runs fit on a host
    experience_port: Port = 51001  # replay, PULL; the next shard's is 10 higher
    priorities_port: Port = 51002  # replay, PULL; the next shard's is 10 higher
    receipts_port: Port = 51003  # replay, XPUB; the next shard's is 10 higher
    parameters_port: Port = 52001  # learner, XPUB
    batches_port: Port = 52002  # loader, PULL; the next loader's is 10 higher
    control_port: Port = 52003  # learner, ROUTER
    metrics_port: Port = 52004  # learner, PULL
    shared_memory: bool = True  # a learner on the replay server's host draws from its memory; False: through sockets
    heartbeat_seconds: PositiveFloat = 1.0  # between two heartbeats on the control socket
    lease_seconds: PositiveFloat = 3.5  # an actor's ids are free again after this long without a heartbeat

    def check_relations(self) -> None:
        for setting in dataclasses.fields(self):
            if setting.name.endswith("_port"):
                port = getattr(self, setting.name) + self.port_offset
                name = f"transport.{setting.name} + port_offset"
                require(1024 <= port <= 65535, f"{name} must be from 1024 to 65535, got {port}")
        require(
            self.lease_seconds >= 3 * self.heartbeat_seconds,
            f"transport.lease_seconds must be >= 3 heartbeats, got {self.lease_seconds}",
        )
        require(
            bool(self.keys) or self.insecure_no_auth or self.is_loopback,
            f"transport.bind {self.bind!r} is not a loopback address, so it needs keys: apex keys new keys makes them, "
            "--transport.keys keys (of other programs: --keys keys) uses them; "
            "or --insecure-no-auth, where you trust everyone who can reach it",
        )
        require(
            not (self.keys and self.insecure_no_auth),
            f"transport.keys {self.keys!r} and --insecure-no-auth: leave one of them out",
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach what is bound."""
        return self.bind in ("127.0.0.1", "localhost")

    def port(self, name: str, index: int = 0) -> int:
        """The number of the port `name` ("experience", ...). `index`: of the shard for REPLAY_SOCKETS, of the loader
        for batches, else 0."""
        number: int = getattr(self, name + "_port")
        return number + self.port_offset + PORT_STEP * index

    def endpoint(self, name: str, host: str | None = None, index: int = 0) -> str:
        """The tcp:// address of the socket `name` on `host`, or where to bind it; `index` as in `port`."""
        return f"tcp://{host or self.bind}:{self.port(name, index)}"
