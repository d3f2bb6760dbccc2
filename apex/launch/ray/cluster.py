"""Connects to a Ray cluster or starts one, refuses clusters without authentication, and creates units on it."""

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from apex.launch.engine import RayEngine
from apex.launch.ray.unit import ActorHost, Head, Unit
from apex.runtime.optional_imports import remedy
from apex.transport.messages.run_status import RunStatus
from apexreplay.errors import UsageError

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum: the run does not use it, and the replay memory needs /dev/shm
PROBE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
PROBE_SECONDS = 5.0
CONNECT_SECONDS = 5.0  # Ray itself would wait minutes for an address at which nothing listens
# Ray itself would kill this process 60 s after the loss of its control service.
ASK_SECONDS, ANSWER_SECONDS = 1.0, 0.5  # pause between connections to the service, and time for each
LOST_SECONDS = 3.5  # time without an answer after which the service counts as lost
CLUSTER_FILE = Path("~/ray_bootstrap_config.yaml")  # JSON, which `ray up` leaves on the cluster's head node
# By default Ray kills the children of a worker that loses its driver, before they can save the run and remove its keys.
UNIT_ENVIRONMENT = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}


@contextmanager
def open_cluster(engine: RayEngine) -> Iterator[Any]:
    """Yields the module `ray`, connected to the cluster. At the end, disconnects and stops a cluster started here.

    Raises UsageError if Ray is not installed, if there is no cluster at the address, or if the cluster accepts
    connections without authentication.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs Ray, an optional package", remedy("ray")) from error
    if ray.is_initialized():  # The caller of apex.train has connected and will disconnect.
        _refuse_open(ray, engine)
        yield ray
        return
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        _connect(ray, engine)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)  # Ray's handler would exit immediately.
        _refuse_open(ray, engine)
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, engine: RayEngine) -> None:
    address = engine.address or os.environ.get("RAY_ADDRESS") or "auto"
    if address not in ("auto", "local"):
        _require_listener(address)
    try:
        try:
            ray.init(address=address, logging_level=logging.ERROR)
        except ConnectionError:
            if address != "auto":  # Otherwise no cluster runs on this host.
                raise
            asked = engine.fit([])
            needed = asked.head_cpus + asked.actor_hosts * asked.cpus_per_host
            ray.init(  # Ray also listens on the network, but creates an authentication token.
                num_cpus=max(os.cpu_count() or 1, needed),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
    except (ray.exceptions.RayError, RuntimeError, ValueError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        where = engine.address or "its default address"
        raise UsageError(f"cannot use the Ray cluster at {where}: {first_line}") from error


def _require_listener(address: str) -> None:
    try:
        _touch(address, CONNECT_SECONDS)
    except (OSError, OverflowError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {error}",
            "set --address or RAY_ADDRESS to the HOST:PORT that `ray start --head` printed, or leave both out",
        ) from error


def _touch(address: str, seconds: float) -> None:
    """Connects to HOST:PORT and closes the connection. Raises OSError if nothing listens."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), seconds).close()


class ControlService:
    """Ray's control service (GCS), on the cluster's head node. Without it, Ray's calls block."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._silent_since: float | None = None  # when the first of the last failures began
        self._ask_at = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether the last connection failed. Calls of Ray that ask the service may block then."""
        return self._silent_since is not None

    def is_lost(self) -> bool:
        """Connects to the service if that is due; returns whether it has stopped accepting connections."""
        now = time.monotonic()
        if now >= self._ask_at:
            try:
                _touch(self.address, ANSWER_SECONDS)
                self._silent_since = None
            except OSError:
                if self._silent_since is None:
                    self._silent_since = now
            self._ask_at = time.monotonic() + ASK_SECONDS
        return self._silent_since is not None and now - self._silent_since >= LOST_SECONDS


def _refuse_open(ray: Any, engine: RayEngine) -> None:
    """Raises UsageError if the cluster listens on the network and accepts code without authentication."""
    address = ray.get_runtime_context().gcs_address
    if not engine.insecure_no_auth and not address.startswith("127.") and lets_anybody_in(address):
        raise UsageError(
            f"the Ray cluster at {address} executes code from anyone who can connect",
            "start it with tokens: ray get-auth-token --generate; export RAY_AUTH_MODE=token, on every node and on "
            "this host. Or use --insecure-no-auth if you trust everyone who can connect",
        )


def lets_anybody_in(address: str) -> bool:
    """Whether the cluster's control service at HOST:PORT does not refuse a client without token and certificate."""
    import grpc

    refusals = {grpc.StatusCode.UNAUTHENTICATED}
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # TLS refuses a client without certificate.
        refusals.add(grpc.StatusCode.UNAVAILABLE)
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(PROBE)(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            return error.code() not in refusals
    return True


def read_nodes(ray: Any) -> list[tuple[bool, int]]:
    """Returns for each node whether it has a GPU, and its free CPUs.

    If none has a GPU, adds a node with a GPU that `ray up` on this host may start.
    """
    from ray._private.state import state

    free = state.available_resources_per_node()  # without the nodes of the last second
    alive = [(node["Resources"], free.get(node["NodeID"], node["Resources"])) for node in ray.nodes() if node["Alive"]]
    nodes = [("GPU" in total, int(left.get("CPU", 0))) for total, left in alive]
    if any(gpu for gpu, _ in nodes) or not CLUSTER_FILE.expanduser().is_file():
        return nodes
    kinds = json.loads(CLUSTER_FILE.expanduser().read_text())["available_node_types"].values()
    coming = [kind["resources"] for kind in kinds if kind["max_workers"] and kind["resources"].get("GPU")]
    return [*nodes, *((True, resources["CPU"]) for resources in coming[:1])]


class Needs(NamedTuple):
    """What a unit needs of its node, as options of Ray."""

    num_cpus: int
    memory: int  # bytes
    num_gpus: int = 0


def make_head(ray: Any, name: str, needs: Needs) -> tuple[Any, Any]:
    """Creates the head's unit in its own placement group; returns both.

    After a crash the unit restarts on the same node if that lives. The caller removes the group.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": float(needs.num_cpus), "memory": float(needs.memory), **({"GPU": 1.0} if needs.num_gpus else {})}
    group = ray.util.placement_group([bundle])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return _make(ray, Head, name, needs, strategy), group


def make_actor_host(ray: Any, name: str, needs: Needs) -> Any:
    """Creates a unit for actors. A unit that does not fit stays pending, so Ray's autoscaler adds a node."""
    return _make(ray, ActorHost, name, needs, "SPREAD")


def _make(ray: Any, kind: type[Unit], name: str, needs: Needs, strategy: Any) -> Any:
    remote = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=4, runtime_env=UNIT_ENVIRONMENT)(kind)
    # Ray refuses a name that its namespace has already: another run may have the same name, in another folder.
    named = {"name": name, "namespace": f"apex-{secrets.token_hex(4)}"}
    return remote.options(**named, **needs._asdict(), scheduling_strategy=strategy).remote()


def make_gauges(run: str) -> Callable[[RunStatus | None], None]:
    """Returns a function that shows a status in Ray's metrics: ray_apex_updates, _steps and _score, by run."""
    from ray.util.metrics import Gauge

    gauges = {name: Gauge(f"apex_{name}", tag_keys=("run",)) for name in ("updates", "steps", "score")}

    def show(status: RunStatus | None) -> None:
        if status is not None:
            values = {"updates": status.updates, "steps": status.steps, "score": status.evaluator.score}
            for name, value in values.items():
                gauges[name].set(value, {"run": run})  # None changes nothing.

    return show
