"""Connects to a Ray cluster or starts one, refuses clusters without authentication, and creates units on it."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from apex.launch.engine import RayEngine
from apex.launch.ray.unit import Unit
from apex.runtime.optional_imports import remedy
from apexreplay.errors import UsageError

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum: the run does not use it, and the replay memory needs /dev/shm
PROBE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
PROBE_SECONDS = 5.0
CONNECT_SECONDS = 5.0  # Ray itself would wait minutes for an address at which nothing listens
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
            needed = engine.head_cpus + engine.actor_hosts * engine.cpus_per_host
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
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {error}",
            "set --address or RAY_ADDRESS to the HOST:PORT that `ray start --head` printed, or leave both out",
        ) from error


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


def make_head(ray: Any, num_cpus: int, *, gpu: bool) -> tuple[Any, Any]:
    """Creates the head's unit in its own placement group; returns both.

    After a crash the unit restarts on the same node if that lives. The caller removes the group.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": float(num_cpus), **({"GPU": 1.0} if gpu else {})}
    group = ray.util.placement_group([bundle])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return _remote(ray).options(num_cpus=num_cpus, num_gpus=int(gpu), scheduling_strategy=strategy).remote(), group


def make_actor_host(ray: Any, num_cpus: int) -> Any:
    """Creates a unit for actors. A unit that does not fit stays pending, so Ray's autoscaler adds a node."""
    return _remote(ray).options(num_cpus=num_cpus, scheduling_strategy="SPREAD").remote()


def _remote(ray: Any) -> Any:
    return ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=4, runtime_env=UNIT_ENVIRONMENT)(Unit)
