"""A run uses free ports, and reports when they differ from the configured ones."""

import dataclasses
import socket

import pytest

from apex.config import Config, ReplayConfig, RunConfig, TransportConfig
from apex.runtime.ports import PortClaims, choose_ports, is_free, ports
from apexreplay.errors import UsageError


def all_free_but(*taken):
    return lambda host, port: port not in taken


def choose(config, free):
    """The chosen configuration and the messages."""
    messages = []
    return choose_ports(config, free, messages.append), messages


def test_free_ports_are_used_without_a_message():
    assert choose(Config(), all_free_but()) == (Config(), [])


@pytest.mark.parametrize("taken", ports(Config()))
def test_an_occupied_port_moves_all_ports_with_a_message(taken):
    config, messages = choose(Config(), all_free_but(taken))
    assert config.transport == TransportConfig(port_offset=100)
    (message,) = messages
    assert "127.0.0.1" in message
    assert "port-offset 100" in message


def test_the_search_begins_at_the_configured_offset():
    asked = Config(transport=TransportConfig(port_offset=30))
    config, _ = choose(asked, all_free_but(21_031, 21_131))
    assert config.transport.port_offset == 230


def test_a_host_without_free_ports_is_refused_with_the_setting():
    with pytest.raises(UsageError, match="port-offset 0"):
        choose(Config(), lambda host, port: False)


def test_tensorboard_uses_the_next_free_port_with_a_message():
    config, messages = choose(Config(), all_free_but(6006, 6007))
    assert config.run.tensorboard_port == 6008
    (message,) = messages
    assert "6006" in message
    assert "6008" in message


def test_tensorboard_stays_clear_of_the_ports_of_the_run():
    config, _ = choose(Config(run=RunConfig(tensorboard_port=21_001)), all_free_but())
    assert config.run.tensorboard_port == 21_005


def test_without_any_port_for_tensorboard_it_names_the_setting():
    own = ports(Config())
    with pytest.raises(UsageError, match=r"--run\.tensorboard-port 6006"):
        choose(Config(), lambda host, port: port in own)


def test_without_tensorboard_its_port_does_not_matter():
    config = dataclasses.replace(Config(), run=RunConfig(tensorboard=False))
    assert choose(config, all_free_but(6006)) == (config, [])


def test_a_claimed_port_is_reserved_until_its_launcher_ends():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with PortClaims() as first, PortClaims() as second:
        assert first.claim("127.0.0.1", port)
        assert first.claim("127.0.0.1", port)
        assert not second.claim("127.0.0.1", port)
    with PortClaims() as third:
        assert third.claim("127.0.0.1", port)


def test_the_second_of_two_simultaneous_starts_moves_to_other_ports():
    config = Config(transport=TransportConfig(port_offset=7_000), run=RunConfig(tensorboard=False))
    with PortClaims() as first, PortClaims() as second:
        ours, _ = choose(config, first.claim)
        theirs, messages = choose(config, second.claim)
    assert not set(ports(ours)) & set(ports(theirs))
    assert len(messages) == 1


def test_a_port_is_free_until_somebody_listens():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen()
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_an_address_of_another_host_is_refused_by_name():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:21001"):
        is_free("192.0.2.1", 21_001)


@pytest.mark.parametrize("taken", [21_011, 21_012, 21_013, 21_014])
def test_only_the_ports_of_existing_shards_count(taken):
    two = Config(replay=ReplayConfig(num_shards=2))
    assert len(ports(two)) == len(set(ports(two))) == len(ports(Config())) + 4

    assert choose(two, all_free_but(taken))[0].transport.port_offset == 100
    assert choose(Config(), all_free_but(taken))[0].transport.port_offset == 0


def test_every_sampler_needs_a_port_of_its_own():
    assert set(ports(Config(replay=ReplayConfig(num_samplers=3)))) - set(ports(Config())) == {21_014, 21_024}


def test_shards_that_find_no_room_below_the_last_port_are_refused_by_name():
    config = Config(replay=ReplayConfig(num_shards=64), transport=TransportConfig(receipts_port=64_000))
    needed = len(ports(config))
    with pytest.raises(UsageError, match=rf"\b{needed} free ports.*127\.0\.0\.1 .*--transport\.port-offset 0"):
        choose(config, lambda host, port: False)
