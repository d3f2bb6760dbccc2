"""Replay buffers of other projects beside the server: their scripts, ratios and table."""

import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import replay_peer
from support.benches import ROOT, stand_in

from apexreplay.errors import UsageError
from apexreplay.process.lifecycle import Stop
from bench.harness.replay_peers import PEERS, SCRIPTS, PeerError, print_peers, ratios, read_peer, render_table, run_peer
from bench.peer_table import BEGIN, END, RECORD, rebuild

OURS = {"insert_transitions_per_s": 80_000.0, "sample_batches_per_s": 50.0, "direct_insert_transitions_per_s": 9e4}
REVERB = {"reverb_inserts_per_s": 10_000.0, "reverb_batches_per_s": 20.0, "reverb_bytes_per_transition": 7_100.0}


class NaiveBuffer:
    """A buffer that keeps all frames and draws the newest windows; `shift` makes them wrong."""

    pid = None
    shift = 0

    def __init__(self, recording, transitions):
        self.recording, self.frames, self.rows = recording, [], []

    def insert(self, rows):
        self.rows += rows.tolist()
        self.frames += list(self.recording.steps(rows)["frame"])

    def flush(self):
        pass

    def draw(self, priorities):
        last = np.arange(len(self.rows) - len(priorities), len(self.rows))
        frames = [self.frames[row - replay_peer.WINDOW + 1 + self.shift : row + 1 + self.shift] for row in last - 1]
        return np.array(frames), np.array(self.rows)[last - 1]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    frames = np.random.default_rng(0).integers(0, 256, (300, 84, 84), np.uint8)
    np.save(tmp_path / "frames.npy", frames)
    monkeypatch.setattr(sys, "argv", ["script", str(tmp_path / "frames.npy"), "1000", "0.1"])


def test_a_buffer_with_correct_windows_is_measured(arguments, capsys, monkeypatch):
    memory = iter([50_000, 75_000])  # This process may release memory of earlier tests meanwhile.
    monkeypatch.setattr(replay_peer, "read_memory", lambda pid: next(memory))
    replay_peer.main(NaiveBuffer)
    figures = json.loads(capsys.readouterr().out)
    assert figures.pop("bytes_per_transition") == 25.0
    assert figures.keys() == {"inserts_per_s", "batches_per_s"}
    assert all(value > 0 for value in figures.values())


def test_memory_of_a_process_grows_with_what_it_stores():
    before = replay_peer.read_memory("self")
    with mmap.mmap(-1, 50 << 20) as memory:
        memory.write(b"1" * len(memory))
        assert replay_peer.read_memory(os.getpid()) > before + (25 << 20)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_buffer_with_shifted_windows_is_refused(arguments, monkeypatch, shift):
    monkeypatch.setattr(NaiveBuffer, "shift", shift)
    with pytest.raises(ValueError, match="512 of 512"):
        replay_peer.main(NaiveBuffer)


def test_a_peer_has_a_script_and_a_command_that_installs_it():
    setup = (SCRIPTS / "setup.sh").read_text()
    for name in PEERS:
        assert (SCRIPTS / f"{name}_bench.py").is_file()
        assert f"[{name}]=" in setup


def test_a_peer_gets_the_work_and_its_last_line_counts(tmp_path):
    peer = read_peer(stand_in(tmp_path, "reverb", f'echo "$@" > {tmp_path}/arguments'))
    assert run_peer(peer, tmp_path / "frames.npy", 2_000, 1.5, Stop()) == REVERB
    script, *rest = (tmp_path / "arguments").read_text().split()
    assert Path(script) == SCRIPTS / "reverb_bench.py"
    assert rest == [str(tmp_path / "frames.npy"), "2000", "1.5"]


@pytest.mark.parametrize(
    "script", ["echo broken >&2; exit 3", "echo broken >&2; inserts=null", "echo broken >&2; inserts="]
)
def test_a_peer_that_fails_is_named_with_its_last_line(tmp_path, script):
    peer = read_peer(stand_in(tmp_path, "cpprb", script))
    with pytest.raises(PeerError) as caught:
        run_peer(peer, tmp_path, 2_000, 1.5, Stop())
    assert all(part in caught.value.problem for part in ("cpprb", str(peer.python), "broken"))
    assert caught.value.remedy


def test_a_stop_ends_the_peer(tmp_path):
    stop = Stop()
    stop.request()
    with pytest.raises(KeyboardInterrupt):
        run_peer(read_peer(stand_in(tmp_path, "cpprb", "sleep 600")), tmp_path, 2_000, 1.5, stop)


@pytest.mark.parametrize("word", ["unknown", "unknown=/bin/sh", "reverb=/none", "/bin/sh"])
def test_a_peer_that_is_not_there_is_refused(word):
    with pytest.raises(UsageError) as caught:
        read_peer(word)
    assert repr(word.partition("=")[0])[1:-1] in caught.value.problem
    assert caught.value.remedy


def test_ratios_to_reverb_are_ours_by_theirs_and_have_bars(capsys):
    figures = OURS | REVERB
    found = ratios(figures)
    assert found == {
        "insert_transitions_per_s_by_reverb": 8.0,
        "direct_insert_transitions_per_s_by_reverb": 9.0,
        "sample_batches_per_s_by_reverb": 2.5,
    }
    print_peers(figures | found)
    low = [line for line in capsys.readouterr().out.splitlines() if line.endswith("below the bar")]
    assert len(low) == 1
    assert "2.5" in low[0]
    assert ratios(OURS) == {}


def test_the_table_has_a_row_for_each_measured_system():
    figures = OURS | REVERB | ratios(OURS | REVERB) | {"grown_bytes_per_transition": 950.0}
    rows = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in render_table(figures)[2:]]
    assert rows == [
        ["80,000 (8.0)", "50 (2.5)", "950"],
        ["90,000 (9.0)", "", "950"],
        ["10,000", "20", "7,100"],
    ]


def test_the_document_has_the_table_of_the_committed_record():
    document = ROOT / "docs/performance.md"
    assert rebuild(document) == document.read_text(), "run python -m bench peers"
    assert f"({RECORD})" in document.read_text().partition(BEGIN)[2].partition(END)[0]
