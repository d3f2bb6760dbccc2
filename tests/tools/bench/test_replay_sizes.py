"""The picture of draw and update by size: what it shows, and what is refused before anything is measured."""

from __future__ import annotations

import pytest

from apex.errors import UsageError
from bench.harness.report import print_sizes
from bench.plots.replay_sizes import check_picture, draw_sizes, save_sizes
from bench.replay_steps import StoreTimes

TIMES = {2**16: StoreTimes(0.05, 0.07), 2**17: StoreTimes(0.06, 0.08), 2**23: StoreTimes(0.125, 0.14)}


def test_both_curves_and_their_bars_stand_over_a_logarithmic_axis():
    (axes,) = draw_sizes(TIMES, 512).axes
    draw, draw_bar, update, update_bar = axes.lines
    for curve, values in ((draw, [0.05, 0.06, 0.125]), (update, [0.07, 0.08, 0.14])):
        assert (list(curve.get_xdata()), list(curve.get_ydata())) == (list(TIMES), values)
    assert (draw_bar.get_ydata()[0], update_bar.get_ydata()[0]) == pytest.approx((0.15, 0.21))
    assert [text.get_text() for text in axes.texts] == ["bar: 3x of $2^{16}$, draw", "bar: 3x of $2^{16}$, update"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["draw: 0.050 to 0.125 ms, 2.5x", "update: 0.070 to 0.140 ms, 2.0x"]
    assert (axes.get_xscale(), axes.xaxis.get_transform().base) == ("log", 2)
    assert (axes.get_ylabel(), axes.get_ylim()[0]) == ("ms for 512 transitions", 0)


def test_the_file_is_a_png(tmp_path):
    check_picture(tmp_path / "sizes.png")
    save_sizes(tmp_path / "sizes.png", TIMES, 512)
    assert (tmp_path / "sizes.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("name", "words"), [("sizes.jpg", r"must name a \.png"), ("none/sizes.png", "no folder")])
def test_a_name_that_cannot_be_written_is_refused(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        check_picture(tmp_path / name)


def test_the_table_has_a_row_for_each_size(capsys):
    print_sizes(TIMES)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["65,536", "0.050", "0.070"],
        ["131,072", "0.060", "0.080"],
        ["8,388,608", "0.125", "0.140"],
    ]
