"""Which Ray clusters are used, and how a refusal reads. None of it needs Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import apex
from apex.config import ActorConfig, Config, RunConfig, TransportConfig
from apex.errors import UsageError
from apex.launch.local import main
from apex.launch.ray import cluster
from apex.launch.ray.driver import BEGUN, begin, plan, reopen, run, train
from apex.launch.ray.options import RayEngine
from apex.runs.lock import hold
from apex.runtime.lifecycle import Stop


def fake_ray(address="10.0.0.9:6379"):
    context = types.SimpleNamespace(gcs_address=address)
    return types.SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)


def open_fake(monkeypatch, engine, *, open_to_all, address="10.0.0.9:6379"):
    monkeypatch.setitem(sys.modules, "ray", fake_ray(address))
    monkeypatch.setattr(cluster, "lets_anybody_in", lambda address: open_to_all)
    with cluster.open_cluster(engine) as ray:
        return ray is sys.modules["ray"]


def test_a_cluster_beyond_loopback_that_answers_a_stranger_is_refused_unless_the_flag_is_typed(monkeypatch):
    with pytest.raises(
        UsageError, match=r"executes code from anyone who can connect.*RAY_AUTH_MODE=token.*--insecure-no-auth"
    ):
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
def test_only_a_cluster_that_asks_for_a_token_is_closed(status, is_open):
    grpc = pytest.importorskip("grpc", reason="needs grpcio, which Ray brings")
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Service(status and grpc.StatusCode[status])])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert cluster.lets_anybody_in(f"127.0.0.1:{port}") is is_open
    finally:
        server.stop(None).wait()


def test_a_cluster_that_does_not_answer_is_closed_only_if_ray_uses_tls(monkeypatch):
    pytest.importorskip("grpc", reason="needs grpcio, which Ray brings")
    with free_port() as address:
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        assert cluster.lets_anybody_in(address)
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert not cluster.lets_anybody_in(address)


@contextmanager
def free_port():
    """HOST:PORT at which nothing listens and nothing else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("way", ["--address", "RAY_ADDRESS"])
def test_an_address_at_which_nothing_listens_is_refused_with_its_name(monkeypatch, way):
    ray = types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with free_port() as address:
        monkeypatch.setenv("RAY_ADDRESS", address if way == "RAY_ADDRESS" else "127.0.0.1:1")
        engine = RayEngine(address=address if way == "--address" else "")
        with pytest.raises(UsageError, match=f"no Ray cluster answers at {address}"), cluster.open_cluster(engine):
            pass


@pytest.mark.parametrize("address", ["box", "box:port", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused_with_what_it_may_be(monkeypatch, address):
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None))
    with pytest.raises(UsageError, match=f"{address}.*HOST:PORT"), cluster.open_cluster(RayEngine(address=address)):
        pass


def test_without_ray_the_one_command_that_installs_it_is_named():
    program = "import sys; sys.modules['ray'] = None; from apex.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["train", "--engine", "ray", "--preset", "cartpole"]
    ended = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "apex train: --engine ray needs Ray" in ended.stderr
    assert ended.stderr.rstrip().endswith("-m pip install 'ray[default]'")


def test_a_run_without_the_engine_imports_nothing_of_ray():
    program = "import sys, apex.launch.local, apex.launch.api, apex.actor; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("config", "engine", "words"),
    [
        (Config(), {"actor_hosts": 0}, "--actor-hosts must be a whole number >= 1, got 0"),
        (Config(), {"cpus_per_host": 0}, "--cpus-per-host must be"),
        (Config(), {"head_cpus": "2"}, "--head-cpus must be a whole number >= 1, got '2'"),
        (Config(), {"address": "ray://far:10001"}, "Ray Client addresses are not supported"),
        (Config(run=RunConfig(single_process=True)), {}, "run.single_process cannot be set with --engine ray"),
        (Config(transport=TransportConfig(keys="keys")), {}, "transport.keys cannot be set with --engine ray"),
    ],
)
def test_what_cannot_run_there_is_refused_before_anything_is_started(tmp_path, monkeypatch, config, engine, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        plan(config, RayEngine(**engine))
    assert not list(tmp_path.iterdir())


def test_every_process_has_as_many_environments_and_their_number_is_raised_where_it_must(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = RayEngine(actor_hosts=3, cpus_per_host=2)
    launch = begin(plan(Config(actor=ActorConfig(num_actors=16), run=RunConfig(name="a")), engine), engine)
    assert (launch.config.actor.num_actors, launch.config.actor.envs_per_process) == (18, 3)
    assert launch.config.run.head
    assert launch.run_folder == tmp_path / "runs" / "a"
    assert plan(Config(), engine).actor.num_actors == 96
    small = Config(actor=ActorConfig(envs_per_process=4))
    assert plan(small, engine).actor.num_actors == 24


def test_a_run_goes_on_with_what_it_was_begun_with_and_what_is_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    engine = RayEngine(actor_hosts=3, insecure_no_auth=True, address="far:1")
    begun = begin(plan(Config(run=RunConfig(name="a")), engine), engine)
    (begun.folder / BEGUN).touch()
    again = reopen("runs/a", types.SimpleNamespace(actor_hosts=None, head_cpus=5))
    assert (again.config, again.begun) == (begun.config, True)
    assert again.engine == RayEngine(actor_hosts=3, head_cpus=5)
    with pytest.raises(UsageError, match="--resume b: no such run was started on Ray from this host"):
        reopen("b", types.SimpleNamespace())


def test_a_run_is_found_by_its_name_and_by_each_of_its_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = begin(plan(Config(run=RunConfig(name="a")), RayEngine()), RayEngine())
    other = begin(plan(Config(run=RunConfig(name="a", folder="elsewhere")), RayEngine()), RayEngine())
    for name, launch in [
        ("a", default),
        ("runs/a", default),
        ("elsewhere/a", other),
        ("elsewhere/ray/a", other),
        (str(other.folder), other),
        (str(other.run_folder), other),
    ]:
        assert reopen(name, types.SimpleNamespace()) == launch._replace(
            engine=reopen(name, types.SimpleNamespace()).engine
        )


def test_a_run_that_never_began_is_not_resumed_as_one_that_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin(plan(Config(run=RunConfig(name="a")), RayEngine()), RayEngine())
    assert not reopen("a", types.SimpleNamespace()).begun


def test_a_name_that_a_local_run_has_taken_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    with pytest.raises(UsageError, match="runs/a exists already; choose another name"):
        begin(plan(Config(run=RunConfig(name="a")), RayEngine()), RayEngine())


def test_a_cluster_that_cannot_be_used_costs_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None))
    with free_port() as address, pytest.raises(UsageError, match="no Ray cluster answers"):
        train(Config(run=RunConfig(name="a")), RayEngine(address=address), Stop(), [])
    assert not list(tmp_path.iterdir())


def test_a_second_driver_of_a_run_is_refused_and_the_first_keeps_its_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launch = begin(plan(Config(run=RunConfig(name="a")), RayEngine()), RayEngine())
    (launch.folder / "secrets").mkdir()
    with hold(launch.folder), pytest.raises(UsageError, match=r"still running \(process \d+ on .*stop it first"):
        run(None, launch, Stop(), [])
    assert (launch.folder / "secrets").is_dir()


@pytest.mark.parametrize("words", [["--actor-hosts", "2"], ["--address=box:1"], ["--head-cpus", "0"]])
def test_an_option_of_ray_without_its_engine_is_refused(words, capsys):
    assert main(["--preset", "cartpole", *words]) == 2
    assert f"{words[0].partition('=')[0]}: only with --engine ray" in capsys.readouterr().err


def test_accepting_changes_is_refused_with_ray(capsys):
    assert main(["--engine", "ray", "--resume", "a", "--accept-changes"]) == 2
    assert "--accept-changes cannot be used with --engine ray" in capsys.readouterr().err


def test_what_is_no_configuration_is_refused_by_the_api():
    with pytest.raises(UsageError, match=r"config must be an apex\.Config"):
        apex.train("cartpole", engine="ray")


def test_an_engine_that_is_none_is_refused_by_the_api():
    with pytest.raises(UsageError, match=r'engine must be "local", "ray" or an apex.RayEngine, got 7'):
        apex.train(apex.preset("cartpole"), engine=7)
