"""Tests of the drawing: the picture of `apex plot`, and the charts of `apex report`, which need no other file."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from apex.runs.history import Series
from apex.runs.plots.aggregate import CurveGroup
from apex.runs.plots.figure import COLORS, FAINT, VARIABLES, Line, chart, picture, save_picture

SVG = "{http://www.w3.org/2000/svg}"


def curve(*points):
    return Series(*np.array(points, float).T)


def line(*points, **style):
    """One curve over steps; over seconds it is the same."""
    return Line([curve(*[(x, x, y) for x, y in points])], **style)


# --- pictures -------------------------------------------------------------------------------------------------------

GROUPS = [
    CurveGroup("ours", [curve((0, 0, 0), (10, 1_000, 400)), curve((0, 0, 20), (20, 3_000, 500))]),
    CurveGroup("theirs", [curve((0, 0, 10), (30, 1_000, 300))]),
]


def test_picture_shows_the_scores_against_steps_and_wall_clock():
    figure = picture(GROUPS, "CartPole", 475.0)
    steps, clock = figure.axes
    assert steps.get_xlabel() == "steps (agent decisions)"
    assert clock.get_xlabel() == "wall clock (seconds)"
    theirs = [next(each for each in axes.lines if each.get_color() == COLORS[1]) for axes in (steps, clock)]
    assert [list(each.get_xdata()) for each in theirs] == [[0, 1_000], [0, 30]]
    assert [list(each.get_ydata()) for each in theirs] == [[10, 300]] * 2
    assert steps.get_ylim() == clock.get_ylim()


def test_picture_has_title_legend_and_explanation():
    figure = picture(GROUPS, "CartPole", None)
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "CartPole"
    assert [text.get_text() for text in legend.get_texts()] == ["ours · 2 seeds", "theirs"]
    explanation = figure.get_supxlabel()
    assert all(word in explanation for word in ("median", "lowest", "highest", "Dotted"))
    assert "median" not in picture(GROUPS[1:], "CartPole", None).get_supxlabel()


def test_band_is_pale_where_a_seed_has_ended():
    bands = picture(GROUPS, "", None).axes[1].collections
    spans = [(band.get_paths()[0].vertices[:, 0].min(), band.get_paths()[0].vertices[:, 0].max()) for band in bands]
    assert spans == [(0, 10), (10, 20)]
    assert bands[0].get_alpha() > bands[1].get_alpha()


def test_threshold_is_a_dashed_line_with_its_number():
    figure = picture(GROUPS, "", 475.0)
    for axes in figure.axes:
        assert next(each for each in axes.lines if list(each.get_ydata()) == [475, 475]).is_dashed()
    assert [text.get_text() for text in figure.axes[1].texts] == ["475"]


@pytest.mark.parametrize("scores", [[(0, 0, 0)], [(3, 7, -5.0)], [(0, 0, 3), (0, 0, 3)]])
def test_equal_scores_are_inside_the_y_limits(scores):
    low, high = picture([CurveGroup("one", [curve(*scores)])], "", None).axes[0].get_ylim()
    assert low <= scores[0][2] <= high
    assert low < high


def test_same_data_gives_the_same_file(tmp_path):
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        save_picture(file, GROUPS, "Cost $1_{ or $2", 475.0)  # Dollars do not begin a formula.
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes().startswith(b"<?xml")


def read(svg):
    """The element, with the namespaces that a page implies."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return ElementTree.fromstring(svg.replace("<svg", f"<svg {names}", 1))


def texts(svg):
    return ["".join(text.itertext()) for text in read(svg).iter(f"{SVG}text")]


def curves(svg, variable="--main"):
    """The points of each curve of one color."""
    found = [path for path in read(svg).iter(f"{SVG}path") if f"stroke: var({variable})" in path.get("style", "")]
    return [
        [tuple(map(float, point)) for point in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))] for path in found
    ]


def test_chart_has_its_curve_and_labels():
    svg = chart([line((0, 0), (50_000, 200), (100_000, 500))], "steps", "Score against steps", threshold=475.0)
    ((one, two, three),) = curves(svg)
    assert (two[0] - one[0]) == pytest.approx(three[0] - two[0], abs=0.01)
    assert (one[1] - two[1]) * 1.5 == pytest.approx(two[1] - three[1], abs=0.01)  # SVG counts downward.
    assert {"0", "500", "50k", "100k", "steps (agent decisions)", "475"} <= set(texts(svg))
    assert read(svg).get("aria-label") == "Score against steps"
    assert "<use " in chart([line((5, 1))], "steps", "")  # a dot
    for value in (0.0, -20.5, 1e-9, 1e9):
        ((one, two),) = curves(chart([line((0, value), (10, value))], "steps", ""))
        assert one[1] == two[1]
        assert 10 <= one[1] <= 190


@pytest.mark.parametrize(
    ("seconds", "label", "tick"),
    [(60, "seconds", "40"), (1_800, "minutes", "20"), (7_200, "hours", "1"), (400_000, "days", "4")],
)
def test_time_axis_has_a_fitting_unit(seconds, label, tick):
    assert {f"wall clock ({label})", tick} <= set(texts(chart([line((0, 1), (seconds, 2))], "seconds", "")))


def test_simplified_curve_keeps_its_peaks():
    x, y = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    y[77_777], y[12_345] = 100, -100
    (points,) = curves(chart([Line([Series(x, x, y)])], "steps", ""))
    heights = sorted(y for _, y in points)
    assert heights[0] < heights[1] - 50
    assert heights[-1] > heights[-2] + 50
    assert len(points) < 5_000


def test_chart_needs_no_other_file_and_has_only_the_colors_of_its_page():
    svg = chart([line((0, 1), (1, 2)), line((0, 1), (1, 2), color=FAINT)], "steps", "<a & b>", threshold=2.0)
    assert "http" not in svg
    assert "<metadata" not in svg
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"(url\(|href=\")#\w+", "", svg))
    assert set(re.findall(r"var\((--\w+)\)", svg)) == set(VARIABLES.values()) - {"--ink"}
    assert 'aria-label="&lt;a &amp; b&gt;"' in svg
