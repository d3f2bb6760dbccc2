"""The view of a run: a picture that fits any terminal, even if the status lacks values; otherwise plain lines."""

import io
import os
import pty
import select
import subprocess
import sys
from types import SimpleNamespace
from typing import get_args

import pytest
from msgspec.structs import replace
from rich.console import Console
from support.messages import as_json, make_row, make_run_status

from apex.facts import INTERRUPTED, EndReason, Part
from apex.launch.terminal.dashboard import MAX_SCORES, History, Note, plain_line, render, seconds_to_go
from apex.launch.terminal.layout import RowLayout
from apex.launch.terminal.view import PlainView, open_view, print_line, show_once
from apex.runtime.text import duration, number
from apex.sentences import advise, describe_bottleneck, describe_wait
from apex.transport.messages.status import Resources
from apexreplay.facts import Waiting
from apexreplay.process.text import clean, known, size

SIZES = [(width, height) for width in (1, 5, 20, 40, 59, 60, 80, 120, 300) for height in (1, 3, 10, 24, 60)]
ESCAPE = "\x1b"


full_status, role = make_run_status, make_row
UNKNOWN = make_run_status(
    **dict.fromkeys(("steps_per_second", "updates_per_second", "samples_per_second", "policy_lag", "limited_by")),
    replay=dict.fromkeys(
        ("size", "bytes", "max_bytes", "inserts_per_second", "samples_per_insert", "stale_priorities", "busy_share")
    ),
    actors=dict.fromkeys(("score", "mean_score", "episodes")),
    learner=dict.fromkeys(("loss", "mean_q", "gradient_norm", "td_error")),
    evaluator=dict.fromkeys(("score", "best", "episodes", "updates")),
    limits={"score": None},
    run="",
    environment="",
    elapsed_seconds=0.0,
    steps=0,
    updates=0,
    roles=[],
)
STATUSES = {"none": None, "unknown": UNKNOWN, "full": full_status()}


def draw(status, width=100, height=60, history=None, **options):
    """The picture as rows of text."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(render(status, width, height, history or History(), **options))
    return console.file.getvalue().splitlines()


def row_of(rows, label):
    return next(row for row in rows if row.startswith(label))


def test_several_replay_servers_have_numbers():
    rows = draw(full_status(roles=[role("replay", shard=0), role("replay", shard=1), role("actor")]))
    assert row_of(rows, "replay 0")
    assert row_of(rows, "replay 1")
    assert not any(row.startswith("replay 0") for row in draw(full_status(roles=[role("replay", shard=0)])))


def test_resources_of_programs_are_shown():
    learner = Resources(cores=1.25, memory_bytes=300 * 2**20, gpu_share=0.87, gpu_memory_bytes=3 * 2**30)
    actor = Resources(cores=0.5, memory_bytes=2**30)
    roles = [role("actor", resources=actor), role("evaluator")]
    rows = draw(
        full_status(roles=roles, learner={"resources": as_json(learner), "waiting": {"what": "batches"}}), width=200
    )
    assert f"            1.25 cores  300 MiB  GPU 87% 3.0 GiB   waits {describe_wait(Waiting('batches'))}" in rows
    assert any("0.50 cores  1.0 GiB" in row for row in rows)
    assert sum("cores" in row for row in rows) == 2


def test_unusable_transitions_are_shown():
    assert "12 transitions" in row_of(draw(full_status(learner={"unusable_transitions": 12})), "unusable")
    assert not any(row.startswith("unusable") for row in draw(full_status()))


# --- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("status", STATUSES.values(), ids=STATUSES.keys())
def test_the_dashboard_fits_any_terminal(status, width, height):
    history = History(footer=("logs runs/x/logs",), actor_scores=[1.0, 2.0, 3.0], evaluator_scores=[5.0, 5.0])
    history.notes.append(Note("key", "12:00:01 replay WARNING replay waits for the learner (12 s)"))
    rows = draw(status, width, height, history)
    assert 1 <= len(rows) <= height
    assert max(len(row) for row in rows) <= width


def test_a_wide_dashboard_shows_all_figures():
    rows = draw(full_status(), history=History(actor_scores=[-21.0, 0.0, 21.0], evaluator_scores=[1.0, 2.0]))
    assert row_of(rows, "apex").split() == ["apex", "pong-20250131-235959", "ALE/Pong-v5"]
    assert row_of(rows, "phase") == "phase       training   1:02:03   0:02:56 to go"
    assert row_of(rows, "score") == "score       12   actor 31   epsilon 0.00066   ▁▅█"
    assert row_of(rows, "evaluator") == "evaluator   18.2   best 19   goal 475   ▁█"
    assert row_of(rows, "actors") == "actors      31 of 32   mean score -3.25   17 episodes"
    assert row_of(rows, "steps") == "steps       123,456   1,890/s"
    assert row_of(rows, "updates") == "updates     345   9.12/s   policy lag 12 updates"
    assert row_of(rows, "replay") == "replay      █████░░░░░░░░░░░░░░░ 25%   50,000 of 200,000   100 MiB of 3.0 GiB"
    assert row_of(rows, "samples") == "samples     1,165/s   0.61 per insert   3 stale priorities"
    assert row_of(rows, "learner") == "learner     loss 0.0123   Q 0.5   TD error 0.1   gradient norm 1"
    assert (
        row_of(rows, "actor ")
        == f"actor       1,890 steps/s          waits {describe_wait(Waiting('receipts', seconds=12.0))}"
    )
    assert row_of(rows, "bottleneck") == f"bottleneck  {describe_bottleneck(full_status().limited_by)}"
    assert rows[-1] == "try         increase --actor.num-processes"  # The remedy follows the cause.
    assert not any(row.startswith("try") for row in draw(full_status(limited_by={"increase": []})))


def test_a_low_terminal_shows_the_most_important_rows():
    rows = draw(full_status(), 80, 7)
    labels = [row.split()[0] for row in rows]
    assert labels == ["apex", "phase", "score", "evaluator", "steps", "bottleneck", "try"]


def test_a_narrow_dashboard_wraps_beside_its_labels():
    rows = [row.rstrip() for row in draw(full_status(), 40, 60)]
    at = rows.index(row_of(rows, "phase"))
    assert rows[at : at + 2] == ["phase       training  1:02:03", "            0:02:56 to go"]
    at = rows.index(row_of(rows, "replay"))
    assert rows[at : at + 2] == ["replay      25%  50,000 of 200,000", "            100 MiB of 3.0 GiB"]


def test_the_dashboard_waits_for_the_learner_first():
    (row,) = draw(None)
    assert row.split()[0] == "apex"


@pytest.mark.parametrize(
    ("fields", "silent", "row"),
    [
        ({}, 7.0, "phase       training   no answer for 7 s"),
        ({"roles": [role("replay", seen=7.0)]}, 0.0, "replay      silent for 7 s"),
        ({"roles": [role("actor", host="one"), role("actor", host="two")]}, 0.0, "actor two"),
        ({"roles": [role("actor")] * 100}, 0.0, "            and 92 more"),
        ({"roles": [role("actor")] * 100, "more_roles": 900}, 0.0, "            and 992 more"),
        ({"phase": "finishing", "end": EndReason("score", 475.0)}, 0.0, "phase       finishing: reached the score 475"),
        ({"phase": "finished", "end": INTERRUPTED}, 0.0, "phase       interrupted "),
    ],
)
def test_silence_hosts_further_programs_and_the_end_are_shown(fields, silent, row):
    assert row_of(draw(full_status(**fields), history=History(silent_seconds=silent)), row)


def test_a_host_of_a_large_run_is_silent_later():
    status = full_status(roles=[role("actor", seen=7.0)], more_roles=999)
    assert "silent" not in row_of(draw(status), "actor ")


def test_control_characters_do_not_reach_the_terminal():
    history = History()
    history.notes.append(Note("key", f"12:00:01 replay ERROR {ESCAPE}[2Jgone"))
    assert not any(ESCAPE in row for row in draw(full_status(environment=f"{ESCAPE}[2J"), history=history))


def test_an_ascii_terminal_gets_ascii_characters():
    rows = draw(full_status(), history=History(actor_scores=[1.0, 2.0, 3.0]), ascii_only=True)
    assert "\n".join(rows).isascii()
    assert "#####..............." in row_of(rows, "replay")


# --- curves and forecasts ---------------------------------------------------------------------------------------------


def scored(actor, evaluator=None, updates=0):
    return full_status(actors={"score": actor}, evaluator={"score": evaluator, "updates": updates})


def test_a_new_score_or_evaluation_is_added_to_the_history():
    history = History()
    for status in (scored(None), scored(1), scored(1), scored(2, 7.0, 10), scored(2, 7.0, 10), scored(2, 7.0, 20)):
        history.add(status)
    assert history.actor_scores == [1, 2]
    assert history.evaluator_scores == [7.0, 7.0]


def test_a_long_curve_is_thinned_and_keeps_its_newest_point():
    history = History()
    for i in range(10 * MAX_SCORES):
        history.add(scored(i))
        assert history.actor_scores[-1] == i
        assert len(history.actor_scores) <= MAX_SCORES


def test_a_sparkline_shows_each_value_or_means():
    painter = RowLayout(80, ascii_only=True)
    assert painter.sparkline([]) == painter.sparkline([1.0]) == ""
    assert painter.sparkline([0.0, 7.0, 3.0]) == "_#="
    assert painter.sparkline([2.0, 2.0]) == "__"
    assert painter.sparkline([float(i) for i in range(300)]) == painter.sparkline([float(i) for i in range(30)])


def test_the_nearest_limit_gives_the_remaining_time():
    limits = {"steps": 2_000, "updates": 1_000, "minutes": 10.0}
    rates = {"steps_per_second": 10.0, "updates_per_second": 10.0, "elapsed_seconds": 0.0}
    status = full_status(limits=limits, steps=1_000, updates=500, **rates)
    assert seconds_to_go(status) == 50.0
    assert seconds_to_go(replace(status, updates=2_000)) == 0.0
    replay = {"size": 5_000, "min_size": 20_000, "inserts_per_second": 1_000.0}
    assert seconds_to_go(full_status(phase="filling_replay", replay=replay)) == 15.0  # until training begins


def test_remaining_time_is_unknown_without_limits_or_rates():
    limits = {"updates": 1_000, "minutes": 0.0}
    assert seconds_to_go(full_status(limits=limits, updates_per_second=None)) is None
    assert seconds_to_go(full_status(limits={"minutes": 0.0})) is None
    assert seconds_to_go(full_status(phase="finishing")) is None


def test_numbers_are_short():
    values = (None, float("nan"), float("inf"), "12", 0, -21.0, 0.00066, 18.25, 123_456, 1_234_567)
    expected = ["-", "-", "-", "-", "0", "-21", "0.00066", "18.2", "123,456", "1.23M"]
    assert [number(value) for value in values] == expected


def test_durations_and_sizes_have_units():
    assert [duration(value) for value in (None, 59.9, 3_600)] == ["0:00:00", "0:00:59", "1:00:00"]
    assert [size(value) for value in (None, 2**18, 2**20, 3 * 2**30)] == ["-", "256 KiB", "1 MiB", "3.0 GiB"]
    assert known(True) == 1
    assert clean("a\tb\x07") == "a b "


# --- plain lines ------------------------------------------------------------------------------------------------------


def test_a_plain_line_has_the_known_figures():
    assert plain_line(full_status()) == (
        "1:02:03 training, 0:02:56 to go | steps 123,456 (1,890/s) | updates 345 (9.12/s) | score 12 | "
        "evaluator 18.2, best 19 | bottleneck: actors"
    )
    short = plain_line(full_status(evaluator={"score": None}))  # leaves room for a part that is less important
    assert short.endswith(" | score 12 | bottleneck: actors | replay 50,000/200,000")
    assert plain_line(UNKNOWN) == "0:00:00 training, 1:05:00 to go | steps 0 (-/s) | updates 0 (-/s) | replay -/200,000"


def test_a_plain_line_comes_every_ten_seconds_and_with_each_phase():
    stream, now = io.StringIO(), [0.0]
    view = PlainView(stream, clock=lambda: now[0])
    printed = []
    for second, phase in enumerate(["filling_replay"] * 3 + ["training"] * 22):
        now[0] = float(second)
        view.show(full_status(phase=phase, limited_by=None), History())
        printed += [second] if stream.getvalue().count("\n") > len(printed) else []
    assert printed == [0, 3, 13, 23]


def test_a_plain_line_has_the_silence_of_the_learner():
    for seconds, part in [(5.0, "steps 123,456 (1,890/s)"), (12.4, "no answer for 12 s")]:
        stream = io.StringIO()
        PlainView(stream).show(full_status(), History(silent_seconds=seconds))
        assert stream.getvalue().split(" | ")[1] == part


LARGE = {"steps": 123_456_789, "steps_per_second": 123_456.7, "updates": 123_456_789, "updates_per_second": 999_999.9}
LIMITS = {"minutes": 1e6, "steps": 0, "updates": 0}


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "evaluating_final_policy", "end": EndReason("steps", 1e299)},
        {"replay": {"size": 10**12, "capacity": 10**12}, "limits": LIMITS, "elapsed_seconds": 1e7},
        *({"limited_by": {"part": part}} for part in get_args(Part)),
    ],
)
def test_a_plain_line_has_at_most_160_columns(changes):
    assert len(plain_line(full_status(**LARGE, actors={"score": -123_456.7}, **changes), 1e5)) <= 160


def test_each_cause_of_a_bottleneck_is_printed_once_in_plain_lines():
    stream, now = io.StringIO(), [0.0]
    view = PlainView(stream, clock=lambda: now[0])
    first, second = full_status(), full_status(limited_by={"cause": "busy_replay", "increase": []})
    for status in (first, second, first, second):
        view.show(status, History())
        now[0] += 10.0
    lines = [line for line in stream.getvalue().splitlines() if " | " not in line]
    causes = [f"bottleneck: {describe_bottleneck(status.limited_by)}" for status in (first, second)]
    assert lines == [causes[0], f"try: {advise(first.limited_by)}", causes[1]]
    assert max(map(len, stream.getvalue().splitlines())) <= 160


@pytest.fixture
def cell(monkeypatch):
    """The lines that IPython shows in place in a notebook cell, each with all its texts."""
    shown = []

    def display(content, *, raw, display_id):
        lines = [content["text/plain"]]
        shown.append(lines)
        return SimpleNamespace(update=lambda content, *, raw: lines.append(content["text/plain"]))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: "a shell"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return shown


def test_a_notebook_cell_has_one_line_that_changes_in_place(cell, monkeypatch):
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    with open_view(stream) as view:
        view.show(None, History())
        assert cell == []
        for updates in range(50):
            view.show(full_status(updates=updates), History(silent_seconds=12.4))
        view.note("replay ended with status 1")
    (texts,) = cell
    assert len(texts) == 50
    assert all(f"updates {updates} " in text for updates, text in enumerate(texts))
    assert "12 s" in texts[-1]
    assert stream.getvalue() == "replay ended with status 1\n"


def test_another_stream_than_that_of_the_cell_gets_plain_lines(cell):
    with open_view(io.StringIO()) as view:
        view.show(full_status(), History())
    assert cell == []


def test_a_plain_view_prints_notes_and_no_escape_sequences():
    stream = io.StringIO()
    with open_view(stream) as view:
        view.show(None, History())
        view.note("replay ended with status 1")
        assert stream.getvalue() == "replay ended with status 1\n"
        view.show(full_status(), History())
    assert ESCAPE not in stream.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 40 x 12 and what was written to it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")
    master, slave = pty.openpty()
    os.set_blocking(master, False)

    def written():
        """Returns the whole output. A pseudo-terminal returns only a few kilobytes per read."""
        text = b""
        while select.select([master], [], [], 0.2)[0]:
            text += os.read(master, 65_536)
        return text.decode()

    with open(slave, "w", encoding="utf-8") as stream:
        yield stream, written
    os.close(master)


def test_a_terminal_shows_the_dashboard_on_its_own_screen(terminal):
    stream, written = terminal
    with open_view(stream) as view:
        view.show(full_status(), History())
        view.note("a sentence that belongs into the picture")
    text = written()
    assert "\x1b[?1049h" in text  # enters the alternate screen ...
    assert text.rstrip().endswith("\x1b[?1049l")  # ... and leaves it
    assert "ALE/Pong-v5" in text
    assert "a sentence" not in text


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, written = terminal
    with open_view(stream) as view:
        view.show(full_status(), History())
    assert ESCAPE not in written()


def test_a_status_can_be_shown_once():
    stream = io.StringIO()
    show_once(full_status(roles=[role("actor")] * 8), stream)
    assert f"bottleneck  {describe_bottleneck(full_status().limited_by)}" in stream.getvalue()
    assert ESCAPE not in stream.getvalue()


def test_characters_outside_the_encoding_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_line("caf\u00e9", stream)
    assert stream.buffer.getvalue() == b"caf?\n"


def test_a_closed_terminal_does_not_change_the_exit_status(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    script = (
        "import sys\nfrom apex.launch.terminal.view import History, open_view, print_line\n"
        "with open_view(sys.stdout) as view:\n    view.show(None, History())\n    sys.stdin.read()\n"
        "    view.show(None, History())\nprint_line('finished')\nsys.exit(7)"
    )
    master, slave = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=slave, stderr=subprocess.PIPE
    )
    os.close(slave)
    assert os.read(master, 1)
    os.close(master)
    assert program.communicate(timeout=30)[1] == b""
    assert program.returncode == 7


def test_a_reader_that_leaves_does_not_end_the_run():
    script = """
from apex.launch.terminal.view import print_line
for i in range(20_000): print_line('x' * 100)
import sys; sys.exit(7)"""
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout.readline()
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(30), errors) == (7, b"")
