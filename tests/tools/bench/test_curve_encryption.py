"""`python -m bench curve` measures one stream of segments with and without keys."""

import json

from bench import __main__


def test_both_rates_and_their_ratio_are_measured(capsys):
    assert __main__.main(["curve", "--seconds", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    off, on = figures["curve_off_transitions_per_s"], figures["curve_on_transitions_per_s"]
    assert min(off, on) > 0
    assert abs(figures["curve_share"] - on / off) < 1e-3


def test_other_benchmarks_refuse_keys(capsys):
    assert __main__.main(["replay", "--transport.keys", "keys"]) == 2
    assert "python -m bench curve" in capsys.readouterr().err
