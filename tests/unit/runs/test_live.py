"""A program without an address joins the newest live run of the folder `runs`, and finds the keys of a live run."""

import os

import pytest
from support.builders import VECTORS

from apex.config import Config, RunConfig, TransportConfig
from apex.config.arguments import Parser
from apex.runs.folder import RunFolder
from apex.runs.live import find_route
from apex.runs.lock import hold
from apex.transport.hello import Route, add_route_options
from apexreplay.errors import UsageError


def parse(*arguments):
    parser = Parser(prog="apex actor")
    add_route_options(parser)
    return parser.parse_args(arguments)


def make_run(folder, name, **transport):
    config = Config(run=RunConfig(folder=str(folder), name=name), transport=TransportConfig(**transport))
    return RunFolder.create(config, VECTORS, argv=[])


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_the_newest_live_run_is_joined_with_its_address_and_keys(runs, capsys, caplog):
    caplog.set_level("INFO", "apex")
    for name, offset in (("old", 100), ("live", 200), ("ended", 300)):
        make_run(runs, name, port_offset=offset, keys="keys")
    with hold(runs / "old"), hold(runs / "live"):
        assert find_route(parse()) == Route("127.0.0.1", 22_203, "keys")
        assert find_route(parse("--keys", "mine")).keys == "mine"
        assert "runs/live" in capsys.readouterr().err
        assert find_route(parse("--learner", "gpu1")) == Route("gpu1", 22_003)
        assert "gpu1:22003" in caplog.messages[-1]  # Otherwise the log of an actor is empty until it has joined.
    with hold(runs / "old"):
        assert find_route(parse()).port == 22_103


def test_the_keys_of_a_run_are_found_by_its_address(runs):
    run, address = make_run(runs, "one", port_offset=50), ("--learner", "127.0.0.1:22053")
    (run.path / "keys").mkdir()
    make_run(runs, "ended")
    with hold(run.path):
        for learner in ("127.0.0.1", "localhost"):
            assert find_route(parse("--learner", f"{learner}:22053")).keys == "runs/one/keys"
        assert find_route(parse()).keys == "runs/one/keys"
        assert find_route(parse(*address, "--keys", "mine")).keys == "mine"
        for others in ((*address, "--insecure-no-auth"), ("--learner", "127.0.0.1"), ("--learner", "gpu1:22053")):
            assert find_route(parse(*others)).keys == ""
    assert find_route(parse(*address)).keys == ""  # The run has ended.
    assert (run.config_with_keys.transport.keys, run.config.transport.keys) == (run.keys, "")


@pytest.mark.parametrize(("transport", "keys"), [({"insecure_no_auth": True}, ""), ({"keys": "mine"}, "mine")])
def test_keys_of_a_killed_launcher_do_not_replace_the_configured_ones(runs, transport, keys):
    run = make_run(runs, "one", **transport)
    (run.path / "keys").mkdir()
    assert run.config_with_keys.transport.keys == keys


def test_a_run_that_is_bound_to_an_address_is_reached_there(runs):
    run = make_run(runs, "one", bind="10.77.0.1", keys="keys")
    with hold(run.path):
        assert find_route(parse()).host == "10.77.0.1"
        assert find_route(parse("--learner", "10.77.0.1")).keys == "keys"


@pytest.mark.parametrize("spoil", ["other user", "other format"])
def test_a_run_of_another_user_or_format_is_not_joined(runs, monkeypatch, spoil):
    run = make_run(runs, "one", keys="theirs")
    with hold(run.path):
        if spoil == "other user":
            monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
        else:
            monkeypatch.setattr("apex.runs.folder.FORMAT", 99)
        assert find_route(parse("--learner", "127.0.0.1")).keys == ""
        with pytest.raises(UsageError):
            find_route(parse())


def test_without_a_live_run_an_address_is_required(runs):
    make_run(runs, "ended")
    with pytest.raises(UsageError, match="runs") as refused:
        find_route(parse())
    assert "--learner" in refused.value.remedy
