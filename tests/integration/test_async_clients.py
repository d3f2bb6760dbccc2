"""Clients, writers and samplers for asyncio, with servers of tables in their own processes."""

import asyncio
import functools
import gc
import os
import signal
import threading
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.table_servers import NUMBERS, SMALL, Restarting, all_items, free_port
from support.waiting import DEADLINE

from apexreplay import AsyncClient, TableSettings, table
from apexreplay.client import asynchronous
from apexreplay.errors import DataError, UsageError
from apexreplay.item_kinds import Sequence, Window

BOTH = pytest.mark.parametrize("shared", [True, False], ids=["memory", "messages"])


def in_a_loop(test):
    """Runs a coroutine as a test."""

    @functools.wraps(test)
    def run(*arguments, **options):
        async def limited():
            async with asyncio.timeout(3 * DEADLINE):
                await test(*arguments, **options)

        asyncio.run(limited())

    return run


@pytest.fixture(scope="module")
def server(starting_for_all):
    limits = {**SMALL, "priority_exponent": 0.0}
    windows = table("windows", {"x": "int64"}, item=Window(2, 1), values={"y": "int64"})
    sequences = table("sequences", {"x": "int64"}, item=Sequence(5, 4))
    tables = [replace(NUMBERS, name=name) for name in ("numbers", "empty", "spare")]
    return starting_for_all(*(TableSettings(table=each, **limits) for each in (*tables, windows, sequences)))


def connect(server):
    return AsyncClient("127.0.0.1", server.port)


async def append(writer, numbers):
    for x in numbers:
        await writer.append({"x": x})


async def until(get):
    async with asyncio.timeout(DEADLINE):
        while not (found := await get()):
            await asyncio.sleep(0.01)
    return found


async def read(client, name="numbers", **options):
    """Returns all items of a table."""
    async with client.sampler(name, 1_000, timeout=DEADLINE, **options) as sampler:
        return all_items(await sampler.sample(DEADLINE))


def prioritized(name):
    return TableSettings(table=replace(NUMBERS, name=name), priority_exponent=1.0, **SMALL)


@BOTH
@in_a_loop
async def test_a_sampler_returns_items_and_priorities_change_its_draws(starting, shared):
    server = starting(prioritized("numbers"))
    async with connect(server) as client:
        async with client.writer("numbers") as writer:
            writer.version = 7
            await append(writer, range(40))
            await writer.flush(DEADLINE)
            assert writer.num_unstored == 0
        async with client.sampler("numbers", 200, shared_memory=shared) as sampler:
            assert sampler.reads_memory == shared
            changed, others = 0, []
            asyncio.get_running_loop().call_soon(others.append, "runs between two batches")
            async for batch in sampler:
                assert set(batch.versions) == {7}
                assert batch.num_items == 40
                sampler.update_priorities(batch, np.where(batch["x"] < 4, [100.0], [1e-6]))
                changed += set(batch["x"]) == {0, 1, 2, 3}
                if changed == 3:
                    break
            assert others

        async def reported():
            return (await client.status()).tables["numbers"].replay.num_inserted == 40

        await until(reported)


@in_a_loop
async def test_windows_and_sequences_are_written(server):
    async with connect(server) as client:
        async with client.writer("windows") as writer:
            for x in range(10):
                await writer.append({"x": x})
                if x:
                    await writer.add_item(values={"y": x}, frame=-2)
        async with client.writer("sequences") as writer:
            for _ in range(2):
                await append(writer, range(7))
                await writer.end_episode()
        async with client.sampler("windows", 100) as sampler:
            batch = await sampler.sample(DEADLINE)
            assert set(batch["y"]) == set(range(1, 10))
            np.testing.assert_array_equal(batch["next_x"][:, -1], batch["y"])
        async with client.sampler("sequences", 100) as sampler:
            batch = await sampler.sample(DEADLINE)
            assert set(batch.lengths) == {5, 3}
            assert batch.num_items == 4


@BOTH
@in_a_loop
async def test_clients_continue_after_a_kill_of_the_server(tmp_path, shared):
    """Items that are appended while it is away are stored exactly once."""
    loop = asyncio.get_running_loop()
    with Restarting(tmp_path, free_port()) as server:
        async with (
            connect(server) as client,
            client.writer("numbers", timeout=DEADLINE) as writer,
            client.sampler("numbers", 500, shared_memory=shared) as sampler,
        ):
            await append(writer, range(100))
            await writer.flush(DEADLINE)
            await sampler.sample(DEADLINE)
            restart = loop.run_in_executor(None, server.restart)
            await append(writer, range(100, 200))
            await writer.flush(DEADLINE)
            await restart

            async def sees_all():
                try:
                    return len(np.unique((await sampler.sample(0.5)).keys)) == 200
                except DataError:
                    return False

            await until(sees_all)
            stored = np.sort(await read(client, shared_memory=shared))
            np.testing.assert_array_equal(stored, np.arange(200))


@in_a_loop
async def test_a_stopped_server_suspends_only_the_coroutines_that_wait(starting):
    """A cancelled `append` has changed nothing; a cancelled `flush` and the end of its timeout lose nothing."""
    server = starting(TableSettings(table=NUMBERS, priority_exponent=0.0, window=2, **SMALL))
    ticks, appended = [], []

    async def tick():
        while True:
            ticks.append(len(appended))
            await asyncio.sleep(0.01)

    async def write(writer):
        for x in range(400):
            await writer.append({"x": x})
            appended.append(x)

    async with connect(server) as client, client.writer("numbers") as writer:
        ticker = asyncio.create_task(tick())
        await writer.flush(DEADLINE)
        os.killpg(server.process.pid, signal.SIGSTOP)
        for _ in range(3):  # Each is cancelled in the middle of an append.
            task = asyncio.create_task(write(writer))
            while ticks[-20:] != [len(appended)] * 20 or not appended:
                await asyncio.sleep(0.01)
            assert not task.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len(appended) <= 10 * (2 + 2 + 2)  # window, queue, and the segment that waits
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await writer.flush()
        with pytest.raises(DataError):
            await writer.flush(0.1)
        with pytest.raises(DataError):
            await client.status(timeout=0.1)
        os.killpg(server.process.pid, signal.SIGCONT)
        await write(writer)
        await writer.flush(DEADLINE)
        ticker.cancel()
        np.testing.assert_array_equal(await read(client), appended)


@in_a_loop
async def test_cancelled_waits_lose_no_batch_of_a_queue(starting):
    server = starting(TableSettings(table=NUMBERS, order="queue", draws_per_item=1, **SMALL))
    given, rng = [], np.random.default_rng(1)
    async with (
        connect(server) as client,
        client.writer("numbers") as writer,
        client.sampler("numbers", 5, prefetch=4) as sampler,
    ):

        async def write():
            for x in range(300):
                await writer.append({"x": x})
                await asyncio.sleep(0.001)
            await writer.flush(DEADLINE)

        writing, cancelled = asyncio.create_task(write()), 0
        async with asyncio.timeout(DEADLINE):
            while len(given) < 300:
                task = asyncio.create_task(sampler.sample())
                await asyncio.sleep(0.003 * rng.random())
                task.cancel()
                try:
                    given += (await task)["x"].tolist()
                except asyncio.CancelledError:
                    cancelled += 1
        await writing
        assert Counter(given) == dict.fromkeys(range(300), 1)
        assert cancelled > 10


@in_a_loop
async def test_other_coroutines_run_between_two_segments(starting):
    server, turns = starting(TableSettings(table=NUMBERS, **SMALL)), 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with connect(server) as client, client.writer("numbers") as writer:
        counting = asyncio.create_task(count())
        for segment in range(1, 11):
            await append(writer, range(10))
            assert turns >= segment - 1
        counting.cancel()


@in_a_loop
async def test_clients_in_one_loop_do_not_disturb_each_other(server):
    async with connect(server) as one, connect(server) as other, AsyncExitStack() as stack:
        writers = [await stack.enter_async_context(client.writer("numbers")) for client in (one, other, one, other)]
        with pytest.raises(UsageError) as refused:
            await stack.enter_async_context(one.writer("numbers"))
        assert "4" in refused.value.problem
        await asyncio.gather(*(append(writer, range(100 * i, 100 * i + 100)) for i, writer in enumerate(writers)))
        await asyncio.gather(*(writer.flush(DEADLINE) for writer in writers))
        for found in await asyncio.gather(read(one), read(other, shared_memory=False)):
            np.testing.assert_array_equal(np.sort(found), np.arange(400))
        assert (await one.status()).tables["numbers"].writers == 4


@BOTH
@in_a_loop
async def test_a_wait_ends_when_its_sampler_or_client_is_closed(server, shared):
    client = connect(server)
    async with client.sampler("empty", 4, shared_memory=shared) as sampler:
        with pytest.raises(DataError):
            await sampler.sample(0.1)
        waiting = asyncio.create_task(sampler.sample())
        await asyncio.sleep(0.05)
        sampler.close()
        with pytest.raises(UsageError):
            await waiting
    async with connect(server) as other:
        assert "empty" in (await other.status()).tables
    os.killpg(server.process.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(client.status(timeout=DEADLINE))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(UsageError) as refused:
        await waiting
    assert not isinstance(refused.value, DataError)
    os.killpg(server.process.pid, signal.SIGCONT)


@in_a_loop
async def test_a_flush_ends_when_its_writer_is_closed(starting, monkeypatch):
    monkeypatch.setattr(asynchronous, "EXIT_SECONDS", 0.1)
    server = starting(TableSettings(table=NUMBERS, **SMALL))
    async with connect(server) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.writer("numbers") as writer:
                await append(writer, range(3))
                await writer.flush(DEADLINE)
                os.killpg(server.process.pid, signal.SIGSTOP)
                await append(writer, range(3))
                waiting = asyncio.create_task(writer.flush())
                await asyncio.sleep(0.05)
                raise ZeroDivisionError  # is not hidden by the items that are not stored
        with pytest.raises(UsageError) as refused:
            await waiting
        assert not isinstance(refused.value, DataError)
        with pytest.raises(UsageError):
            await writer.append({"x": 1})
        os.killpg(server.process.pid, signal.SIGCONT)
        with pytest.raises(DataError):  # noqa: PT012
            async with client.writer("numbers", timeout=DEADLINE) as writer:
                os.killpg(server.process.pid, signal.SIGSTOP)
                await append(writer, range(3))
        os.killpg(server.process.pid, signal.SIGCONT)
        async with client.writer("numbers", timeout=DEADLINE) as writer:
            await append(writer, range(3))
            closing = asyncio.create_task(writer.close())
            await asyncio.sleep(0)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            with pytest.raises(UsageError):
                await writer.append({"x": 1})


@in_a_loop
async def test_closed_and_cancelled_clients_leave_no_descriptor_and_no_thread(server):
    async def use():
        async with connect(server) as client:
            opening = asyncio.create_task(client.writer("spare").__aenter__())
            await asyncio.sleep(0)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            async with client.writer("spare", timeout=DEADLINE) as writer:
                await append(writer, [1])
            for shared in (True, False):
                async with client.sampler("spare", 8, shared_memory=shared) as sampler:
                    await sampler.sample(DEADLINE)
                    sampler._open.callback(lambda: closed_in.add(threading.get_ident()))
                gc.collect()
                assert mapped() <= others
        return len(os.listdir("/proc/self/fd"))

    def mapped():
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if ".replay" in line}

    others = mapped()
    closed_in = set()  # The end of a socket may wait for a server that is away.
    before = await use()  # One more thread may belong to the loop's executor.
    threads = threading.active_count()
    assert [await use() for _ in range(3)] == [before] * 3
    assert threading.get_ident() not in closed_in
    assert threading.active_count() <= threads + 1
