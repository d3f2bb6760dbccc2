"""A server runs without a trainer: with keys of roles that the trainer does not know, and a link of the test."""

import signal
import socket
import threading
import time
from functools import partial

import pytest
from support.builders import PIXELS, RUN, make_segment
from support.waiting import DEADLINE, until

from apex.transport.run_codec import RunCodec
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE, UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.rate_limiter import RateLimiter
from apexreplay.sampling.batch_drawer import DrawSettings
from apexreplay.server import service
from apexreplay.server.service import ServerSettings, serve
from apexreplay.store.layout import StoreSettings
from apexreplay.transport.curve.key_store import Endpoint, Keys, create_pair, lists_for
from apexreplay.transport.endpoints import ExperienceSender, ReceiptReceiver, max_segment_bytes
from apexreplay.transport.sockets import InsecureBindWarning, open_context

TABLE = {name: Endpoint("server", ("writer",)) for name in ("experience", "priorities", "receipts")}
CODEC = RunCodec(RUN, PIXELS)


class Link:
    """The end of a link of which the test decides what the run says."""

    inserts_wanted = finished = lost = closed = False
    answers = True

    def check(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def read_keys(tmp_path):
    for role in ("server", "writer"):
        create_pair(tmp_path, role)
    return lambda role: Keys(tmp_path, role, TABLE, remedy="create it", command="make-keys")


@pytest.fixture
def settings(tmp_path, read_keys):
    with socket.socket() as first, socket.socket() as second, socket.socket() as third:
        for probe in (first, second, third):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (first, second, third)]
    return ServerSettings(
        codec=RunCodec(RUN, PIXELS),
        path=tmp_path / "store",
        store=StoreSettings(100, 1 << 20, 4, 0.6, 1e-6),
        draw=DrawSettings(0, 1, 4, 2, RateLimiter(1, 0.0, 0.1, inserts_wait=False)),
        num_rows=1,
        batch_endpoints=[],
        seed=1,
        snapshots=None,
        snapshot_seconds=1.0,
        last_snapshot_seconds=1.0,
        endpoints={name: f"tcp://127.0.0.1:{port}" for name, port in zip(TABLE, ports, strict=True)},
        max_segment_items=5,
        max_segments=4,
        max_segment_bytes=max_segment_bytes(PIXELS.table, 50),
        read_keys=partial(read_keys, "server"),
        stuck_seconds=0.0,
        warning=InsecureBindWarning("", ""),
    )


@pytest.mark.parametrize(("end", "status", "kept"), [("finished", FINISHED, False), ("lost", NEIGHBOUR_GONE, True)])
def test_a_server_without_a_trainer_stores_and_acknowledges(settings, read_keys, end, status, kept):
    link, stop, statuses, joined = Link(), Stop(), [], []

    def join(status):
        joined.append(status)
        return link

    thread = threading.Thread(target=lambda: statuses.append(serve(settings, join, stop)))
    thread.start()
    try:
        with open_context(read_keys("writer")) as context:
            segment = make_segment(PIXELS, number=0, base=0)._replace(group=2)
            receipts = ReceiptReceiver(context, [settings.endpoints["receipts"]], CODEC, [segment.stream])
            sender = ExperienceSender(context, settings.endpoints["experience"], num_messages=4)
            sender.send(CODEC.encode_segment(segment))
            receipt = until(lambda: receipts.receive(0.1), "receipt")[-1]
        assert (receipt.stream, receipt.contiguous) == (segment.stream, 1)
        assert joined[0]().num_inserted == 5
        setattr(link, end, True)
    finally:
        stop.request()
        thread.join()
    assert (statuses, link.closed, settings.path.exists()) == ([status], True, kept)


@pytest.mark.parametrize(
    ("signum", "change", "kept"),
    [
        (signal.SIGTERM, {"finished": True}, False),
        (signal.SIGTERM, {"lost": True}, True),
        (signal.SIGTERM, {"answers": False}, True),
        (signal.SIGTERM, {}, True),
        (signal.SIGHUP, None, True),
    ],
    ids=["finished", "lost", "silent", "too late", "another signal"],
)
def test_a_server_waits_after_sigterm_for_the_end_of_the_run(settings, monkeypatch, signum, change, kept):
    monkeypatch.setattr(service, "LINGER_SECONDS", 0.5 if change == {} else 600.0)
    link, stop, began = Link(), Stop(), threading.Event()
    thread = threading.Thread(target=service.serve, args=(settings, lambda status: began.set() or link, stop))
    thread.start()
    assert began.wait(DEADLINE)
    stop.signum = signum
    stop.request()
    if change:
        time.sleep(0.5)
        assert thread.is_alive()
        for name, value in change.items():
            setattr(link, name, value)
    thread.join(DEADLINE)
    assert (thread.is_alive(), settings.path.exists()) == (False, kept)


def test_keys_follow_the_table_and_name_the_command(tmp_path, read_keys):
    assert lists_for(TABLE, "server") == ("writer",)
    assert read_keys("writer").server_key("receipts") == read_keys("server").public
    (tmp_path / "server.key").unlink()
    with pytest.raises(UsageError) as refused:
        read_keys("writer")
    assert "make-keys" in refused.value.remedy
