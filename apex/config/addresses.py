"""Addresses and ports of a run."""

from dataclasses import dataclass

from apex.config.validation import Branch, Port, PositiveFloat, require_setting

MOST_SAMPLERS = 64  # per replay server
PORT_STEP = 10  # difference between the same port of two consecutive shards or sampler processes
REPLAY_SOCKETS = ("experience", "priorities", "receipts")  # sockets that each replay server binds once
SOCKETS = (*REPLAY_SOCKETS, "batches", "parameters", "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig(Branch):
    """Addresses and ports. Other hosts need only the address and control port of the learner."""

    bind: str = "127.0.0.1"  # address that this host's sockets bind to; any other than loopback needs keys
    advertise: str = ""  # name or address at which other hosts reach this one; empty: bind, or of 0.0.0.0 this host's
    keys: str = ""  # folder of CURVE keys, see apex keys --help; empty: apex train makes new keys for each start
    insecure_no_auth: bool = False  # use no keys, and trust every user and host that can connect
    port_offset: int = 0  # added to every port below, so that several runs can share a host
    experience_port: Port = 21001  # replay server, PULL: segments from actors; 10 higher for each further shard
    priorities_port: Port = 21002  # replay server, PULL: new priorities; 10 higher for each further shard
    receipts_port: Port = 21003  # replay server, PUB: receipts for segments; 10 higher for each further shard
    batches_port: Port = 21004  # sampler, ROUTER: batches; 10 higher for each further sampler of any shard
    parameters_port: Port = 22001  # learner, XPUB: network parameters
    control_port: Port = 22003  # learner, ROUTER: joining and heartbeats
    shared_memory: bool = True  # a learner on the same host reads the replay memory directly; off: use TCP
    heartbeat_seconds: PositiveFloat = 1.0  # seconds between two heartbeats on the control socket
    lease_seconds: PositiveFloat = 3.5  # seconds without a heartbeat after which an actor's ids are released

    def check_relations(self) -> None:
        for name in SOCKETS:
            port, setting = self.port(name), f"transport.{name}_port + port_offset"
            require_setting(1024 <= port <= 65535, f"{setting} must be from 1024 to 65535, got {port}")
        require_setting(
            not set(self.advertise) & set(" \t\n/:;"),
            f"transport.advertise must be a name or an IPv4 address without a port, got {self.advertise!r}",
        )
        require_setting(
            self.lease_seconds >= 3 * self.heartbeat_seconds,
            f"transport.lease_seconds {self.lease_seconds} must be >= 3 x heartbeat_seconds {self.heartbeat_seconds}",
        )
        require_setting(
            bool(self.keys) or self.insecure_no_auth or self.is_loopback,
            f"transport.bind {self.bind!r} is not a loopback address, so it needs keys",
            "run `apex keys new keys` and pass --transport.keys keys (for one role: --keys keys); "
            "or pass --insecure-no-auth if you trust every host that can connect",
        )
        require_setting(
            not (self.keys and self.insecure_no_auth),
            f"transport.keys {self.keys!r} and --insecure-no-auth exclude each other",
            "leave one of them out",
        )

    @property
    def is_loopback(self) -> bool:
        """Returns whether only this host can connect to the bound sockets."""
        return self.bind in ("127.0.0.1", "localhost")

    @property
    def binds_to_all(self) -> bool:
        """Returns whether the sockets can be reached at every address of this host, and not only at `bind`."""
        return self.bind in ("0.0.0.0", "*")

    @property
    def insecure_address(self) -> str:
        """Returns the address at which other hosts reach the sockets without keys; "" if they cannot."""
        return "" if self.is_loopback or self.keys else self.bind

    def port(self, name: str, index: int = 0) -> int:
        """Returns the port number of the socket `name` ("experience", ...).

        `index` is the shard number for REPLAY_SOCKETS; for "batches" see `batch_endpoints`; else 0.
        """
        number: int = getattr(self, name + "_port")
        return number + self.port_offset + PORT_STEP * index

    def endpoint(self, name: str, host: str | None = None, index: int = 0) -> str:
        """Returns the tcp:// address of the socket `name` on `host`; without `host`, the address to bind to.

        `index` has the same meaning as in `port`.
        """
        return f"tcp://{host or self.bind}:{self.port(name, index)}"
