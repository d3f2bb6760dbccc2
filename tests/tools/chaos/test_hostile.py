"""`python -m chaos hostile`: the attacks reach the sockets, and the programs survive them."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import zmq

from apexreplay.transport.sockets import bind, open_context
from chaos.hostile.command import main
from chaos.hostile.strangers import attacks, enter, frame, send_without_end

DEADLINE = 10_000


@pytest.fixture
def receiver():
    with open_context() as context:
        made = context.socket(zmq.PULL)
        made.linger = 0
        bind(made, "tcp://127.0.0.1:*", "experience")
        yield made


def dial(receiver):
    host, port = receiver.last_endpoint.decode().removeprefix("tcp://").split(":")
    return host, int(port)


def test_an_endless_message_never_arrives(receiver):
    send_without_end(*dial(receiver), 1 << 17).close()
    with socket.create_connection(dial(receiver)) as peer:
        enter(peer, b"PUSH")
        peer.sendall(frame(b"whole"))
        assert receiver.poll(DEADLINE)
        assert receiver.recv_multipart() == [b"whole"]


def test_every_attack_sends_different_bytes(receiver):
    rng, sent = Random(0), {}
    for name, attack in attacks("experience").items():
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(b"READY")  # the part of the answer that an attack waits for
            attack(ours, rng)
            ours.setblocking(False)
            theirs.setblocking(False)
            try:
                sent[name] = theirs.recv(1 << 16)
            except BlockingIOError:
                sent[name] = name.encode()  # This attack sends nothing.
    assert len(set(sent.values())) == len(attacks("experience")) == 12


@pytest.mark.parametrize("arguments", [["--connections", "0"], ["--endless", "-1"]])
def test_a_number_out_of_range_is_refused_with_its_option(arguments, capsys):
    assert main(arguments) == 2
    assert arguments[0] in capsys.readouterr().err


ROOT = Path(__file__).parents[3]


@pytest.mark.covers_programs
@pytest.mark.timeout(320)
@pytest.mark.parametrize("keys", [[], ["--curve"]], ids=["plain", "curve"])
def test_a_run_survives_hostile_connections_and_counts_them(tmp_path, keys):
    command = [sys.executable, "-m", "chaos", "hostile", "--connections", "120", "--rate", "500", "--quiet", "0.5"]
    endless = "32" if keys else "0"  # MiB, more than the kernel buffers before it notices the closed connection
    process = subprocess.run(
        [*command, "--endless", endless, "--json", *keys], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    figures = json.loads(process.stdout.splitlines()[-1])  # The exit status also depends on the speed of the machine.
    assert figures["server_is_up"]
    assert figures["connections"] + figures["connections_not_accepted"] == 120
    assert figures["curve"] == bool(keys)
    if keys:
        kinds = {"an unknown key", "rubbish in a curve hello", "a curve hello without an end"}
        assert kinds < {kind for kind, count in figures["connections_by_kind"].items() if count}
        assert any("unknown key" in reason for reason in figures["refused_connections"])
        assert figures["endless_bytes_sent"] == 0  # The server closed the connection.
    else:
        assert {name.split()[0] for name in figures["refusals"]} >= {"replay", "control"}
    assert figures["honest_batches"] > 0
