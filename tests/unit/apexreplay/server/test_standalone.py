"""The processes of tables report to the control process, which may be stopped for long."""

import threading
from multiprocessing import Pipe

from support.waiting import DEADLINE

from apexreplay.server.standalone import STATUS_SECONDS, _Link
from apexreplay.wire.json_codec import decode_json


def test_reports_that_nobody_reads_do_not_stop_a_table():
    reader, writer = Pipe(duplex=False)
    link = _Link(lambda: {"state": "x" * 1_000}, writer)

    def check_often():
        for _ in range(200 * int(STATUS_SECONDS)):
            for _ in range(100):
                link.check()

    thread = threading.Thread(target=check_often, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    assert decode_json(reader.recv_bytes(), dict[str, str]) == {"state": "x" * 1_000}
    assert not reader.poll()  # Only one report waited.
