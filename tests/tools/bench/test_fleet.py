"""`python -m bench fleet`: numbers of hosts, the simulated link, and the chart."""

import pytest

from apexreplay.errors import UsageError
from bench.fleet.command import LINES, read_hosts
from bench.fleet.parameters import measure_parameters
from bench.plots.fleet import draw_fleet


def test_numbers_of_hosts_are_read_in_order():
    assert read_hosts("64, 1,16") == [1, 16, 64]


@pytest.mark.parametrize("text", ["", "0", "1,two", "2000", "-1", "1;2"])
def test_wrong_numbers_of_hosts_are_refused(text):
    with pytest.raises(UsageError, match="from 1 to 1900"):
        read_hosts(text)


@pytest.mark.parametrize("num_hosts", [100, 1_000])
def test_parameters_keep_to_a_quarter_of_a_simulated_link(num_hosts):
    figures = measure_parameters("", num_hosts, 0.0, None)
    assert 0.9 < figures["parameter_bytes_per_s"] / figures["parameter_budget_bytes_per_s"] <= 1.0
    assert figures["parameter_period_s"] == pytest.approx(num_hosts * (2 * 3_300_019 + 52) * 4 / 1.25e9)
    assert figures["parameter_age_s"] <= 2 * figures["parameter_period_s"]


def test_the_chart_has_each_figure_with_a_bar_as_a_share_of_it():
    figures = {f"{n}_{line.name}": 2.0 * (line.bar or 1) / line.scale for n in (1, 16) for line in LINES}
    axes = draw_fleet([1, 16], figures, LINES).axes[0]
    *curves, bar = axes.lines
    assert [list(curve.get_ydata()) for curve in curves] == [[pytest.approx(2.0)] * 2] * 6
    assert set(bar.get_ydata()) == {1.0}
