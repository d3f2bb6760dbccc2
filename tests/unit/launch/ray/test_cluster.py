"""Ray clusters that are refused, and starts on Ray. None of it needs Ray."""

import json
import socket
import subprocess
import sys
import types
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest

from apex.config import ActorConfig, Config, RunConfig, TransportConfig
from apex.launch.engine import RayEngine
from apex.launch.ray import cluster, driver
from apex.launch.ray.driver import continue_on_ray, create_on_ray, plan, reopen_on_ray
from apex.launch.start import Start
from apex.launch.train import execute, main
from apex.runs.lock import hold
from apexreplay.errors import REFUSED, UsageError
from apexreplay.process.lifecycle import Stop


def fake_ray(address="10.0.0.9:6379"):
    context = types.SimpleNamespace(gcs_address=address)
    return types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)


def open_fake(monkeypatch, engine, *, open_to_all, address="10.0.0.9:6379"):
    monkeypatch.setitem(sys.modules, "ray", fake_ray(address))
    monkeypatch.setattr(cluster, "lets_anybody_in", lambda address: open_to_all)
    with cluster.open_cluster(engine) as ray:
        return ray is sys.modules["ray"]


def test_a_cluster_on_the_network_without_tokens_is_refused(monkeypatch):
    with pytest.raises(UsageError, match=r"10\.0\.0\.9:6379.*RAY_AUTH_MODE=token.*--insecure-no-auth"):
        open_fake(monkeypatch, RayEngine(), open_to_all=True)
    assert open_fake(monkeypatch, RayEngine(insecure_no_auth=True), open_to_all=True)
    assert open_fake(monkeypatch, RayEngine(), open_to_all=False)
    assert open_fake(monkeypatch, RayEngine(), open_to_all=True, address="127.0.0.1:6379")


class Service:
    """A server that ends each call with a status."""

    def __init__(self, status):
        self._status = status

    def service(self, details):
        grpc = pytest.importorskip("grpc")
        return grpc.unary_unary_rpc_method_handler(
            lambda _, call: call.abort(self._status, "") if self._status else b""
        )


@pytest.mark.parametrize(
    ("status", "is_open"), [("", True), ("UNAUTHENTICATED", False), ("UNIMPLEMENTED", True), ("INTERNAL", True)]
)
def test_only_a_cluster_that_requires_a_token_is_closed(status, is_open):
    grpc = pytest.importorskip("grpc", reason="needs grpcio, which Ray brings")
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Service(status and grpc.StatusCode[status])])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert cluster.lets_anybody_in(f"127.0.0.1:{port}") is is_open
    finally:
        server.stop(None).wait()


def test_a_silent_cluster_is_closed_only_if_ray_uses_tls(monkeypatch):
    pytest.importorskip("grpc", reason="needs grpcio, which Ray brings")
    with free_port() as address:
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        assert cluster.lets_anybody_in(address)
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert not cluster.lets_anybody_in(address)


@contextmanager
def free_port():
    """Yields HOST:PORT of a reserved port without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("way", ["--address", "RAY_ADDRESS"])
def test_an_address_without_a_listener_is_refused_by_name(monkeypatch, way):
    ray = types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with free_port() as address:
        monkeypatch.setenv("RAY_ADDRESS", address if way == "RAY_ADDRESS" else "127.0.0.1:1")
        engine = RayEngine(address=address if way == "--address" else "")
        with pytest.raises(UsageError, match=address), cluster.open_cluster(engine):
            pass


@pytest.mark.parametrize("address", ["box", "box:port", "127.0.0.1:70000"])
def test_a_malformed_address_is_refused(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None))
    with pytest.raises(UsageError, match=f"{address}.*HOST:PORT"), cluster.open_cluster(RayEngine(address=address)):
        pass


def test_a_control_service_is_lost_after_seconds_without_an_answer(monkeypatch):
    now, lost = 100.0, cluster.LOST_SECONDS
    monkeypatch.setattr(cluster.time, "monotonic", lambda: now)

    def is_lost_after(seconds):
        nonlocal now
        now += seconds
        return service.is_lost()

    with free_port() as address:
        service = cluster.ControlService(address)
        assert not any(map(is_lost_after, (0.0, lost - 0.1)))
        assert service.is_silent
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        assert not is_lost_after(cluster.ASK_SECONDS)
        assert not service.is_silent
    assert [is_lost_after(seconds) for seconds in (cluster.ASK_SECONDS, lost - 0.1, 0.2)] == [False, False, True]


def test_a_control_service_counts_as_lost_within_ten_seconds():
    assert cluster.ASK_SECONDS + cluster.ANSWER_SECONDS + cluster.LOST_SECONDS < 10


@pytest.mark.parametrize(
    ("nodes", "hosts", "cpus", "head"),
    [
        ([], 1, 1, 1),
        ([(False, 0)], 1, 1, 1),
        ([(False, 1)], 1, 1, 1),
        ([(False, 7)], 1, 4, 3),
        ([(False, 2), (False, 4)], 1, 2, 4),
        ([(False, 64), (True, 8), (False, 64), (False, 9)], 2, 64, 8),
        ([(False, 8), (False, 4), (False, 4), (False, 16)], 4, 4, 16),
    ],
)
def test_a_run_without_sizes_uses_the_free_cpus(nodes, hosts, cpus, head):
    assert RayEngine().fit(nodes) == RayEngine(actor_hosts=hosts, cpus_per_host=cpus, head_cpus=head)


def test_a_run_with_a_size_has_1_for_the_others():
    fitted = RayEngine(address="a:1", actor_hosts=3).fit([(True, 64)] * 4)
    assert fitted == RayEngine(address="a:1", actor_hosts=3, cpus_per_host=1, head_cpus=1)


HEAD_TYPE = {"max_workers": 0, "resources": {"CPU": 2, "GPU": 4}}


def nodes_of(monkeypatch, *resources):
    """What is read of nodes with these resources, each with 3 free CPUs, and of a dead node."""
    nodes = [{"NodeID": str(number), "Alive": True, "Resources": each} for number, each in enumerate(resources)]
    state = types.SimpleNamespace(available_resources_per_node=lambda: {node["NodeID"]: {"CPU": 3.0} for node in nodes})
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray._private", types.ModuleType("ray._private"))
    monkeypatch.setitem(sys.modules, "ray._private.state", types.SimpleNamespace(state=state))
    dead = {"NodeID": "dead", "Alive": False, "Resources": {"GPU": 1.0}}
    return cluster.read_nodes(types.SimpleNamespace(nodes=lambda: [*nodes, dead]))


def test_a_node_with_a_gpu_counts_if_ray_up_may_start_it(here, monkeypatch):
    def write(resources):
        types = {"head": HEAD_TYPE, "workers": {"max_workers": 2, "resources": resources}}
        (here / "ray_bootstrap_config.yaml").write_text(json.dumps({"available_node_types": types}))

    monkeypatch.setenv("HOME", str(here))
    assert nodes_of(monkeypatch, {"CPU": 4.0}) == [(False, 3)]
    write({"CPU": 8, "GPU": 1})
    assert nodes_of(monkeypatch, {"CPU": 4.0}) == [(False, 3), (True, 8)]
    assert nodes_of(monkeypatch, {"CPU": 4.0, "GPU": 1.0}) == [(True, 3)]
    write({"CPU": 8})
    assert nodes_of(monkeypatch, {"CPU": 4.0}) == [(False, 3)]


def test_without_ray_the_command_that_installs_it_is_shown():
    program = "import sys; sys.modules['ray'] = None; from apex.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["train", "--engine", "ray", "--preset", "cartpole"]
    ended = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.rstrip().endswith("-m pip install 'ray[default]'")


def test_a_run_without_the_engine_imports_nothing_of_ray():
    program = "import sys, apex.launch.train, apex.launch.api, apex.actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("config", "engine", "name"),
    [
        (Config(), {"actor_hosts": -1}, r"--actor-hosts.*-1"),
        (Config(), {"cpus_per_host": True}, "--cpus-per-host"),
        (Config(), {"head_cpus": "2"}, "--head-cpus.*'2'"),
        (Config(), {"address": "ray://far:10001"}, "ray://far:10001"),
        (Config(run=RunConfig(single_process=True)), {}, "run.single_process"),
        (Config(transport=TransportConfig(keys="keys")), {}, "transport.keys"),
    ],
)
def test_settings_that_ray_does_not_support_are_refused_by_name(here, config, engine, name):
    with pytest.raises(UsageError, match=name):
        plan(config, RayEngine(**engine))
    assert not list(here.iterdir())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder of a user who has no run yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/nonexistent")
    return tmp_path


def create(engine=None, **branches):
    """A new run called `a`."""
    engine = (engine or RayEngine()).fit([])
    branches = {"run": RunConfig(name="a"), **branches}
    return create_on_ray(plan(Config(**branches), engine), engine, ["apex"])


def reopen(name, **typed):
    return reopen_on_ray(name, Namespace(**typed), ["apex"])


def test_every_process_has_the_same_number_of_environments(here):
    engine = RayEngine(actor_hosts=3, cpus_per_host=2)
    actor = plan(Config(actor=ActorConfig(num_actors=16)), engine).actor
    assert (actor.num_actors, actor.envs_per_process) == (18, 3)
    assert plan(Config(), engine).actor.num_actors == 96
    assert plan(Config(actor=ActorConfig(envs_per_process=4)), engine).actor.num_actors == 24
    config = plan(Config(), engine)
    assert config.run.head
    assert config.run.folder == str(here / "runs")


def test_a_resumed_run_has_its_saved_settings_and_the_typed_options(here):
    engine = RayEngine(actor_hosts=3, insecure_no_auth=True, address="far:1")
    start = create(engine)
    again = reopen("runs/a", actor_hosts=None, head_cpus=5)
    assert (again.config, again.folder) == (start.config, start.folder)
    assert again.engine == RayEngine(actor_hosts=3, cpus_per_host=1, head_cpus=5)
    saved = start.folder / "launch.json"
    older = json.loads(saved.read_text())
    older["config"]["transport"]["metrics_port"] = 52004  # a setting that older versions saved
    saved.write_text(json.dumps(older))
    assert reopen("runs/a").config == start.config
    with pytest.raises(UsageError, match="--resume b"):
        reopen("b")


def test_a_run_is_found_by_its_name_and_by_each_of_its_paths(here):
    default = create().folder
    other = create(run=RunConfig(name="a", folder="elsewhere")).folder
    for name in ("a", "runs/a"):
        assert reopen(name).folder == default
    for name in ("elsewhere/a", "elsewhere/ray/a", str(other), str(here / "elsewhere" / "a")):
        assert reopen(name).folder == other


def again(config, engine=None):
    return continue_on_ray(config, engine or RayEngine(), Namespace(), ["apex"])


def test_a_command_with_continue_begins_a_run_and_then_continues_it(here):
    config = Config(run=RunConfig(name="a", mirror="mirrors"))
    first = again(config)
    assert (first.config, first.folder, first.repeated) == (config, None, config)
    begun = create(run=config.run)
    assert begun.config.run.mirror == str(here / "mirrors"), "the head's host may have another current folder"
    second = again(config)
    assert (second.config, second.folder, second.repeated) == (begun.config, begun.folder, config)


def test_a_command_with_continue_needs_a_name_and_the_same_settings(here):
    create()
    with pytest.raises(UsageError, match="--name"):
        again(Config())
    with pytest.raises(UsageError, match="other settings"):
        again(Config(seed=2, run=RunConfig(name="a")))


def test_a_run_that_continues_may_have_a_folder_on_this_host(here):
    (here / "runs" / "a").mkdir(parents=True)
    planned = plan(Config(run=RunConfig(name="a")), RayEngine())
    assert create_on_ray(planned, RayEngine(), [], continues=True).folder == here / "runs/ray/a"


def test_the_name_of_a_local_run_is_refused(here):
    (here / "runs" / "a").mkdir(parents=True)
    with pytest.raises(UsageError, match="runs/a") as error:
        create()
    assert error.value.remedy


def test_a_cluster_that_cannot_be_used_reserves_no_name(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None))
    with free_port() as address, pytest.raises(UsageError, match=address):
        execute(Start(config=Config(), argv=[], engine=RayEngine(address=address)), Stop())
    assert not list(here.iterdir())


def test_a_second_driver_of_a_run_is_refused_and_the_first_keeps_its_keys(here, monkeypatch):
    start = create()
    (start.folder / "secrets").mkdir()
    monkeypatch.setattr(driver, "open_cluster", lambda engine: nullcontext())
    monkeypatch.setattr(driver, "read_nodes", lambda ray: [])
    with hold(start.folder), pytest.raises(UsageError, match=r"process \d+ on "):
        execute(start, Stop())
    assert (start.folder / "secrets").is_dir()


@pytest.mark.parametrize("arguments", [["--actor-hosts", "2"], ["--address=box:1"], ["--head-cpus", "0"]])
def test_an_option_of_ray_without_its_engine_is_refused(arguments, capsys):
    assert main(["--preset", "cartpole", *arguments]) == REFUSED
    assert arguments[0].partition("=")[0] in capsys.readouterr().err


def test_accepting_changes_is_refused_with_ray(capsys):
    assert main(["--engine", "ray", "--resume", "a", "--accept-changes"]) == REFUSED
    assert "--accept-changes" in capsys.readouterr().err
