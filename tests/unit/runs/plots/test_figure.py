"""Charts of a page: what they show, and that they need no other file and no other colors than the page's."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from apex.runs.plots.figure import FAINT, VARIABLES, ChartLine, chart

SVG = "{http://www.w3.org/2000/svg}"


def line(*points, **style):
    x, y = np.array(points, float).T
    return ChartLine(x, y, **style)


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


def test_a_chart_has_its_curve_and_labels():
    svg = chart([line((0, 0), (50_000, 200), (100_000, 500))], "steps", "Score against steps", threshold=475.0)
    ((one, two, three),) = curves(svg)
    assert (two[0] - one[0]) == pytest.approx(three[0] - two[0], abs=0.01)
    assert (one[1] - two[1]) * 1.5 == pytest.approx(two[1] - three[1], abs=0.01)  # SVG counts downward.
    assert {"0", "500", "50k", "100k", "steps (agent decisions)", "475"} <= set(texts(svg))
    assert read(svg).get("aria-label") == "Score against steps"


@pytest.mark.parametrize(
    ("seconds", "label", "tick"),
    [(60, "seconds", "40"), (1_800, "minutes", "20"), (7_200, "hours", "1"), (400_000, "days", "4")],
)
def test_a_clock_is_shown_in_a_unit_of_people(seconds, label, tick):
    assert {f"wall clock ({label})", tick} <= set(texts(chart([line((0, 1), (seconds, 2))], "seconds", "")))


def test_one_point_is_a_dot():
    assert "<use " in chart([line((5, 1))], "steps", "")


@pytest.mark.parametrize("value", [0.0, -20.5, 1e-9, 1e9])
def test_a_flat_line_stands_in_the_panel(value):
    ((one, two),) = curves(chart([line((0, value), (10, value))], "steps", ""))
    assert one[1] == two[1]
    assert 10 <= one[1] <= 190


def test_of_many_points_no_peak_is_lost_and_few_are_drawn():
    y = np.random.default_rng(0).normal(size=100_000)
    y[77_777], y[12_345] = 100, -100
    (points,) = curves(chart([ChartLine(np.arange(100_000.0), y)], "steps", ""))
    heights = sorted(y for _, y in points)
    assert heights[0] < heights[1] - 50
    assert heights[-1] > heights[-2] + 50
    assert len(points) < 5_000


def test_a_chart_needs_no_other_file_and_has_the_colors_of_its_page():
    svg = chart([line((0, 1), (1, 2)), line((0, 1), (1, 2), color=FAINT)], "steps", "<a & b>", threshold=2.0)
    assert "http" not in svg
    assert "<metadata" not in svg
    assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"(url\(|href=\")#\w+", "", svg))
    assert set(re.findall(r"var\((--\w+)\)", svg)) == set(VARIABLES.values()) - {"--ink"}
    assert 'aria-label="&lt;a &amp; b&gt;"' in svg
