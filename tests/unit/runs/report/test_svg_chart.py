"""Charts of a page: what they draw, and that thousands of points become few without a peak being lost."""

from __future__ import annotations

import re

import numpy as np
import pytest

from apex.runs.report.html import Markup, join, tag
from apex.runs.report.svg_chart import MAX_POINTS, ChartLine, chart, thin


def polylines(svg):
    return [
        [tuple(map(float, point.split(","))) for point in points.split()]
        for points in re.findall(r'points="([^"]+)"', svg)
    ]


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def line(*points):
    x, y = np.array(points, float).T
    return ChartLine(x, y)


# --- markup ---------------------------------------------------------------------------------------------------------


def test_text_is_escaped_wherever_it_stands():
    evil = "<script>alert('x')</script>&\""
    element = tag("p", evil, title=evil)
    assert element == (
        '<p title="&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;">'
        "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;</p>"
    )


def test_markup_is_not_escaped_again():
    assert tag("p", tag("b", "a&b"), "<") == "<p><b>a&amp;b</b>&lt;</p>"


def test_joined_text_is_markup_no_more_than_an_element_is():
    assert isinstance(join("<", Markup("<br>")), Markup)
    assert join("<", Markup("<br>")) == "&lt;<br>"


def test_attributes_may_be_without_value_or_left_out():
    assert tag("video", controls=True, loop=False, src=None, aria_label="a", class_="b") == (
        '<video controls aria-label="a" class="b"></video>'
    )
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_what_is_not_printable_is_shown_as_a_box():
    assert join("a\x00\x1bb\n") == "a\N{WHITE SQUARE}\N{WHITE SQUARE}b\n"


# --- charts ---------------------------------------------------------------------------------------------------------


def test_a_chart_has_its_lines_and_labels():
    svg = chart([line((0, 0), (50_000, 250), (100_000, 500))], "steps", "Score against steps", threshold=475.0)
    ((one, two, three),) = polylines(svg)
    assert one[0] < two[0] < three[0]
    assert one[1] > two[1] > three[1]  # SVG counts downward.
    assert (two[0] - one[0], two[1] - one[1]) == pytest.approx((three[0] - two[0], three[1] - two[1]), abs=0.11)
    assert {"0", "500", "50k", "100k", "steps", "475"} <= set(texts(svg))
    assert 'aria-label="Score against steps"' in svg


def test_a_clock_is_labelled_as_one():
    assert {"0:00", "0:20", "wall clock (m:ss)"} <= set(texts(chart([line((5, 1), (60, 2))], "seconds", "")))


def test_one_point_is_a_dot_and_none_is_an_empty_panel():
    assert "<circle" in chart([line((5, 1))], "steps", "")
    assert polylines(chart([ChartLine(np.empty(0), np.empty(0))], "steps", "")) == []


@pytest.mark.parametrize("value", [0.0, -20.5, 1e-9, 1e9])
def test_a_flat_line_stands_in_the_panel(value):
    ((one, two),) = polylines(chart([line((0, value), (10, value))], "steps", ""))
    assert one[1] == two[1]
    assert 14 <= one[1] <= 182


def test_few_points_stay_as_they_are():
    assert thin(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == ([1, 2], [3, 4])


def test_of_many_points_no_peak_is_lost():
    x, y = np.arange(10_000.0), np.random.default_rng(0).normal(size=10_000)
    y[7_777], y[1_234] = 100, -100
    kept_x, kept_y = thin(x, y)
    assert len(kept_x) <= MAX_POINTS
    assert (7_777, 100) in zip(kept_x, kept_y, strict=True)
    assert (1_234, -100) in zip(kept_x, kept_y, strict=True)
    assert kept_x == sorted(kept_x)
