"""The disk monitor reports once that the run folder cannot be written, and once that it can again."""

from __future__ import annotations

from pathlib import Path

from apex.launch.disk_monitor import DiskMonitor
from apex.runtime.hardware import Space, read_space
from apex.sentences import describe_disk

ROOM = Space(10**9, 10**8)


def reports(*spaces):
    """What the monitor reports if it finds these spaces, one a second."""
    now, found, left = [0.0], [], list(spaces)
    disk = DiskMonitor(Path("runs/x"), found.append, read=lambda path: left.pop(0), clock=lambda: now[0])
    while left:
        disk.check()
        disk.check()  # Not twice in one second.
        now[0] += 1.0
    return found


def test_a_full_disk_and_new_room_are_reported_once_each():
    full = describe_disk("runs/x", "is on a full disk")
    found = reports(ROOM, Space(10**9, 0), Space(10**9, 4096), Space(10**9, 0), ROOM, ROOM)
    assert found == [full, describe_disk("runs/x", "")]


def test_a_folder_that_is_gone_or_read_only_is_reported(tmp_path):
    gone, read_only = read_space(tmp_path / "gone"), Space(10**9, 10**8, "is not writable")
    assert reports(ROOM, gone, read_only) == [describe_disk("runs/x", space.flaw) for space in (gone, read_only)]
