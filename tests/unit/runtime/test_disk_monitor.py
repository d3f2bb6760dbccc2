"""Whoever watches a run hears once that nothing of it can be kept, and once that it can again."""

from __future__ import annotations

from pathlib import Path

from apex.runtime.disk_monitor import DiskMonitor
from apex.runtime.hardware import Space, read_space

ROOM = Space(10**9, 10**8)


def watch(*spaces):
    """What is told while the disk is found to be so, once a second."""
    now, said, left = [0.0], [], list(spaces)
    disk = DiskMonitor(Path("runs/x"), said.append, read=lambda path: left.pop(0), clock=lambda: now[0])
    while left:
        disk.look()
        disk.look()  # Not twice in one second.
        now[0] += 1.0
    return said


def test_a_full_disk_is_told_once_and_so_is_that_there_is_room_again():
    full = "the disk of runs/x is full (0 KiB free); the run continues, but logs, curves and checkpoints are lost"
    said = watch(ROOM, Space(10**9, 0), Space(10**9, 4096), Space(10**9, 0), ROOM, ROOM)
    assert said == [f"{full} until this is fixed", "the run folder runs/x is writable again"]


def test_a_disk_with_room_is_not_worth_a_word():
    assert watch(ROOM, ROOM) == []


def test_a_folder_that_is_gone_or_read_only_is_told(tmp_path):
    gone, read_only = read_space(tmp_path / "gone"), Space(10**9, 10**8, "is not writable")
    assert [said.partition(";")[0] for said in watch(ROOM, gone, read_only)] == [
        "the run folder runs/x cannot be used: No such file or directory",
        "the run folder runs/x is not writable",
    ]
