"""The processes of tables report to the control process, and use the memory that was served last."""

import errno
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from support.waiting import DEADLINE

from apexreplay import TableSettings, table
from apexreplay.errors import DataError
from apexreplay.server import standalone
from apexreplay.server.standalone import STATUS_SECONDS, _LastMemory, _Link, _make_room, _open_folder
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


def test_only_a_memory_that_another_host_has_outdated_is_removed(tmp_path, monkeypatch):
    memory = tmp_path / "apex-1-0.replay"

    def start(host, fails=False):
        """Starts on a host that has a memory; returns whether it uses this memory."""
        memory.touch()
        monkeypatch.setattr(standalone, "memory_id", lambda: host)
        last = _LastMemory(tmp_path, "numbers")
        last.remove_outdated(memory)
        if not fails:
            last.note()
        return memory.exists()

    assert start("a")  # the first start that records its host
    assert start("a")
    assert not start("b", fails=True)
    assert start("a")
    assert not start("b")
    assert start("b")
    assert not start("a", fails=True)
    assert not start("a")
    assert start("a")


def test_a_changed_record_of_the_last_memory_is_refused(tmp_path):
    last = _LastMemory(tmp_path, "numbers")
    last.note()
    (record,) = tmp_path.iterdir()
    record.write_bytes(record.read_bytes().replace(b":", b": ", 1))
    with pytest.raises(DataError, match=record.name):
        _LastMemory(tmp_path, "numbers")


def test_a_full_disk_is_no_reason_to_remove_the_ids_of_tables(tmp_path, monkeypatch):
    """Without them, the memory of a killed server would not be found, and its snapshots would be refused."""

    def fail(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = _open_folder(tmp_path, ["numbers"])
    with monkeypatch.context() as patch:
        patch.setattr(standalone, "replace_file", fail)
        with pytest.raises(DataError, match="No space left") as refused:
            _open_folder(tmp_path, ["numbers"])
    assert "space" in refused.value.remedy
    assert "remove" not in refused.value.remedy
    assert _open_folder(tmp_path, ["numbers"]) == (before[0] + 1, before[1])


def test_without_the_file_of_ids_a_table_keeps_that_of_its_snapshots(tmp_path, monkeypatch):
    class Snapshots:
        def __init__(self, path):
            self.name = path.name

        def newest(self):
            return SimpleNamespace(run_id=77) if self.name == "numbers" else None

    (tmp_path / "numbers").mkdir()
    (tmp_path / "others").mkdir()
    monkeypatch.setattr(standalone, "SnapshotFolder", Snapshots)
    start, (first, second) = _open_folder(tmp_path, ["numbers", "others"])
    assert (first, second != 77) == (77, True)
    assert start > 80_000_000, "incarnations of an earlier start must not come again"
    assert _open_folder(tmp_path, ["numbers"]) == (start + 1, [77])


def test_room_is_made_for_the_new_memories_of_all_tables_together(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(standalone, "reclaim", lambda own, num_bytes: asked.append((own, num_bytes)))
    monkeypatch.setattr(standalone, "store_path", lambda run_id: tmp_path / str(run_id))
    tables = [TableSettings(table=table(name, {"x": "int64"}), capacity=1_000) for name in ("a", "b", "c")]
    one = tables[0].store.sizes.file_bytes(tables[0].table)
    (tmp_path / "1").touch()
    _make_room(tables, [1, 2, 3])
    assert asked == [(tmp_path / "2", 2 * one)]
