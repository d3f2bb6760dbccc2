"""The chart of draw and update by size: its curves, its bars, and its refusals."""

import pytest

from apex.errors import UsageError
from bench.plots.replay_sizes import check_picture, draw_sizes
from bench.replay_steps import StoreTimes

TIMES = {2**16: StoreTimes(0.05, 0.07), 2**17: StoreTimes(0.06, 0.08), 2**23: StoreTimes(0.125, 0.14)}


def test_the_chart_has_both_curves_and_bars_on_a_logarithmic_axis():
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


@pytest.mark.parametrize("name", ["sizes.jpg", "none/sizes.png"])
def test_an_unwritable_file_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match=r"--sizes"):
        check_picture(tmp_path / name)
