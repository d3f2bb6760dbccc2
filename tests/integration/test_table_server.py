"""A server of tables in its own processes: writers, samplers by memory and by messages, limits, keys, errors."""

import gc
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from support.table_servers import (
    NUMBERS,
    SMALL,
    Restarting,
    append,
    free_port,
    group,
    memories,
    read_all,
)
from support.tables import TABLES, Twin
from support.waiting import DEADLINE, until
from zmq.utils.monitor import recv_monitor_message

from apexreplay import Client, TableSettings, cli, serve, serving, table
from apexreplay.client import sampler as sampler_module
from apexreplay.client import writer as writer_module
from apexreplay.errors import FAILED, DataError, UsageError
from apexreplay.files.atomic_files import seal
from apexreplay.item_kinds import Window
from apexreplay.process.spawn import spawn
from apexreplay.store.location import is_wanted
from apexreplay.transport import roles
from apexreplay.transport.roles import create_keys, read_keys
from apexreplay.transport.sockets import connect, open_context

KINDS = {
    "steps": "image and numbers",
    "dictionary": "a dictionary",
    "windows": "windows of a dictionary",
    "sequences": "overlapping sequences",
}
BOTH = pytest.mark.parametrize("shared", [True, False], ids=["memory", "messages"])


@pytest.fixture(scope="module")
def server(starting_for_all):
    """One server for the tests that need no limits."""
    limits = {"capacity": 2_000, "segment_length": 20, "num_samplers": 2}
    tables = [TableSettings(table=replace(TABLES[kind], name=name), **limits) for name, kind in KINDS.items()]
    for name, exponent in (("numbers", 1.0), ("uniform", 0.0), ("pairs", 0.0)):
        own = {"priority_exponent": exponent, "num_samplers": int(name != "pairs")}
        tables.append(TableSettings(table=replace(NUMBERS, name=name), **own, **SMALL))
    return starting_for_all(*tables)


@pytest.mark.parametrize("name", KINDS)
def test_samplers_return_what_a_writer_appended(server, name):
    with server.client() as client, client.writer(name, timeout=DEADLINE) as writer:
        twin = Twin(writer.table, 1, writer)
        twin.fill(150)
        writer.flush(DEADLINE)
        writer.version = 7
        twin.fill(300)
        writer.flush(DEADLINE)
        assert writer.num_unstored == 0
        for shared in (True, False):
            with client.sampler(name, 64, shared_memory=shared, timeout=DEADLINE) as sampler:
                assert sampler.reads_memory == shared
                assert sampler.table == writer.table
                for batch in islice(sampler, 6):
                    twin.check(batch.keys, batch.fields)
                    assert set(batch.fields) == set(twin.items[0])
                    np.testing.assert_array_equal(batch.versions, np.where(batch.keys < 150, 0, 7))
                    np.testing.assert_allclose(batch.probabilities, 1 / 300)
                    assert batch.num_items == 300
                    assert batch.lengths.max() <= writer.table.item.max_steps

        def reported():
            status = client.status(timeout=DEADLINE).tables[name]
            assert (status.writers, status.capacity) == (1, 2_000)
            return status.replay.size == 300

        until(reported, "status")


@BOTH
@pytest.mark.parametrize("name", ["numbers", "uniform"])
def test_priorities_change_the_draws_unless_they_are_uniform(starting, name, shared):
    declared = TableSettings(table=replace(NUMBERS, name=name), priority_exponent=1.0 * (name == "numbers"), **SMALL)
    server = starting(declared)
    with server.client() as client, client.writer(name) as writer:
        for x in range(40):
            writer.append({"x": x}, 1.0)
        writer.flush(DEADLINE)
        with client.sampler(name, 200, shared_memory=shared) as sampler:
            batch = sampler.sample(DEADLINE)
            assert set(batch["x"]) == set(range(40))
            pairs, many = np.ones((2, 2), np.int64), np.ones(65_537, np.int64)
            for values, keys in ((np.ones(199), None), (pairs, pairs), (many, many), ([1.0], [1.5]), (["one"], [1])):
                with pytest.raises(UsageError):
                    sampler.update_priorities(batch, values, keys)
            sampler.update_priorities(batch, np.where(batch["x"] < 4, [100.0], [1e-6]))
            sampler.update_priorities(batch, np.array([50.0, np.nan, 1.0]), np.array([3, 2, 10**6]))

            def changed():
                drawn = sampler.sample(DEADLINE)
                shares = np.bincount(drawn["x"], minlength=40) / 200
                if name == "numbers":
                    expected = np.array([100, 100, 100, 50] + [0] * 36) / 350
                else:
                    expected = np.full(40, 1 / 40)
                    np.testing.assert_allclose(drawn.probabilities, expected[drawn["x"]])
                    assert client.status().tables[name].replay.stale_priorities < 2
                close = np.allclose(shares, expected, atol=0.02)
                return close and np.allclose(drawn.probabilities, expected[drawn["x"]], rtol=1e-3)

            until(changed, "new priorities")

            def refusal():
                replay = client.status(timeout=DEADLINE).tables[name].replay
                return (replay.stale_priorities, replay.refusals) == (1, {"priority is not a number": 1})

            until(refusal, "counts of refused priorities")


def test_the_oldest_items_are_removed_by_number_and_by_bytes(starting):
    noise = table("noise", {"image": ("uint8", (1_000,))})
    few = TableSettings(table=NUMBERS, capacity=60, segment_length=10, priority_exponent=0.0)
    small = TableSettings(table=noise, segment_length=10, max_bytes=40_000, priority_exponent=0.0)
    server, rng = starting(few, small), np.random.default_rng(1)
    with server.client() as client, client.writer("numbers") as numbers, client.writer("noise") as images:
        for x in range(205):
            numbers.append({"x": x})
            images.append({"image": rng.integers(0, 256, 1_000).astype(np.uint8)})
        numbers.flush(DEADLINE)
        images.flush(DEADLINE)
        with client.sampler("numbers", 130) as sampler:
            kept = read_all(sampler)
            assert 50 <= len(kept) <= 60
            np.testing.assert_array_equal(kept, np.arange(205 - len(kept), 205))
        with client.sampler("noise", 130) as sampler:
            keys = np.unique(sampler.sample(DEADLINE).keys)
            assert 20 < len(keys) < 40
            np.testing.assert_array_equal(keys, np.arange(205 - len(keys), 205))

        def reported():
            replay = client.status(timeout=DEADLINE).tables["noise"].replay
            return replay.num_inserted == 205 and replay.bytes <= replay.max_bytes == 40_000

        until(reported, "status")


@BOTH
def test_draws_and_inserts_wait_for_each_other(starting, shared):
    """samples_per_insert 2 from (10 items, 0 draws) on, with a slack of 20 draws; batches and segments of 10."""
    limits = {"min_size": 10, "samples_per_insert": 2.0, "tolerance": 1.0, "inserts_wait": True, "window": 2}
    server = starting(TableSettings(table=NUMBERS, **SMALL, **limits))
    with (
        server.client() as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 10, shared_memory=shared, prefetch=1) as sampler,
    ):

        def draw_all():
            """Returns the number of batches until the limit."""
            count = 0
            while True:
                try:
                    sampler.sample(3.0)
                except DataError:
                    return count
                count += 1

        append(writer, range(9))
        writer.flush(DEADLINE)
        assert draw_all() == 0
        append(writer, range(9, 10))
        writer.flush(DEADLINE)
        assert draw_all() == 3  # 30 draws are more than the slack.
        append(writer, range(10, 40))
        writer.flush(DEADLINE)  # The last segment came at 30 items: 30 - 2 * 20 draws.
        append(writer, range(40, 70))
        with pytest.raises(DataError) as refused:
            writer.flush(1.0)
        assert "numbers" in refused.value.problem
        assert refused.value.remedy
        assert draw_all() == 12  # up to 2 * 60 + 20 draws at 70 items, and one batch more
        writer.flush(DEADLINE)


def test_nothing_is_lost_while_the_server_is_stopped(starting):
    limits = {**SMALL, "window": 2, "priority_exponent": 0.0}
    server = starting(TableSettings(table=NUMBERS, **limits))
    with server.client() as client, client.writer("numbers") as writer:
        writer.append({"x": 0})
        writer.flush(DEADLINE)
        os.killpg(server.process.pid, signal.SIGSTOP)
        appended = []

        def append():
            for x in range(1, 400):
                writer.append({"x": x})
                appended.append(x)

        thread = threading.Thread(target=append)
        thread.start()
        until(lambda: writer.num_unstored >= 4, "full window")
        with pytest.raises(DataError):
            client.status(timeout=0.5)
        assert len(appended) <= 10 * (2 + 2 + 2)  # window, queue, and the segment that waits
        os.killpg(server.process.pid, signal.SIGCONT)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        writer.flush(DEADLINE)
        with client.sampler("numbers", 1_000) as sampler:
            np.testing.assert_array_equal(read_all(sampler), np.arange(400))


def test_batches_for_a_client_that_is_gone_do_not_count_as_drawn(starting):
    """Its requests wait until there are items, before those of the next client."""
    server = starting(TableSettings(table=NUMBERS, **SMALL))

    def connections():
        pairs = (each for pid in group(server.process.pid) for each in psutil.Process(pid).net_connections())
        return [each for each in pairs if each.laddr.port == server.port + 4 and each.raddr]

    with server.client() as client, client.writer("numbers") as writer:
        with client.sampler("numbers", 4, shared_memory=False, prefetch=50) as sampler:
            with pytest.raises(DataError):
                sampler.sample(0.5)
            until(connections, "connection")
        until(lambda: not connections(), "end of the connection")
        append(writer, range(10))
        writer.flush(DEADLINE)
        with client.sampler("numbers", 4, shared_memory=False, prefetch=1) as sampler:
            sampler.sample(DEADLINE)
            drawn = until(lambda: client.status().tables["numbers"].replay.num_drawn, "figures")
            assert 4 <= drawn <= 2 * 4  # a request follows each batch


def test_no_call_with_a_limit_waits_for_ever_for_a_stopped_server(starting, monkeypatch):
    """The window and the queue of the writer are full, and one more segment is complete."""
    monkeypatch.setattr(writer_module, "EXIT_SECONDS", 0.3)
    monkeypatch.setattr(sampler_module, "MAX_UNANSWERED", 1)
    server = starting(TableSettings(table=NUMBERS, **SMALL, window=2))
    with server.client() as client, client.sampler("numbers", 4) as sampler:
        with pytest.raises(ZeroDivisionError), client.writer("numbers") as writer:  # noqa: PT012
            append(writer, range(10))
            writer.flush(DEADLINE)
            os.killpg(server.process.pid, signal.SIGSTOP)
            append(writer, range(10, 10 + 10 * (2 + 2) + 5))
            until(lambda: writer.num_unstored >= 4, "full window")
            for _ in range(2):
                with pytest.raises(DataError, match="4 segments"):
                    writer.flush(0.3)
            raise ZeroDivisionError  # is not hidden by the items that are not stored
        with pytest.raises(DataError, match=str(server.port)):
            until(lambda: sampler.sample(DEADLINE) is None, "error")
        os.killpg(server.process.pid, signal.SIGCONT)
        until(lambda: client.status().tables["numbers"], "answer")
        assert len(sampler.sample(DEADLINE)["x"]) == 4


def test_an_incomplete_segment_is_stored_without_a_flush(server):
    with server.client() as client, client.writer("uniform") as writer, client.sampler("uniform", 1_000) as sampler:
        append(writer, [5])
        until(lambda: 5 in sampler.sample(DEADLINE)["x"], "item")
        until(lambda: writer.num_unstored == 0, "receipt")  # It may come after the item can be drawn.
        assert client.status().tables["uniform"].writers == 1


class LateQueue(queue.Queue):
    """A queue that seems empty once, although it has become full just then."""

    def get(self, timeout):
        if not self.is_late():
            return super().get(timeout=timeout)
        self.is_late = lambda: False
        raise queue.Empty


def test_items_are_stored_in_the_order_of_their_calls(starting):
    server = starting(TableSettings(table=NUMBERS, **SMALL))
    with server.client() as client, client.writer("numbers") as writer:
        late = LateQueue(2)
        late.is_late = lambda: until(lambda: late.full() and writer._is_full(), "three full segments")
        writer._pieces = late
        append(writer, range(100))
        writer.flush(DEADLINE)
        assert not late.is_late()
        with client.sampler("numbers", 100) as sampler:
            batch = sampler.sample(DEADLINE)
            np.testing.assert_array_equal(batch["x"], batch.keys)


def test_closed_clients_leave_no_descriptor_and_no_thread(server):
    def use():
        with server.client() as client, client.writer("uniform") as writer:
            append(writer, [1])
            writer.flush(DEADLINE)
            for shared in (True, False):
                with client.sampler("uniform", 8, shared_memory=shared) as sampler:
                    sampler.sample(DEADLINE)
        del sampler
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = use()
    assert [use() for _ in range(3)] == [before] * 3


def test_writers_of_one_table_have_streams_of_their_own(server):
    with server.client() as client, ExitStack() as stack:
        writers = [stack.enter_context(client.writer("pairs")) for _ in range(4)]
        with pytest.raises(UsageError) as refused:
            client.writer("pairs")
        assert "4" in refused.value.problem
        for x in range(100):
            for index, writer in enumerate(writers):
                writer.append({"x": 1_000 * index + x})
        writers[0].close()
        stack.enter_context(client.writer("pairs"))  # takes the stream that is free again
        for writer in writers[1:]:
            writer.flush(DEADLINE)
        with client.sampler("pairs", 1_000) as sampler:
            expected = [1_000 * index + x for index in range(4) for x in range(100)]
            np.testing.assert_array_equal(np.sort(read_all(sampler)), expected)


def test_a_client_is_refused_what_the_server_does_not_have(server):
    with server.client() as client:
        for join in (lambda: client.writer("none"), lambda: client.sampler("none", 8)):
            with pytest.raises(UsageError) as refused:
                join()
            assert "numbers" in refused.value.remedy
        for batch_size in (0, 65_537, 4.5, "4", True):
            with pytest.raises(UsageError) as refused:
                client.sampler("numbers", batch_size)
            assert repr(batch_size) in refused.value.problem
        with pytest.raises(UsageError, match="prefetch"):
            client.sampler("numbers", 4, prefetch=0.5)
        with pytest.raises(UsageError) as refused:
            client.sampler("pairs", 8, shared_memory=False)
        assert "pairs" in refused.value.problem
        with pytest.raises(UsageError):
            Client(role="root")
        with client.sampler("numbers", 8) as sampler, pytest.raises(DataError) as refused:
            sampler.sample(0.3)  # There is no item.
        assert "numbers" in refused.value.problem
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with Client(port=nobody.getsockname()[1]) as client, pytest.raises(DataError) as refused:
            client.status(timeout=0.3)
        assert str(nobody.getsockname()[1]) in refused.value.problem
        assert refused.value.remedy


def test_closed_clients_writers_and_samplers_are_refused_at_once(server):
    with server.client() as client:
        writer, sampler = client.writer("numbers"), client.sampler("numbers", 8)
        writer.close()
        sampler.close()
        writer.close()
        sampler.close()
    for call in (
        lambda: writer.append({"x": 1}),
        lambda: sampler.sample(60.0),
        lambda: client.status(timeout=60.0),
        lambda: client.writer("numbers", timeout=60.0),
    ):
        with pytest.raises(UsageError) as refused:
            call()
        assert not isinstance(refused.value, DataError)
        assert refused.value.remedy


FORKED = """
import os, sys
from apexreplay import Client
from apexreplay.errors import DataError, UsageError

client = Client(port=int(sys.argv[1]))
writer, sampler = client.writer("numbers"), client.sampler("numbers", 8, shared_memory=False)
if os.fork() == 0:
    calls = [
        lambda: writer.append({"x": 1}), lambda: writer.add_item(), lambda: sampler.sample(60.0),
        lambda: client.status(timeout=60.0), lambda: client.sampler("numbers", 8, timeout=60.0),
    ]
    for call in calls:
        try:
            call()
            os._exit(1)
        except UsageError as error:
            if isinstance(error, DataError) or not error.remedy:
                os._exit(2)
    writer.close()
    sampler.close()
    with Client(port=int(sys.argv[1])) as own, own.writer("uniform") as second:
        second.append({"x": 1})
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
writer.append({"x": 1})
writer.close(60.0)
sampler.close()
client.close()
"""


def test_after_a_fork_clients_are_refused_and_new_ones_work(server):
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_step_and_item_errors_append_nothing(server):
    with server.client() as client, client.writer("windows") as writer:
        step = {name: np.zeros(field.shape, field.dtype) for name, field in writer.table.steps}
        values = {name: np.zeros(field.shape, field.dtype) for name, field in writer.table.values}
        writer.append(step)
        for call in (
            lambda: writer.append({}),
            lambda: writer.append({**step, "k": 1_000}),
            lambda: writer.add_item(),
            lambda: writer.add_item(-1.0, values),
            lambda: writer.add_item(1.0, values),  # It has only one step.
            lambda: writer.add_item("1 or 2", values),
            lambda: writer.add_item(1.0, list(values)),
            lambda: writer.add_item(1.0, values, frame="-1"),
            lambda: setattr(writer, "version", -1),
            lambda: setattr(writer, "version", 2**32),
            lambda: setattr(writer, "version", 1.5),
        ):
            with pytest.raises(UsageError):
                call()
        before = client.status().tables["windows"].replay.num_inserted
        writer.flush(DEADLINE)
        assert client.status().tables["windows"].replay.num_inserted == before


def test_a_server_ends_with_one_of_its_tables(starting):
    server = serve([TableSettings(table=NUMBERS, **SMALL)])
    leader = server.process.pid
    files = memories(leader)
    with server.client() as client, client.writer("numbers") as writer:
        append(writer, range(5))
        writer.flush(DEADLINE)
    (child,) = {int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in group(leader)} - {leader, os.getpid()}
    os.kill(child, signal.SIGKILL)
    assert server.process.wait(DEADLINE) == 1
    until(lambda: group(leader) == [], "end of all processes")
    for path in files:
        path.unlink(missing_ok=True)


PARENT = """
import os
from apexreplay import TableSettings, serve, table

numbers = table("numbers", {"x": "int64"})
server = serve([TableSettings(table=numbers, capacity=1_000, segment_length=10)])
print(server.process.pid, flush=True)
input()
os._exit(0)
"""


@pytest.mark.parametrize("kills", [False, True], ids=["exit", "kill"])
def test_a_server_ends_with_the_program_that_serves(kills):
    program = [sys.executable, "-c", PARENT]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        leader = int(parent.stdout.readline())
        files = memories(leader)
        if kills:
            parent.kill()
    until(lambda: group(leader) == [], "end of the server")
    assert files
    assert [path for path in files if path.exists()] == []


@pytest.fixture
def keys(tmp_path):
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_key_allows_only_what_its_role_does(starting, keys):
    server = starting(TableSettings(table=NUMBERS, **SMALL), keys=keys)
    with ExitStack() as stack:
        clients = {
            role: stack.enter_context(Client(port=server.port, keys=keys, role=role))
            for role in ("writer", "reader", "administrator")
        }
        for role in ("writer", "administrator"):
            with clients[role].writer("numbers") as writer:
                writer.append({"x": 3})
                writer.flush(DEADLINE)
        for role, join in (
            ("reader", lambda client: client.writer("numbers")),
            ("writer", lambda client: client.sampler("numbers", 8)),
        ):
            with pytest.raises(UsageError) as refused:
                join(clients[role])
            assert role in refused.value.problem
            assert refused.value.remedy
        for shared in (True, False):
            with clients["reader"].sampler("numbers", 8, shared_memory=shared) as sampler:
                batch = sampler.sample(DEADLINE)
                assert set(batch["x"]) == {3}
                sampler.update_priorities(batch, np.full(8, 2.0))
        for wrong in (None, keys.parent / "others"):
            if wrong is not None:
                create_keys(wrong)
            with Client(port=server.port, keys=wrong) as client, pytest.raises(DataError) as refused:
                client.status(timeout=2.0)
            assert "keys" in refused.value.remedy
        refusals = clients["administrator"].status(timeout=DEADLINE).refused_connections
        assert refusals
    with pytest.raises(UsageError) as refused:
        Client(keys=keys / "none")
    assert str(keys / "none") in refused.value.problem
    assert refused.value.remedy


def test_a_key_opens_no_socket_of_another_role(starting, keys):
    """Not even if its client ignores the refusal of the control socket."""
    server = starting(TableSettings(table=NUMBERS, **SMALL), keys=keys)
    ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
    sockets = {"experience": zmq.PUSH, "priorities": zmq.PUSH, "receipts": zmq.SUB, "batches": zmq.DEALER}
    opened = set()
    for role in ("writer", "reader"):
        with open_context(read_keys(keys, role)) as context:
            for port, name in enumerate(sockets, server.port + 1):
                socket = context.socket(sockets[name])
                events = socket.get_monitor_socket(ends | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
                connect(socket, f"tcp://127.0.0.1:{port}", name)
                assert events.poll(DEADLINE * 1_000)
                if recv_monitor_message(events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    opened.add((role, name))
                socket.disable_monitor()
                socket.close(0)
    writer, reader = (
        {("writer", "experience"), ("writer", "receipts")},
        {("reader", "priorities"), ("reader", "batches")},
    )
    assert opened == writer | reader
    with server.client() as client:

        def counts():
            refused = client.status(timeout=DEADLINE).tables["numbers"].replay.refused_connections
            return {name.partition(":")[0] for name in refused} == {*sockets}

        until(counts, "counts of refused connections")


def test_keys_against_a_server_without_keys_are_refused(server, keys):
    with Client(port=server.port, keys=keys) as client, pytest.raises(DataError) as refused:
        client.status(timeout=2.0)
    assert "keys" in refused.value.remedy


def command(*arguments):
    """Runs `apexreplay` to its end."""
    program = [sys.executable, "-m", "apexreplay", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def test_a_server_that_cannot_start_gives_the_reason(server, tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text('[numbers]\nsteps.x = "int64"\n')
    huge = tmp_path / "huge.toml"
    huge.write_text('[numbers]\ncapacity = 1_000_000_000_000\nsteps.x = "int64"\n')
    for arguments, named in (
        (["--table", path, "--bind", "0.0.0.0"], "0.0.0.0"),
        (["--table", path, "--port", server.port], str(server.port)),
        (["--table", path, "--port", server.port - 3], "in use"),  # the port of the receipts
        (["--table", tmp_path / "none"], "none"),
        (["--table", path, "--port", 0], "port"),
        (["--table", path, "--snapshots", path], str(path)),
        (["--table", path, "--snapshot-seconds", "nan"], "snapshot-seconds"),
        (["--table", path, "--keys", tmp_path / "no keys"], "no keys"),
        (["--table", huge], "memory"),
    ):
        ended = command("serve", *arguments)
        assert ended.returncode == 2, (arguments, ended.stderr)
        assert named in ended.stderr.splitlines()[-1], arguments
        assert "Traceback" not in ended.stderr
    with pytest.raises(UsageError):
        serve([NUMBERS, NUMBERS])
    with pytest.raises(UsageError):
        serve([])


def test_status_has_the_figures_of_each_table(server, capsys, monkeypatch):
    for form, pattern in (
        ([], r"numbers: [\d,]+ of 1,000 items"),
        (["--json"], r'"capacity": 1000'),
        (["--prometheus"], r'apexreplay_capacity\{table="numbers"\} 1000'),
    ):
        assert cli.main(["status", "--port", str(server.port), *form]) == 0
        assert re.search(pattern, capsys.readouterr().out)


def test_keys_of_each_role_are_created_once(tmp_path, capsys):
    assert cli.main(["keys", str(tmp_path / "keys")]) == 0
    secrets = sorted(path.name for path in (tmp_path / "keys").glob("*secret*"))
    assert secrets == [f"{role}.key_secret" for role in ("administrator", "reader", "server", "writer")]
    assert cli.main(["keys", str(tmp_path / "keys")]) == 2
    assert str(tmp_path / "keys") in capsys.readouterr().err
    for missing in ("server.key", "writer.key_secret"):
        (tmp_path / "keys" / missing).unlink()
        with pytest.raises(UsageError) as error:
            read_keys(tmp_path / "keys", "writer")
        assert error.value.remedy.endswith("apexreplay keys DIR")  # the only command that creates keys


def test_a_folder_of_keys_that_is_not_complete_is_removed(tmp_path, monkeypatch):
    def fail(folder, role):
        (folder / f"{role}.key").touch()
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(roles, "create_pair", fail)
        assert cli.main(["keys", str(tmp_path / "keys")]) == 2
    assert cli.main(["keys", str(tmp_path / "keys")]) == 0


# --- order ------------------------------------------------------------------------------------------------------------


def test_samplers_of_a_queue_share_its_items(starting):
    limits = {"order": "queue", "draws_per_item": 2, "inserts_wait": True, "window": 2} | SMALL | {"capacity": 100}
    server = starting(TableSettings(table=NUMBERS, **limits))
    with server.client() as client, client.writer("numbers") as writer, ExitStack() as stack:
        with pytest.raises(UsageError) as refused:
            client.sampler("numbers", 161)  # There would never be as many.
        assert "160" in refused.value.problem
        samplers = [stack.enter_context(client.sampler("numbers", 10, prefetch=1)) for _ in range(2)]
        append(writer, range(100))
        writer.flush(DEADLINE)
        append(writer, range(100, 130))
        with pytest.raises(DataError):
            writer.flush(0.5)  # Nothing was removed that samplers have not got.
        shares: list[list[int]] = [[], []]
        while len(shares[0]) + len(shares[1]) < 260:  # Either may get the last batch, which it asked for ahead.
            for sampler, share in zip(samplers, shares, strict=True):
                with suppress(DataError):
                    share += sampler.sample(0.2)["x"].tolist()
        writer.flush(DEADLINE)
        assert not any(sampler.reads_memory for sampler in samplers)
        assert all(shares)
        assert Counter(shares[0] + shares[1]) == dict.fromkeys(range(130), 2)
        with pytest.raises(DataError):
            samplers[0].sample(0.5)


@pytest.mark.parametrize("order", ["queue", "newest"])
def test_a_request_for_too_many_items_delays_no_other(starting, order):
    server = starting(TableSettings(table=NUMBERS, order=order, **SMALL))
    with server.client() as client, client.writer("numbers") as writer:
        with client.sampler("numbers", 200) as gone, pytest.raises(DataError):
            gone.sample(0.5)
        append(writer, range(100))
        writer.flush(DEADLINE)
        with client.sampler("numbers", 8) as sampler:
            assert len(sampler.sample(DEADLINE)["x"]) == 8


def test_the_newest_and_items_of_allowed_versions_are_drawn(starting):
    newest = TableSettings(table=NUMBERS, order="newest", **SMALL)
    fresh = TableSettings(table=replace(NUMBERS, name="fresh"), max_version_lag=2, priority_exponent=0.0, **SMALL)
    server = starting(newest, fresh)
    with server.client() as client, client.writer("numbers") as numbers, client.writer("fresh") as writer:
        append(numbers, range(100))
        numbers.flush(DEADLINE)
        with client.sampler("numbers", 30) as sampler:
            for batch in islice(sampler, 3):
                np.testing.assert_array_equal(batch["x"], np.arange(99, 69, -1))
        for writer.version in (3, 4, 5, 6):
            append(writer, range(10 * writer.version, 10 * writer.version + 10))
            writer.flush(DEADLINE)
        for shared in (True, False):
            with client.sampler("fresh", 100, shared_memory=shared) as sampler:
                batch = sampler.sample(DEADLINE)
                assert set(batch["x"]) == set(range(40, 70))
                assert set(batch.versions) == {4, 5, 6}
                assert batch.num_items == 30


# --- restarts ---------------------------------------------------------------------------------------------------------


@BOTH
def test_clients_continue_after_a_kill_of_the_server(tmp_path, shared):
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        writer = client.writer("numbers", timeout=DEADLINE)
        with writer, client.sampler("numbers", 500, shared_memory=shared) as sampler:
            append(writer, range(100))
            writer.flush(DEADLINE)
            sampler.sample(DEADLINE)
            server.restart()
            append(writer, range(100, 200))
            writer.flush(DEADLINE)

            def sees_all():
                try:
                    return len(np.unique(sampler.sample(0.5).keys)) == 200
                except DataError:
                    return False

            until(sees_all, "batch of all items")
            np.testing.assert_array_equal(read_all(sampler), np.arange(200))
            with client.writer("numbers", timeout=DEADLINE) as other:  # gets another stream
                append(other, range(200, 210))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_queue_goes_on_after_a_restart_and_no_other_order_does(tmp_path, signum):
    with Restarting(tmp_path, free_port(), 'order = "queue"', "draws_per_item = 2") as server:
        with Client(port=server.port) as client, client.writer("numbers") as writer:
            append(writer, range(100))
            writer.flush(DEADLINE)
        given = []
        for others in (['order = "queue"', "draws_per_item = 3"], []):
            with Client(port=server.port) as client, client.sampler("numbers", 20, prefetch=1) as sampler:
                given += sampler.sample(DEADLINE)["x"].tolist()
            server.end(signum)
            assert "draws_per_item" in server.refusal(*others)
            server.start()
        assert given == sorted(given)
        assert all(given.count(x) <= 2 for x in given)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_sampler_of_a_queue_gets_each_item_across_restarts(tmp_path, signum):
    """First the batches that had arrived before the server ended."""
    with (
        Restarting(tmp_path, free_port(), 'order = "queue"') as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 10, prefetch=3) as sampler,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        given = sampler.sample(DEADLINE)["x"].tolist()

        def has_sent_ahead():
            replay = client.status(timeout=DEADLINE).tables["numbers"].replay
            return replay is not None and replay.num_drawn == 40

        until(has_sent_ahead, "batches")
        server.end(signum)
        server.start()
        while len(given) < 100:
            given += sampler.sample(DEADLINE)["x"].tolist()
        assert given == list(range(100))


def test_a_sampler_that_may_not_read_the_memory_any_more_ends(tmp_path):
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        with client.writer("numbers") as writer:
            append(writer, range(100))
            writer.flush(DEADLINE)
        with client.sampler("numbers", 10) as sampler:
            sampler.sample(DEADLINE)
            server.end(signal.SIGKILL)
            server.start('order = "newest"')
            with pytest.raises(UsageError) as refused:
                until(lambda: sampler.sample(DEADLINE) is None, "refusal")
            assert type(refused.value) is UsageError  # It is no DataError, as after a timeout.


def test_requests_that_a_killed_server_had_are_sent_again(tmp_path):
    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 8, shared_memory=False) as sampler,
    ):
        with pytest.raises(DataError):
            sampler.sample(0.5)  # All requests wait for the first item.
        server.restart()
        append(writer, range(10))
        writer.flush(DEADLINE)

        def answered():
            with suppress(DataError):
                return sampler.sample(0.5)

        until(answered, "batch")


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_sampler_reads_the_memory_that_a_snapshot_restores(tmp_path, kill):
    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 500) as sampler,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        server.end(signal.SIGTERM, kill)  # saves a snapshot and removes the memory
        assert not [path for path in server.files if path.exists()]
        server.start()
        append(writer, range(100, 150))
        writer.flush(DEADLINE)
        until(lambda: len(np.unique(sampler.sample(DEADLINE).keys)) == 150, "batch of the restored memory")
        np.testing.assert_array_equal(read_all(sampler), np.arange(150))


def test_an_idle_sampler_gives_up_a_memory_that_was_removed(tmp_path):
    """The server may have no room for the next memory while the former one is mapped."""

    def mapped():
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(memory) in line]

    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 500) as sampler,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        sampler.sample(DEADLINE)
        (memory,) = (path for path in server.files if path.suffix == ".replay")
        assert mapped()
        server.end(signal.SIGTERM)
        until(lambda: not mapped(), "end of the mapping")
        with pytest.raises(DataError):
            sampler.sample(0.1)
        server.start()
        np.testing.assert_array_equal(read_all(sampler), np.arange(100))


def test_a_sampler_waits_for_a_server_that_was_stopped_twice_meanwhile(tmp_path):
    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 500) as sampler,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        server.end(signal.SIGTERM)
        server.start()
        until(lambda: sampler._welcome is not sampler._used, "answer of the second server")
        server.end(signal.SIGTERM)
        with pytest.raises(DataError, match=r"0\.3 s"):
            sampler.sample(0.3)
        assert not [path for path in server.files if path.exists()], "counters of a memory that is gone"
        server.start()
        np.testing.assert_array_equal(read_all(sampler), np.arange(100))


def test_a_server_whose_start_is_interrupted_ends(monkeypatch):
    started = []

    def begin(*arguments, **options):
        started.append(spawn(*arguments, **options))
        threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        return started[0]

    monkeypatch.setattr(serving, "spawn", begin)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell may have started the tests without it.
    try:
        with pytest.raises(KeyboardInterrupt):
            serve([TableSettings(table=NUMBERS, **SMALL)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert group(started[0].pid) == []


def test_an_address_of_another_host_is_no_matter_of_ports():
    with pytest.raises(UsageError) as refused:
        serve([NUMBERS], bind="192.0.2.1")
    assert "IPv4" in refused.value.remedy


def test_a_sampler_of_a_server_that_is_gone_gives_its_memory_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sampler_module, "MAX_UNANSWERED", 1)
    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 500) as sampler,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        sampler.sample(DEADLINE)
        (memory,) = (path for path in server.files if path.suffix == ".replay")
        server.end(signal.SIGKILL)
        until(lambda: not is_wanted(memory), "end of the claim")
        server.start()
        until(lambda: client.status().tables["numbers"], "answer")
        np.testing.assert_array_equal(read_all(sampler), np.arange(100))


def test_a_memory_that_another_host_has_outdated_is_not_used(tmp_path):
    """The second of three starts plays the other host: it does not find the memory, and its id is another one."""
    record = tmp_path / "snapshots" / "numbers.memory"

    def write(*numbers):
        with Client(port=server.port) as client, client.writer("numbers", timeout=DEADLINE) as writer:
            append(writer, range(*numbers))

    with Restarting(tmp_path, free_port()) as server:
        write(100)
        (memory,) = (path for path in server.files if path.suffix == ".replay")
        server.end(signal.SIGKILL)
        outdated = memory.rename(f"{memory}-outdated")
        server.start()
        write(200, 350)
        server.end(signal.SIGTERM)
        outdated.rename(memory)
        record.write_bytes(seal({"memory": "another host"}))
        server.start()
        with Client(port=server.port) as client, client.sampler("numbers", 500, timeout=DEADLINE) as sampler:
            np.testing.assert_array_equal(read_all(sampler), np.arange(200, 350))


def test_a_writer_ends_if_the_server_would_refuse_its_segments(tmp_path):
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        writer = client.writer("numbers")
        append(writer, range(10))
        writer.flush(DEADLINE)
        server.end(signal.SIGKILL)
        append(writer, range(10, 20))
        server.start("segment_length = 5")
        with pytest.raises(UsageError, match="segment_length"):
            until(lambda: append(writer, [20]), "refusal")
        with pytest.raises(UsageError, match="segment_length"):
            writer.close()


@pytest.mark.parametrize(
    ("batch_size", "limit", "message"),
    [(8, "num_samplers = 0", "sampler processes"), (2_000, 'order = "newest"', "at most 991")],
)
def test_a_sampler_ends_if_the_server_gives_no_such_batches(tmp_path, batch_size, limit, message):
    with (
        Restarting(tmp_path, free_port()) as server,
        Client(port=server.port) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", batch_size, shared_memory=False) as sampler,
    ):
        append(writer, range(10))
        writer.flush(DEADLINE)
        sampler.sample(DEADLINE)
        server.end(signal.SIGKILL)
        server.start(limit)
        with pytest.raises(UsageError, match=message):
            until(lambda: sampler.sample(DEADLINE) is None, "refusal")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_items_keep_the_order_of_a_writer_across_restarts(tmp_path, signum):
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        with client.sampler("numbers", 2_000) as sampler, client.writer("numbers") as writer:
            append(writer, range(100))
            writer.flush(DEADLINE)
            for first in range(100, 400, 100):
                append(writer, range(first, first + 35))  # Some of these segments are lost with the connection.
                server.end(signum)
                with ThreadPoolExecutor(1) as thread:  # It waits for the server if the window is full.
                    while_away = thread.submit(append, writer, range(first + 35, first + 60))
                    server.start()
                    while_away.result(DEADLINE)
                append(writer, range(first + 60, first + 100))
            writer.flush(DEADLINE)
            until(lambda: sampler.sample(DEADLINE).num_items == 400, "batch of the restored memory")
            batch = sampler.sample(DEADLINE)
        np.testing.assert_array_equal(batch["x"], batch.keys)


def test_more_connections_than_files_end_no_server(starting):
    server = starting(TableSettings(table=NUMBERS, **SMALL))
    pid = server.process.pid
    with server.client() as client, client.writer("numbers") as writer, ExitStack() as stack:
        assert len(set(resource.prlimit(pid, resource.RLIMIT_NOFILE))) == 1  # The soft limit is the hard one.
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, used + 5))
        others = [stack.enter_context(server.client()) for _ in range(10)]
        until(lambda: len(list(Path(f"/proc/{pid}/fd").iterdir())) == used + 5, "connections")
        with client.writer("numbers", timeout=DEADLINE) as second:
            append(second, range(5))
        append(writer, range(5))
        writer.flush(DEADLINE)
        assert client.status(timeout=DEADLINE).tables["numbers"].writers == 1
        assert len(others) == 10


def test_tables_that_are_no_list_are_refused():
    with pytest.raises(UsageError) as refused:
        serve(NUMBERS)
    assert refused.value.remedy == "pass [table]"


def test_the_end_of_a_killed_server_is_an_error():
    server = serve([TableSettings(table=NUMBERS, **SMALL)])
    files = memories(server.process.pid)
    os.killpg(server.process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="status -9"):
        server.close()
    for path in files:
        path.unlink(missing_ok=True)


def test_a_server_keeps_a_memory_that_it_cannot_save(tmp_path):
    saved = tmp_path / "snapshots" / "numbers"
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        with client.writer("numbers") as writer:
            append(writer, range(100))
        if saved.exists():
            saved.rmdir()
        saved.write_text("a file where the folder should be")
        server.end(signal.SIGTERM)
        assert server.process.returncode == FAILED
        reason = (tmp_path / "log").read_text().splitlines()[-1]
        (memory,) = (path for path in server.files if path.suffix == ".replay")
        assert f"the next server on this host finds the memory {memory}" in reason
        saved.unlink()
        server.start()
        with client.sampler("numbers", 500, timeout=DEADLINE) as sampler:
            np.testing.assert_array_equal(read_all(sampler), np.arange(100))


def test_a_served_table_is_saved_as_often_as_asked(tmp_path):
    with (
        serve([NUMBERS], snapshots=tmp_path, snapshot_seconds=0.2) as server,
        server.client() as client,
        client.writer("numbers") as writer,
    ):
        append(writer, range(100))
        writer.flush(DEADLINE)
        until(lambda: list((tmp_path / "numbers").glob("*.json")), "snapshot")
    with pytest.raises(DataError):
        serve([NUMBERS], snapshots=tmp_path, snapshot_seconds=0.0)


def test_a_sampler_by_messages_waits_as_long_as_asked(starting, monkeypatch):
    server, waits = starting(TableSettings(table=NUMBERS, **SMALL)), []
    with server.client() as client, client.sampler("numbers", 4, shared_memory=False) as sampler:
        monkeypatch.setattr(sampler._remote, "receive", lambda timeout, waited: waits.append(timeout))
        with pytest.raises(DataError):
            sampler.sample(0.01)
        assert 0 < max(waits) <= 0.01


def test_the_end_of_a_server_that_cannot_save_is_an_error(tmp_path):
    server = serve([NUMBERS], snapshots=tmp_path)
    (tmp_path / "numbers").write_text("a file where the folder should be")
    with server.client() as client, client.writer("numbers") as writer:
        writer.append({"x": 1})
    files = memories(server.process.pid)
    with pytest.raises(DataError, match="standard error"), server:
        pass
    for path in files:
        path.unlink()


@BOTH
def test_clients_of_a_lost_memory_are_refused(tmp_path, shared):
    """Without snapshots, a server that starts again has no items."""
    with Restarting(tmp_path, free_port(), keeps=False) as server, Client(port=server.port) as client:
        with client.sampler("numbers", 500, shared_memory=shared) as sampler:
            writer = client.writer("numbers")
            append(writer, range(100))
            writer.flush(DEADLINE)
            sampler.sample(DEADLINE)
            server.restart()

            def refusal(call):
                try:
                    call()
                except DataError:
                    return None
                except UsageError as error:
                    return error
                return None

            def write():
                append(writer, [5])
                writer.flush(0.2)

            for call in (write, lambda: sampler.sample(0.2)):
                assert until(lambda call=call: refusal(call), "refusal").remedy
            with suppress(UsageError):  # if it has kept an item
                writer.close()
        with client.writer("numbers", timeout=DEADLINE) as fresh:
            append(fresh, range(3))


@pytest.mark.parametrize("name", ["numbers", "others"])
def test_one_folder_of_snapshots_has_one_server(tmp_path, name):
    with Restarting(tmp_path, free_port()) as server, Client(port=server.port) as client:
        tables = tmp_path / "second.toml"
        tables.write_text((tmp_path / "tables.toml").read_text().replace("numbers", name))
        arguments = ["--table", tables, "--snapshots", tmp_path / "snapshots", "--port", free_port()]
        ended = command("serve", *arguments)
        assert ended.returncode == 2
        assert "in use" in ended.stderr.splitlines()[-1]
        with client.writer("numbers", timeout=DEADLINE) as writer:
            append(writer, range(10))
            writer.flush(DEADLINE)


def test_a_window_waits_for_all_of_its_steps(starting):
    """An item may refer to steps of an earlier segment."""
    pairs = table("pairs", {"x": "int64"}, item=Window(3, 2), values={"y": "int64"})
    server = starting(TableSettings(table=pairs, capacity=500, segment_length=5, priority_exponent=0.0))
    with server.client() as client, client.writer("pairs") as writer:
        for x in range(100):
            writer.append({"x": x})
            if x >= 2:
                writer.add_item(values={"y": x}, frame=-3, next_frame=-1)
        writer.flush(DEADLINE)
        with client.sampler("pairs", 300) as sampler:
            batch = sampler.sample(DEADLINE)
            assert set(batch["y"]) == set(range(2, 100))
            np.testing.assert_array_equal(batch["next_x"][:, -1], batch["y"])
            np.testing.assert_array_equal(batch["x"][:, -1], batch["y"] - 2)
            np.testing.assert_array_equal(batch["next_x"][:, 0], np.maximum(batch["y"] - 2, 0))
