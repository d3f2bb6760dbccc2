"""Tests of `apex report`: facts about a run, the page and its isolation, the video, the command."""

import base64
import html
import json
import re
import shlex
from html.parser import HTMLParser

import numpy as np
import pytest
from support.builders import VECTORS
from support.run_builders import ACTOR, EVALUATOR, add_rows, make_run

import apex
from apex.algorithms.parameters import flatten_parameters
from apex.cli import main
from apex.command_line import parse_config
from apex.dqn.networks import make_network
from apex.facts import INTERRUPTED, EndReason
from apex.runs.checkpoints.policy_file import PolicyInfo, save_best
from apex.runs.folder import RunFolder
from apex.runs.history import RunHistory
from apex.runs.lock import hold
from apex.runs.report.command import main as report
from apex.runs.report.facts import State, find_limits, find_state, find_totals, typed_command
from apex.runs.report.page import build_page
from apex.runs.report.video import MAX_STEPS, EmbeddedVideo, NoVideoError, film
from apex.runs.scores import find_scores

SCORES = [(5, 1_000, 10), (60, 20_000, 480), (70, 25_000, 400)]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"
VIDEO = EmbeddedVideo(b"mp4", 21.0, 1_600, 3_000, "best.safetensors", 0.001, True)


class Page(HTMLParser):
    """The elements, attributes and text of a page, as a browser parses it."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.texts, self.styles = [], [], [], []
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += [(name, key, value or "") for key, value in attributes]

    def handle_data(self, data):
        (self.styles if self.elements[-1:] == ["style"] and "{" in data else self.texts).append(data)


def make_whole_run(folder, **config):
    """A run with all curves of a page."""
    run = make_run(folder, SCORES, **config)
    add_rows(run, "actor", [(6, 1_100, {ACTOR: 8, "actors/episodes": 40}), (66, 21_000, {ACTOR: 500})])
    for i in range(10):
        limit = {"limited_by/actors": float(i < 3), "limited_by/learner": float(i >= 3)}
        figures = {"learner/updates": 20 * i, "learner/updates_per_second": 20}
        figures |= {"learner/loss": 0.5, "learner/mean_q": i}
        steps, seconds = 1_000 * i, 10 + i
        add_rows(run, "learner", [(seconds, steps, {**figures, **limit, "learner/policy_lag": 30})])
        stored = {"replay/num_inserted": steps, "replay/inserts_per_second": 1_000, "replay/size": steps}
        add_rows(run, "replay", [(seconds, steps, stored)])
    return run


def test_run_with_a_held_lock_is_running(tmp_path):
    run = make_run(tmp_path)
    with hold(run.path):
        assert find_state(run).word == "running"
    assert find_state(run).word == "stopped"


@pytest.mark.parametrize(
    ("end", "word"), [(EndReason("score", 475.0), "finished"), (INTERRUPTED, "stopped"), (None, "stopped")]
)
def test_state_follows_from_the_recorded_end(tmp_path, end, word):
    run = make_run(tmp_path)
    run.end = EndReason("minutes", 5.0)  # of the previous start of the learner
    run.end = end
    (run.logs / "learner.log").write_text("12:00:00 learner INFO ends after 7 updates: reached the score 1\n")
    assert find_state(run) == State(word, end)


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "score", "value": 475.0}'])
def test_damaged_end_file_counts_as_no_end(tmp_path, text):
    run = make_run(tmp_path)
    (run.path / "end.json").write_text(text)
    assert find_state(run) == State("stopped", None)


def test_best_and_last_score_have_place_games_and_interval(tmp_path):
    run = make_run(tmp_path, SCORES)
    best, last = find_scores(RunHistory(run))
    assert best == (480, 20_000, 60, None, None)  # Older curves lack the number of games.
    assert last == (400, 25_000, 70, None, None)
    scalars = {"evaluator/episodes": 33, "evaluator/score_low": 480.5, "evaluator/score_high": 497.25}
    add_rows(run, "evaluator", [(80, 31_000, {EVALUATOR: 490, **scalars})])
    best, last = find_scores(RunHistory(run))
    assert best == last == (490, 31_000, 80, 33, (480.5, 497.25))
    assert "33 games (95 %: 480.5 ... 497.2), at 31,000" in Page(build_page(run, "")).text


def test_the_score_of_the_untrained_policy_is_not_the_best(tmp_path):
    run = make_run(tmp_path, [(1, 0, -180)])
    assert find_scores(RunHistory(run))[0].mean == -180, "there is no other"
    for seconds, score in ((9, -300), (12, -310)):
        add_rows(run, "evaluator", [(seconds, 1_000 * seconds, {EVALUATOR: score, "evaluator/best_score": -300})])
    best, last = find_scores(RunHistory(run))
    assert (best.mean, last.mean) == (-300, -310)


def test_totals_have_rates_over_the_recorded_time(tmp_path):
    run = make_whole_run(tmp_path)
    assert find_totals(RunHistory(run)) == [("steps", 9_000, 1_000), ("updates", 180, 20)]
    assert find_limits(RunHistory(run)) == [("learner", 0.7), ("actors", 0.3)]
    page = Page(build_page(run, "")).text
    for figure in ("wall clock 0:01:10", "steps per second 1,000.0", "all actors 40", "policy lag, updates 30"):
        assert figure in page, figure
    empty = RunHistory(make_run(tmp_path))
    assert (find_totals(empty), find_scores(empty)) == ([], None)


def test_command_is_the_one_that_started_the_run(tmp_path):
    run = make_run(tmp_path, argv=["--preset", "cartpole", "--name", "a b"])
    assert typed_command(run) == "apex learner --preset cartpole --name 'a b'"
    (run.logs / "launcher.log").touch()
    assert typed_command(run) == "apex train --preset cartpole --name 'a b'"
    assert typed_command(make_run(tmp_path, argv=["python", "-m", "chaos"])) == "python -m chaos"
    alone = make_run(tmp_path, argv=["--single-process"], run={"single_process": True})
    assert typed_command(alone) == "apex train --single-process"  # It has no launcher.
    page = Page(build_page(alone, "")).text
    assert f"apex evaluate {alone.path}" in page
    assert "--resume" not in page  # A run in one process cannot be resumed.


def test_command_of_a_run_from_python_trains_with_the_same_settings(tmp_path):
    run = make_run(tmp_path, argv=["apex.train"], seed=7)
    command = typed_command(run)
    assert command == f"apex train --config {run.config_file}"
    assert parse_config(shlex.split(command)[2:], prog="apex train") == run.config
    assert "Started by apex.train" in Page(build_page(run, "")).text


def test_finished_run_continues_with_another_limit(tmp_path):
    run = make_run(tmp_path, name="a b")
    page = Page(build_page(run, "")).text
    assert f"apex train --resume '{run.path}'" in page
    assert "another limit" not in page
    run.end = EndReason("score", 475.0)
    assert "another limit" in Page(build_page(run, "")).text


def test_page_has_scores_charts_video_settings_and_commands(tmp_path):
    run = make_whole_run(tmp_path, seed=7)
    run.record_resume(run.config, argv=["--max-minutes", "9"])
    page = Page(build_page(run, VIDEO))
    git = run.manifest["git"]
    for text in (
        "CartPole-v1",
        "seed 7",
        "best score 480",
        "at 20,000 steps, 0:01:00",
        "updates 180 20.0",
        "score 21 in 1,600",
        "learner 70%",
        "learner.learning_rate 0.001 6.25e-05",
        "apex learner --preset cartpole",
        f"apex train --resume {run.path}",
        "with --max-minutes 9",
        "GiB",
        "numpy " + np.__version__,
        *([] if git is None else [f"git checkout {git['commit']}"]),
    ):
        assert text in page.text, text
    assert page.elements.count("svg") == 8
    assert page.elements.count("details") == 1
    assert ("video", "src", "data:video/mp4;base64," + base64.b64encode(b"mp4").decode()) in page.attributes


@pytest.mark.parametrize(("role", "games"), [("evaluator", "evaluations"), ("actor", "all actors")])
def test_metrics_of_the_environment_have_figures_and_charts(tmp_path, role, games):
    run = make_run(tmp_path, SCORES)
    rows = [{f"{role}_metrics/success": share, f"{role}_metrics/laps & more": 7 * share} for share in (0.5, 0.96)]
    add_rows(run, role, [(80 + i, 30_000 + i, row) for i, row in enumerate(rows)])
    page = Page(build_page(run, ""))
    assert f"success, {games} 96.0%" in page.text
    assert f"laps & more, {games} 6.72" in page.text
    assert page.elements.count("svg") == 4


def test_unprintable_character_is_a_white_square(tmp_path):
    run = make_run(tmp_path, argv=["--name", "\x1b[31mred"])
    assert "\N{WHITE SQUARE}[31mred" in build_page(run, "")


def test_page_of_a_run_without_games(tmp_path):
    page = Page(build_page(make_run(tmp_path), "REASON"))
    assert "no game" in page.text
    assert "REASON" in page.text
    assert not {"svg", "video"} & set(page.elements)


def test_page_without_evaluations_shows_the_games_of_an_actor(tmp_path):
    page = Page(build_page(make_run(tmp_path, SCORES, role="actor", tag=ACTOR), ""))
    assert "400 games of actor 7" in page.text
    assert "evaluations " not in page.text.partition("Learning curve")[2].partition("Figures")[0]


def test_page_loads_nothing_from_elsewhere(tmp_path):
    run = make_whole_run(tmp_path)
    text = build_page(run, VIDEO)
    assert build_page(run, VIDEO) == text
    page = Page(text)
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert 0 < len(ids) == len(set(ids))
    loaders = ("src", "href", "action", "poster", "data", "srcset")
    addresses = [value for _, key, value in page.attributes if key in loaders]
    assert addresses
    assert all(value.startswith("data:") for value in addresses)
    assert any("default-src 'none'" in value for *_, value in page.attributes)
    assert not re.search(r"url\(|@import|https?://", "".join(page.styles))
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert not {"script", "iframe", "object", "embed", "img"} & set(page.elements)


def test_text_of_the_run_is_escaped(tmp_path):
    name = EVIL.replace("/", "_")
    run = make_run(
        tmp_path, SCORES, name=name, argv=["--x", EVIL], environment={"id": EVIL}, network={"factory": EVIL + ":y"}
    )
    run.record_resume(run.config, argv=["--name", EVIL])
    video = VIDEO._replace(checkpoint=EVIL)
    for each in (video, EVIL):
        text = build_page(run, each)
        assert html.escape(EVIL) in text
        assert not {"script", "img"} & set(Page(text).elements)
        assert not [key for _, key, _ in Page(text).attributes if key.startswith("on")]


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo first >&2; echo 'REASON' >&2; exit 2", "REASON"), ("exit 7", "status 7"), ("echo bye", "no result")],
)
def test_missing_video_has_the_error_of_the_evaluation(tmp_path, script, reason):
    with pytest.raises(NoVideoError) as error:
        film(tmp_path, 0.0, apex=("sh", "-c", script))
    assert str(error.value).endswith(reason)


def test_without_space_for_a_video_its_reason_is_in_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(NoVideoError, match="No such file"):
        film(tmp_path, 0.0, apex=("true",))


@pytest.mark.parametrize("length", [MAX_STEPS, MAX_STEPS + 1])
def test_video_of_a_long_game_is_known_to_be_its_beginning(tmp_path, length):
    figures = json.dumps(dict(mean=1, lengths=[length], updates=7, checkpoint="best.safetensors", epsilon=0))
    script = f"""while [ "$1" != --video ]; do shift; done
        printf mp4 > "$2"; echo '{figures}'; [ "$3 $4" = "--video-steps {MAX_STEPS}" ]"""
    video = film(tmp_path, 0.0, apex=("sh", "-c", script, "sh"))
    assert (video.data, video.length, video.is_whole) == (b"mp4", length, length == MAX_STEPS)


def test_report_has_a_video_of_the_best_policy(tmp_path, capfd):
    run = make_run(tmp_path, SCORES)
    network = make_network(run.config.network, VECTORS, seed=0)
    info = PolicyInfo(schema=VECTORS, config=run.config, num_updates=77, score=9.0)
    save_best(run.checkpoints, flatten_parameters(network), info)
    assert main(["report", str(run.path), "--json"]) == 0
    out = run.path / "report.html"
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(f"page: {out} (")
    assert json.loads(lines[1]) == {"out": str(out), "bytes": out.stat().st_size, "video": True}
    page = Page(out.read_text())
    assert "best.safetensors of update 77, epsilon 0" in page.text
    (source,) = [value for name, key, value in page.attributes if (name, key) == ("video", "src")]
    assert b"vp09" in base64.b64decode(source.partition(",")[2])
    assert out.stat().st_size < 500_000


def test_report_without_a_video_has_the_reason(tmp_path, capsys):
    def film(run, epsilon):
        raise NoVideoError("REASON")

    run = make_run(tmp_path, SCORES)
    assert report([str(run.path), "--out", str(tmp_path / "x.html")], film=film) == 0
    assert "REASON" in Page((tmp_path / "x.html").read_text()).text
    assert capsys.readouterr().err.endswith("REASON\n")


def test_function_writes_the_page_of_the_command(tmp_path):
    run = make_run(tmp_path, SCORES)
    page = apex.report(run.path, video=False)
    assert page == run.path / "report.html"
    text = page.read_text()
    assert main(["report", str(run.path), "--no-video", "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text() == text
    with pytest.raises(apex.UsageError, match=r"x\.pdf"):
        apex.report(run.path, tmp_path / "x.pdf")


def test_newest_run_is_the_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run("runs", SCORES, name="RUN")
    assert main(["report", "--no-video"]) == 0
    assert "runs/RUN\n" in capsys.readouterr().err
    assert (tmp_path / "runs/RUN/report.html").exists()


def test_no_video_option_records_no_video(tmp_path, capsys):
    run = make_run(tmp_path, SCORES)
    assert main(["report", str(run.path), "--no-video"]) == 0
    assert "One game" not in Page((run.path / "report.html").read_text()).text
    assert capsys.readouterr().err == ""
    assert RunFolder.open(run.path).run_id == run.run_id  # The page does not change the run.


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["none"], "none"),
        (["RUN", "--out", "x.pdf"], "x.pdf"),
        (["RUN", "--out", "none/x.html"], "--out none/x.html"),
        (["RUN", "--out", "DIR.html"], "DIR.html"),
        (["RUN", "--videos"], "--videos"),
    ],
)
def test_refused_arguments_are_named_in_one_line(tmp_path, monkeypatch, capsys, arguments, name):
    monkeypatch.chdir(tmp_path)
    make_run("runs", SCORES, name="RUN")
    (tmp_path / "DIR.html").mkdir()
    assert main(["report", *arguments, "--no-video"]) == 2
    out, err = capsys.readouterr()
    assert name in err
    assert (out, err.count("\n")) == ("", 1)
