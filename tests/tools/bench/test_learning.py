"""`python -m bench learning`: records of runs, and the tables made of them."""

import json
import os
import re
import resource
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.learning_records import MACHINE, SCORE, make_record

from apex.command_line import parse_config
from apex.config import flatten
from apex.config.presets import ATARI, NARROW, PENDULUM
from apex.evaluation.episodes import evaluation_seed
from apexreplay.errors import UsageError
from apexreplay.native import NativeError
from bench.learning import command as learning
from bench.learning import records as record_files
from bench.learning.comparison import chance_of_order, render_comparison
from bench.learning.dormant import render_dormant
from bench.learning.processor_time import ProcessorTime
from bench.learning.records import FOLDER, HEADER, read_records, record_path, write_record
from bench.learning.runs import dormant_shares
from bench.learning.summary import render_summary
from bench.learning.tables import BEGIN, DOCUMENTS, END, plot_path, rebuild, render, results_table
from bench.learning.tasks import CONTROL_VARIANTS, SYSTEMS, TASKS, UNTUNED, UNTUNED_RUNS, VARIANTS
from bench.learning.trial import require_native_code

ROOT = Path(__file__).parents[3]
SEEDS = (("apex", 1), ("apex", 2), ("apex", 3), ("sb3", 1))


def rows(*records):
    """Returns the rows of a task's table below its head, as lists of cells."""
    return cells(results_table(TASKS[records[0].task], records, FOLDER))[2:]


def cells(lines):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- committed records ----------------------------------------------------------------------------------------------


def test_the_documents_have_the_tables_of_the_committed_records():
    for path, text in rebuild(ROOT).items():
        assert path.read_text() == text, f"{path.name}: run python -m bench learning tables"


def test_every_committed_record_has_a_plot_a_curve_and_a_verdict():
    document = (ROOT / "docs/learning.md").read_text()
    assert [name for name in TASKS if f"`{name}`" not in document] == []
    for record in read_records(ROOT):
        assert (ROOT / plot_path(record.task)).exists()
        curve = record_path(ROOT, record.task, record.system, record.seed, ".csv").read_text().splitlines()
        assert curve[0] == HEADER
        assert len(curve) > 1
        assert record.reached == TASKS[record.task].reached(record.score.mean, record.seconds), record.name


# --- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([(475.0, 20.0)] * 3, "yes"),
        ([(475.0, 20.0)] * 2, "yes, with 2 of 3 seeds"),
        ([(475.0, 20.0)] * 2 + [(474.9, 20.0)], "no: 2 of 3 seeds"),
        ([(475.0, 20.0)] * 2 + [(475.0, 20.1)], "no: 2 of 3 seeds"),
        ([(100.0, 180.0)], "no: 0 of 1 seeds"),
    ],
)
def test_a_bar_is_met_if_every_seed_reaches_the_score_in_time(figures, verdict):
    records = [make_record(seed=seed, mean=mean, seconds=seconds) for seed, (mean, seconds) in enumerate(figures)]
    (row,) = rows(*records)
    assert row[1] == verdict


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([50.0, 60.0, 70.0], [20.0, 30.0], "yes"),
        ([50.0, 60.0], [20.0, 30.0], "yes, with 2 of 3 seeds"),
        ([30.0, 30.0, 30.0], [30.0, 30.0], "no: 0 of 3 seeds"),
        ([90.0, 25.0, 90.0], [20.0, 30.0], "no: 2 of 3 seeds"),
        ([90.0, 25.0, 90.0], [20.0], "yes, with 1 of 2 seeds of the peer"),
        ([50.0, 60.0, 70.0], [], "not compared yet"),
    ],
)
def test_without_a_bar_every_seed_must_beat_the_other_system(ours, theirs, verdict):
    records = [make_record("breakout", "apex", seed, mean=mean) for seed, mean in enumerate(ours)]
    records += [make_record("breakout", "sb3", seed, mean=mean) for seed, mean in enumerate(theirs)]
    table = rows(*records)
    assert table[0][1] == verdict
    assert [row[1] for row in table[1:]] == [""] * bool(theirs)


def test_another_algorithm_of_ours_is_compared_with_the_peers_alone():
    records = [make_record("hopper", "apex", seed, mean=50.0) for seed in (1, 2)]
    records += [make_record("hopper", "apex-sac", seed, mean=40.0 + seed) for seed in (1, 2)]
    records += [make_record("hopper", "sb3-sac", seed, mean=41.5) for seed in (1, 2)]
    assert [row[1] for row in rows(*records)] == ["yes", "no: 1 of 2 seeds", ""]


def test_seeds_without_a_peer_on_their_processor_are_not_ordered(tmp_path):
    ours = make_record("hopper", seed=1, mean=50.0)
    theirs = make_record("hopper", "sb3-sac", seed=1, mean=40.0, machine=MACHINE | {"cpu": "Xeon"})
    for record in (ours, theirs):
        write_record(tmp_path, record, [(900.0, 200_000, 5.0)])
    assert "every seed" not in render_comparison(tmp_path, [ours, theirs])
    same = replace(ours, machine=theirs.machine)
    *_, (_, *cell) = cells(render_comparison(tmp_path, [same, theirs]).splitlines())
    assert cell == ["yes (1 in 2 by chance)", ""]
    alone = replace(ours, seed=2)
    write_record(tmp_path, alone, [(900.0, 200_000, 5.0)])
    *_, (_, *cell) = cells(render_comparison(tmp_path, [same, alone, theirs]).splitlines())
    assert cell == ["yes, with 1 of 2 seeds (1 in 2 by chance)", ""]


def test_runs_with_less_time_are_not_compared():
    ours = make_record("breakout", "apex", 1, mean=50.0, seconds=3_600.0)
    theirs = make_record("breakout", "sb3", 1, mean=20.0, seconds=300.0)
    assert rows(ours, theirs)[0][1] == "not compared yet"
    assert rows(ours, replace(theirs, seconds=3_590.0))[0][1] == "yes, with 1 of 3 seeds"


def test_the_score_of_the_final_policy_stands_first_if_every_seed_has_one():
    first = make_record("breakout", seed=1, mean=1.7, final_score=replace(SCORE, mean=2.6))
    other = make_record("breakout", seed=2, mean=2.7, final_score=replace(SCORE, mean=3.6))
    assert rows(first)[0][3] == "2.6; best 1.7"
    assert rows(first, other)[0][3] == "3.1; best 2.2"
    assert rows(first, replace(other, final_score=None))[0][3] == "best 2.2"


def test_a_curve_claims_nothing():
    records = [make_record("qbert-gpu"), make_record("qbert-gpu", "sb3", seconds=400.0)]
    assert [len(row) for row in rows(*records)] == [4, 4]  # without the column for the goal
    assert "7 minutes" in render(records, FOLDER)


def test_other_options_and_other_machines_have_separate_rows():
    many = MACHINE | {"cores": 16, "gpus": ["NVIDIA H200"]}
    table = rows(
        make_record(seed=1),
        make_record(seed=2, command=f"{make_record(seed=2).command} --actors 4"),
        make_record(seed=3, machine=many),
        make_record(system="sb3", seed=1),
    )
    assert [row[0] for row in table] == [
        f"{SYSTEMS['apex']}, cores: 2",
        f"{SYSTEMS['apex']}, cores: 2, --actors 4",
        f"{SYSTEMS['apex']}, cores: 16 + NVIDIA H200",
        SYSTEMS["sb3"],
    ]
    links = [f"[{seed}]({FOLDER}/cartpole/{system}-seed-{seed}.json)" for system, seed in SEEDS]
    assert [row[-1] for row in table] == links


def test_the_comparison_has_each_seed_and_scores_without_selection(tmp_path):
    ours = [make_record("breakout", seed=seed, mean=30.0 + seed, final_score=SCORE) for seed in (1, 2)]
    theirs = [make_record("breakout", "sb3", seed=seed, mean=20.0 + seed) for seed in (1, 2)]
    curves = {
        1: [(900.0, 200_000, 5.0), (1_000.0, 300_000, 8.0), (1_440.0, 900_000, 20.0)],
        2: [(1_190.0, 250_000, 4.0)],
    }
    for record in (*ours, *theirs):
        write_record(tmp_path, record, curves[record.seed])
    head, _, *table = cells(render_comparison(tmp_path, [*ours, *theirs]).splitlines())
    assert head[1:] == [SYSTEMS["apex"], SYSTEMS["sb3"]]
    assert [row[1] for row in table] == [
        *("8.0 (8.0, 8.0)", "31.5 (31.0, 32.0)", "12.0 (20.0, 4.0)", "8.0, -", "14.0, -"),
        "yes (1 in 6 by chance)",
    ]
    assert [row[2] for row in table] == ["-", "21.5 (21.0, 22.0)", "12.0 (20.0, 4.0)", "8.0, -", "14.0, -", ""]


def test_all_tasks_are_compared_with_the_strongest_peer_on_its_processor():
    records = [make_record(seed=1, seconds=10.0), make_record(seed=2, seconds=4.0, machine=MACHINE | {"cpu": "Xeon"})]
    records += [make_record(system="sb3", seconds=25.0), make_record(system="sb3-ppo", mean=495.0, seconds=30.0)]
    records += [make_record("breakout", mean=30.0), make_record("breakout", "sb3", mean=40.0)]
    cartpole, breakout = cells(render_summary(records))[2:]
    assert cartpole[2:] == ["10.0 s (1 seed)", f"30.0 s (1 seed), {SYSTEMS['sb3-ppo']}", "3.0 times as fast"]
    assert breakout[4] == "0.8 times the score"
    (alone,) = cells(render_summary(records[:2]))[2:]
    assert alone[3:] == ["not measured", ""]


def test_no_table_of_the_results_has_more_than_five_columns():
    text = (ROOT / "docs/learning.md").read_text()
    assert max(len(row) for row in cells(re.findall(r"^\|.+\|$", text, re.MULTILINE))) == 5
    first = text.index("\n| ")
    assert text.index("![") < first  # plots first


def test_seeds_are_compared_on_the_same_processor():
    def run(system, seed, mean, cpu):
        machine = MACHINE | {"cpu": cpu}
        return make_record("hopper", system, seed, mean=mean, seconds=1_200.0, machine=machine, command="train")

    slow = [run("apex", 1, 50.0, "AMD EPYC (family 25, model 17)"), run("sb3-sac", 1, 40.0, "AMD EPYC")]
    older = run("sb3-sac", 3, 40.0, "AMD EPYC (family 25, model 1)")
    fast = [run("apex", 2, 90.0, "Xeon"), run("sb3-sac", 2, 80.0, "Xeon")]
    assert rows(*slow, *fast)[0][1] == "yes"
    assert rows(*slow, *fast[:1])[0][1] == "yes, with 1 of 2 seeds"
    assert rows(slow[0], fast[1])[0][1] == "not compared yet"
    assert rows(slow[0], older)[0][1] == "not compared yet"
    assert rows(*slow, *fast, run("apex", 3, 79.0, "Xeon"))[0][1] == "no: 2 of 3 seeds"
    assert chance_of_order([slow[0], fast[0]], [slow[1], fast[1]]) == "1 in 4 by chance"


def test_final_policies_are_compared_where_both_systems_scored_them():
    ours = make_record("hopper", mean=60.0, final_score=replace(SCORE, mean=30.0))
    theirs = make_record("hopper", "sb3-sac", mean=50.0, final_score=replace(SCORE, mean=40.0))
    assert rows(ours, theirs)[0][1] == "no: 0 of 1 seeds"
    *_, theirs_shown, ratio = cells(render_summary([ours, theirs]))[2]
    assert (theirs_shown, ratio) == (f"40.0; best 50.0 (1 seed), {SYSTEMS['sb3-sac']}", "0.8 times the score")

    unknown = replace(theirs, final_score=None)
    assert rows(ours, unknown)[0][1] == "yes, with 1 of 2 seeds"
    *_, shown, _, ratio = cells(render_summary([ours, unknown]))[2]
    assert (shown, ratio) == ("best 60.0 (1 seed)", "1.2 times the score")


def test_the_strongest_peer_has_the_highest_final_score():
    records = [make_record("hopper", mean=60.0, final_score=replace(SCORE, mean=55.0))]
    records += [make_record("hopper", "sb3-sac", mean=50.0, final_score=replace(SCORE, mean=20.0))]
    records += [make_record("hopper", "sb3-td3", mean=45.0, final_score=replace(SCORE, mean=44.0))]
    (row,) = cells(render_summary(records))[2:]
    assert row[2:] == [
        "55.0; best 60.0 (1 seed)",
        f"44.0; best 45.0 (1 seed), {SYSTEMS['sb3-td3']}",
        "1.2 times the score",
    ]


def test_a_tie_is_not_each_seed_above_each_seed(tmp_path):
    records = [make_record("hopper", mean=3.0), make_record("hopper", "sb3-sac", mean=3.0)]
    for record in records:
        write_record(tmp_path, record, [(1.0, 10, 1.0)])
    assert cells(render_comparison(tmp_path, records).splitlines())[-1][1:] == ["no", ""]
    assert render_comparison(tmp_path, [make_record()]) == ""
    assert render_dormant([make_record()]) == ""


def make_root(tmp_path):
    """Creates a repository with documents and no records."""
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(exist_ok=True)
        (tmp_path / document).write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    return tmp_path


def test_a_document_keeps_the_text_around_the_results(tmp_path):
    root = make_root(tmp_path)
    assert set(rebuild(root).values()) == {f"before\n{BEGIN}\nNo run is committed yet.\n{END}\nafter\n"}
    write_record(root, make_record(), [(1.0, 10, 9.5)])
    (document,) = rebuild(root).values()
    assert document.startswith(f"before\n{BEGIN}\n## ")
    assert "(results/learning/cartpole.png)\n" in document
    assert document.endswith(f".\n{END}\nafter\n")


@pytest.mark.parametrize("text", ["", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_document_without_one_place_for_the_results_is_refused(tmp_path, text):
    (make_root(tmp_path) / "docs/learning.md").write_text(text)
    with pytest.raises(UsageError, match=r"docs/learning\.md"):
        rebuild(tmp_path)


# --- records --------------------------------------------------------------------------------------------------------


def test_a_record_reads_back_as_it_was_written(tmp_path):
    record = make_record()
    path = write_record(tmp_path, record, [(1.25, 10, 9.5), (2.0, 20, 475.25)])
    assert path.with_suffix(".csv").read_text() == "seconds,steps,score\n1.25,10,9.5\n2.00,20,475.25\n"
    assert asdict(read_records(tmp_path)[0]) == json.loads(json.dumps(asdict(record)), object_hook=_with_interval)
    assert '"scores": [ 490.0, 490.0 ]' in path.read_text()


def _with_interval(fields):
    return fields | ({"interval": fields["interval"]} if "interval" in fields else {})


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{}"),
        lambda path: path.write_text(path.read_text().replace('"task"', '"tusk"')),
        lambda path: path.rename(path.with_name("apex-seed-2.json")),
        lambda path: path.with_suffix(".csv").unlink(),
    ],
)
def test_a_file_that_is_no_record_is_refused_with_its_path(tmp_path, damage):
    damage(write_record(tmp_path, make_record(), [(1.0, 1, 1.0)]))
    with pytest.raises(UsageError, match=r"cartpole/apex-seed-[12]\.json"):
        read_records(tmp_path)


# --- time of other processes ----------------------------------------------------------------------------------------


TICK = 1 / os.sysconf("SC_CLK_TCK")


def write_stat(path, *cores):
    """Writes the seconds of user, nice, system, idle, iowait, irq, softirq and steal of each core."""
    lines = [f"cpu{core} " + " ".join(f"{each / TICK:.0f}" for each in times) for core, times in enumerate(cores)]
    path.write_text("\n".join(["cpu  1 1 1 1 1 1 1 1", *lines, "intr 5", ""]))


def test_the_share_of_others_excludes_this_process_and_its_children(tmp_path):
    stat, clock, used = tmp_path / "stat", [100.0], [0.0, 0.0, 0.0, 0.0]

    def usage(who):
        mine = used[:2] if who == resource.RUSAGE_SELF else used[2:]
        return SimpleNamespace(ru_utime=mine[0], ru_stime=mine[1])

    write_stat(stat, [5] * 8, [5] * 8, [5] * 8)
    processor = ProcessorTime([0, 2], stat=stat, clock=lambda: clock[0], usage=usage)
    clock[0] = 100_100.0
    write_stat(stat, [6, 15, 105, 9e4, 9e4, 1_005, 10_005, 1e5 + 5], [9e5] * 8, [7, 25, 205, 5, 5, 2_005, 20_005, 5])
    for used[:] in ([0.0] * 4, [3.0, 0, 0, 0], [0, 30.0, 0, 0], [0, 0, 300.0, 0], [0, 0, 0, 3_000.0]):
        assert processor.others_share() == pytest.approx((133_333 - sum(used)) / 200_000)
    used[:] = [140_000.0, 0, 0, 0]  # Both are counted by different clocks.
    assert processor.others_share() == 0.0


@pytest.mark.parametrize("text", ["cpu0 1 2 3 4 5 6 7\n", "cpu0 1 2 3 4 5 6 7\ncpu1 1 2 3\n", "cpu0 x\ncpu1 x\n"])
def test_a_system_without_times_of_its_cores_is_refused(tmp_path, text):
    (tmp_path / "stat").write_text(text)
    with pytest.raises(OSError, match="cpu0, cpu1"):
        ProcessorTime([0, 1], stat=tmp_path / "stat")


# --- runs -----------------------------------------------------------------------------------------------------------

# Replaces Python: `train` writes a run folder; all other commands are passed to the real Python.
APEX = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
if arguments[2] != "train":
    os.execv({python!r}, [{python!r}, *arguments])
from pathlib import Path
from apex.environments.factory import describe
from apex.runs.metrics.writer import MetricRow, MetricsWriter
from apex.algorithms.parameters import flatten_parameters
from apex.dqn.networks import make_network
from apex.command_line import parse_config
from apex.runs.checkpoints.policy_file import PolicyInfo, save_best
from apex.runs.folder import RunFolder
config = parse_config(arguments[3:], prog="apex train")
schema = describe(config.environment, 3)
run = RunFolder.create(config, schema)
writer = MetricsWriter(run.path)
for steps, score in ((500, 20.5), (900, 480.0)):
    for role, at, scalars in (
        ("evaluator", steps, {{"evaluator/score": score}}),
        ("learner", steps + 50, {{"learner/updates": steps / 10}}),
    ):
        writer.accept(MetricRow(role, at, scalars))
writer.close()
network = make_network(config.network, schema, seed=0)
info = PolicyInfo(schema=schema, config=config, num_updates=90, score=480.0)
save_best(run.checkpoints, flatten_parameters(network), info)
"""


def program(tmp_path, text):
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    return path


def records_of(root):
    return sorted(str(path.relative_to(root / FOLDER)) for path in (root / FOLDER).rglob("*.*"))


def run(root, *arguments, task="cartpole", system="apex", seed="3"):
    """Runs the command in this process; returns its status."""
    return learning.main(["--root", str(root), "run", "--task", task, "--system", system, "--seed", seed, *arguments])


def test_a_finished_run_is_recorded_with_score_machine_and_curve(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(learning, "OTHERS_SHARE", -1.0)
    python = program(tmp_path, APEX.format(python=sys.executable))
    status, errors = run(tmp_path, "--python", str(python), "--", "--actors", "4"), capfd.readouterr().err
    assert status == 0, errors
    assert "other processes" in errors

    assert records_of(tmp_path) == ["cartpole/apex-seed-3.csv", "cartpole/apex-seed-3.json"]
    (record,) = read_records(tmp_path)
    options = TASKS["cartpole"].options
    assert record.command == " ".join(["apex train", *options, "--seed 3 --max-minutes 3 --actors 4"])
    assert (record.steps, record.updates, record.reached) == (950, 90, False)
    assert len(record.score.scores) == record.score.episodes == 100
    assert record.score.mean == pytest.approx(sum(record.score.scores) / 100)
    low, high = record.score.interval
    assert low <= record.score.mean <= high
    assert record.settings["actor.num_actors"] == 4
    assert record.settings["learner.optimizer"] == "adam"
    assert not {"seed", "environment.id", "run.folder"} & set(record.settings)
    assert record.machine["cores"] == len(os.sched_getaffinity(0))
    assert record.versions["torch"]
    assert record.others_share < 1  # The run itself does not count.
    text = record_path(tmp_path, "cartpole", "apex", 3).read_text()
    assert os.uname().nodename not in json.loads(text)["machine"].values()
    assert str(tmp_path) not in text
    # No evaluation during the run used the games that count.
    assert evaluation_seed(record.score.seed) not in {evaluation_seed(3, number) for number in range(1_000)}

    header, *points = record_path(tmp_path, "cartpole", "apex", 3, ".csv").read_text().splitlines()
    assert header == "seconds,steps,score"
    assert [point.split(",")[1:] for point in points] == [["500", "20.5"], ["900", "480"]]
    assert all(0 < float(point.split(",")[0]) <= record.seconds for point in points)

    assert run(tmp_path, "--python", str(python)) == 2  # A record is never replaced.
    assert "apex-seed-3.json" in capfd.readouterr().err


PEER = """#!{python}
import json, sys
from pathlib import Path
out = Path("runs/sb3")
if sys.argv[2:3] == ["train"]:
    out.mkdir(parents=True)
    (out / "curve.csv").write_text("seconds,steps,score\\n2.5,100,-20.5\\n9.0,800,-19.0\\n")
    facts = {{"steps": 900, "updates": 200, "evaluations": 2, "evaluation_seconds": 1.5}}
    facts |= {{"settings": {{"batch_size": 32}}, "versions": {{"torch": "2"}}}}
    (out / "result.json").write_text(json.dumps(facts))
elif sys.argv[2:3] == ["versions"]:
    print('{{"torch": "2"}}')
else:
    print("a line before")
    first = 100 if "--final" in sys.argv else 0
    print(json.dumps({{"scores": list(range(first, first + int(sys.argv[4]))), "epsilon": 0.001}}))
"""


def test_a_run_of_the_other_system_is_recorded_alike(tmp_path, capfd):
    python = program(tmp_path, PEER.format(python=sys.executable))
    peer = ("--peer-python", str(python))
    assert run(tmp_path, *peer, "--minutes", "0.5", task="pong", system="sb3") == 0, capfd.readouterr().err
    (record,) = read_records(tmp_path)
    assert record.command == (
        ".peer-sb3/bin/python bench/peers/stable_baselines3_dqn.py train --env ALE/Pong-v5 --seed 3 --minutes 0.5 "
        "--stop-score 18"
    )
    assert record.score.scores == list(range(100))
    assert (record.steps, record.updates, record.reached) == (900, 200, True)
    assert record.settings == {"batch_size": 32, "evaluations": 2, "evaluation_seconds": 1.5}
    assert record.versions == {"torch": "2"}
    assert record.final_score is None  # The run ends with the policy that reached the bar.
    curve = record_path(tmp_path, "pong", "sb3", 3, ".csv").read_text()
    assert curve == "seconds,steps,score\n2.50,100,-20.5\n9.00,800,-19\n"


def test_without_a_bar_the_final_policy_plays_the_same_games(tmp_path, capfd):
    python = program(tmp_path, PEER.format(python=sys.executable))
    peer = ("--peer-python", str(python))
    assert run(tmp_path, *peer, "--minutes", "0.5", task="hopper", system="sb3-sac") == 0, capfd.readouterr().err
    (record,) = read_records(tmp_path)
    assert "--algorithm sac" in record.command
    assert record.score.scores == list(range(30))
    assert record.final_score.scores == list(range(100, 130))
    assert record.final_score.seed == record.score.seed == 1_000_003


def test_missing_runs_of_untuned_games_are_recorded_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(learning, "UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr(learning, "counts", lambda record: True)  # although the runs are short
    monkeypatch.setattr(learning, "EARLY_SECONDS", 0.0)
    monkeypatch.setattr(learning, "OTHERS_SHARE", 2.0)  # Other tests run beside this one.
    set_code(monkeypatch)
    peer = program(tmp_path, PEER.format(python=sys.executable))

    def untuned(*arguments, python=peer):
        status = learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(python), *arguments])
        return status, capfd.readouterr().err.splitlines()

    status, lines = untuned("--hours", "0.1")  # A run takes longer.
    assert (status, len(lines), lines[-1]) == (1, 2, "learning: 2 of 2 runs are missing")
    assert "battle-zone, sb3-ppo, seed 201 needs 0.89 hours" in lines[0]
    assert records_of(tmp_path) == []
    broken = tmp_path / "broken"
    broken.write_text(f'#!/bin/sh\ncase "$*" in *ppo*) exit 3;; esac\nexec {peer} "$@"\n')
    broken.chmod(0o755)
    status, lines = untuned(python=broken)
    assert (status, lines[-1]) == (1, "learning: 1 of 2 runs are missing")  # The other one was made all the same.
    assert any("battle-zone, sb3-ppo, seed 201: the command ended with status 3" in line for line in lines)
    failed = tmp_path / "docs/results/learning/battle-zone/sb3-ppo-seed-201.failed"
    assert "ended with status 3" in failed.read_text()
    status, lines = untuned()  # It is not repeated until it succeeds.
    assert (status, lines[-1]) == (0, "learning: 1 of 2 runs are missing")
    assert any("sb3-ppo-seed-201.failed" in line for line in lines)
    failed.unlink()
    monkeypatch.setattr(learning, "counts", lambda record: record.system == "sb3")  # The other one had neighbours.
    status, lines = untuned()
    assert (status, lines[-1]) == (0, "learning: 1 of 2 runs are missing")
    assert any("battle-zone, sb3-ppo, seed 201" in line for line in lines)
    dqn, ppo = read_records(tmp_path)
    assert [(one.task, one.system, one.seed) for one in (ppo, dqn)] == UNTUNED_RUNS[1:3]
    assert "--algorithm ppo --env ALE/BattleZone-v5 --seed 201 --minutes 19" in ppo.command
    assert ppo.score == ppo.final_score  # The best policy does not play.
    assert ppo.score.scores == list(range(100, 200))
    monkeypatch.setattr(learning, "counts", lambda record: True)
    assert untuned() == (0, ["learning: 0 of 2 runs are missing"])


def set_code(monkeypatch, *commits):
    """The code has these commits, one after the other, and keeps the last one."""
    left = [*(commits or ("c0ffee",))]

    def describe(*_):
        return (left.pop(0) if len(left) > 1 else left[0]), False

    monkeypatch.setattr(learning, "describe_code", describe)
    for module in (learning, record_files):
        monkeypatch.setattr(module, "describe_code", describe)
        monkeypatch.setattr(module, "is_same_code", lambda commit, other, folders: commit[:2] == other[:2])
    monkeypatch.setattr(learning, "require_native_code", lambda: None)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"describe_code": lambda *_: ("c0ffee", True)}, "differs from its commit"),
        ({"describe_code": lambda *_: (None, None)}, "not in a git checkout"),
        ({"describe_machine": lambda: {"gpus": ["NVIDIA H200"]}}, "NVIDIA H200"),
        ({"CORES": 1_000}, "1000 cores"),
    ],
)
def test_a_run_that_would_not_count_is_refused_at_once(tmp_path, capfd, monkeypatch, change, part):
    set_code(monkeypatch)
    for name, value in change.items():
        for module in (learning, record_files):
            monkeypatch.setattr(module, name, value, raising=False)
    peer = program(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/started\n")
    assert learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(peer)]) == 2
    assert part in capfd.readouterr().err
    assert not (tmp_path / "started").exists()


def test_untuned_runs_are_of_one_code(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(learning, "UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr(learning, "OTHERS_SHARE", 2.0)
    peer = program(tmp_path, PEER.format(python=sys.executable))

    def untuned(*commits):
        set_code(monkeypatch, *commits)
        status = learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(peer)])
        return status, capfd.readouterr().err

    status, errors = untuned(*["1" * 40] * 3, "2" * 40)  # before the runs, twice before the first, and after it
    assert (status, "changed during the run" in errors, records_of(tmp_path)) == (2, True, [])
    assert untuned("1" * 40)[0] == 0
    record_path(tmp_path, *UNTUNED_RUNS[2]).unlink()
    status, errors = untuned("2" * 40)
    assert (status, f"checkout of {'1' * 40}" in errors) == (2, True)
    assert untuned(*["1" * 40] * 3, "1" * 39 + "2")[0] == 0  # Results were committed during the run.
    assert len(read_records(tmp_path)) == 2


def test_runs_of_a_game_and_seed_have_the_same_processor(tmp_path, capfd, monkeypatch):
    runs = [UNTUNED_RUNS[place] for place in (1, 2, 4)]
    monkeypatch.setattr(learning, "counts", lambda record: True)
    monkeypatch.setattr(learning, "UNTUNED_RUNS", runs)
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", runs)
    set_code(monkeypatch)
    peer = program(tmp_path, PEER.format(python=sys.executable))

    def untuned(cpu, others_share):
        machine = {"cores": 2, "cpu": cpu, "gpus": []}
        monkeypatch.setattr(learning, "describe_machine", lambda: machine)
        monkeypatch.setattr(learning, "OTHERS_SHARE", others_share)
        status = learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(peer)])
        return status, capfd.readouterr().err, [(one.task, one.system) for one in read_records(tmp_path)]

    status, errors, made = untuned("Z80", -1.0)
    assert (status, errors.count("on an otherwise idle machine"), made) == (1, 2, [])  # They can be made again.
    assert untuned("Z80", 2.0)[2] == [("battle-zone", "sb3"), ("battle-zone", "sb3-ppo"), ("double-dunk", "sb3-ppo")]
    for task, system, seed in runs[1:]:
        record_path(tmp_path, task, system, seed).unlink()
    _, errors, made = untuned("6502", 2.0)
    assert "battle-zone, sb3, seed 201 needs Z80" in errors
    assert made == [("battle-zone", "sb3-ppo"), ("double-dunk", "sb3-ppo")]
    assert untuned("Z80", 2.0)[2][0] == ("battle-zone", "sb3")


def test_a_seed_without_peers_has_the_processor_of_their_seeds(tmp_path, capfd, monkeypatch):
    runs = [("battle-zone", "sb3-ppo", 201), ("battle-zone", "sb3", 201), ("battle-zone", "sb3", 203)]
    runs += [("phoenix", "sb3", 203)]
    monkeypatch.setattr(learning, "counts", lambda record: True)
    monkeypatch.setattr(learning, "UNTUNED_RUNS", runs)
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", runs)
    monkeypatch.setattr(learning, "OTHERS_SHARE", 2.0)
    set_code(monkeypatch)
    peer = program(tmp_path, PEER.format(python=sys.executable))

    def untuned(cpu):
        monkeypatch.setattr(learning, "describe_machine", lambda: {"cores": 2, "cpu": cpu, "gpus": []})
        status = learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(peer)])
        return status, capfd.readouterr().err, {(one.task, one.system, one.seed) for one in read_records(tmp_path)}

    status, errors, made = untuned("Z80")
    assert (status, made) == (0, set(runs[:3]))
    assert "phoenix, sb3, seed 203 needs runs of the others" in errors
    record_path(tmp_path, *runs[2]).unlink()
    status, errors, made = untuned("6502")
    assert (status, made) == (1, set(runs[:2]))
    assert "battle-zone, sb3, seed 203 needs Z80" in errors


def test_untuned_runs_have_the_same_packages(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(learning, "UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr(learning, "OTHERS_SHARE", 2.0)
    set_code(monkeypatch)
    text = PEER.format(python=sys.executable)
    command = ["--root", str(tmp_path), "untuned", "--peer-python", str(program(tmp_path, text))]
    assert learning.main(command) == 0
    record_path(tmp_path, *UNTUNED_RUNS[2]).unlink()
    program(tmp_path, text.replace("""print('{"torch": "2"}')""", """print('{"torch": "3"}')"""))
    assert learning.main(command) == 2
    assert "sb3-ppo-seed-201 was made with torch 2, here is 3" in capfd.readouterr().err


def test_runs_without_a_compiled_part_are_refused(monkeypatch):
    def missing():
        raise NativeError("build", "not built")

    monkeypatch.setattr("bench.learning.trial.find_native", missing)
    with pytest.raises(UsageError, match="reinstall"):
        require_native_code()


def test_a_broken_installation_leaves_no_failed_runs(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(learning, "UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    monkeypatch.setattr("bench.learning.untuned.UNTUNED_RUNS", UNTUNED_RUNS[1:3])
    set_code(monkeypatch)
    for script, status, part in (
        ('[ "$2" = versions ] && echo {} || exit 2', 1, "ended with status 2"),
        ("echo 'Traceback' >&2; echo 'No module named cv2' >&2; exit 1", 2, "No module named cv2"),
        ("echo 3.11", 2, "setup.sh"),
    ):
        peer = program(tmp_path, f"#!/bin/sh\n{script}\n")
        assert learning.main(["--root", str(tmp_path), "untuned", "--peer-python", str(peer)]) == status
        assert part in capfd.readouterr().err
        assert records_of(tmp_path) == []


def test_code_that_changes_during_a_run_is_recorded(tmp_path, monkeypatch):
    set_code(monkeypatch, "1" * 40, "2" * 40)
    peer = program(tmp_path, PEER.format(python=sys.executable))
    assert run(tmp_path, "--peer-python", str(peer), "--minutes", "0.5", task="pong", system="sb3") == 0
    (record,) = read_records(tmp_path)
    assert (record.commit, record.dirty) == ("1" * 40, True)


def test_untuned_runs_have_fixed_settings(tmp_path, capsys):
    assert learning.main(["--root", str(tmp_path), "untuned", "--", "--actor.n-step", "3"]) == 2
    assert "fixed" in capsys.readouterr().err
    peer = program(tmp_path, PEER.format(python=sys.executable))
    fixed = {"task": "qbert", "system": "sb3", "seed": "201"}
    assert run(tmp_path, "--peer-python", str(peer), **fixed) == 2  # `run` could repeat a failed one.
    assert "bench learning untuned" in capsys.readouterr().err
    assert records_of(tmp_path) == []
    assert len(set(UNTUNED_RUNS)) == len(UNTUNED_RUNS) == 35
    assert [sum(run[1] == system for run in UNTUNED_RUNS) for system in ("apex", "sb3-ppo", "sb3")] == [15, 10, 10]
    tuned = {task.environment for name, task in TASKS.items() if name not in UNTUNED}
    # Qbert is also a game for a GPU, without a record.
    assert {TASKS[task].environment for task in UNTUNED} & tuned == {"ALE/Qbert-v5"}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_only_what_it_names(name):
    _, options = VARIANTS[name]
    base = PENDULUM if name in CONTROL_VARIANTS else {"apex-live": ATARI}.get(name, NARROW)
    preset = replace(base, seed=1)
    config = parse_config(options, prog="", base=preset)
    changed = {setting for setting, value in flatten(config).items() if value != flatten(preset)[setting]}
    named = {option[2:].replace("-", "_").replace(".no_", ".") for option in options if option.startswith("--")}
    assert changed == named


def test_shares_of_dormant_units_are_recorded_every_8000_updates():
    rows = [{"learner/updates": n, "learner/dormant_share": s} for n, s in ((7_900, 0.9), (8_050, 0.3), (9_000, 0.5))]
    rows += [{"learner/updates": 16_100, "learner/dormant_share": 0.2}, {"learner/updates": 17_000}]
    assert dormant_shares(rows) == {"8000": 0.3, "16000": 0.2, "highest": 0.5}
    assert dormant_shares(rows[:1]) == {}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "status 3"),
        (
            """[ "$2" = evaluate ] && { echo '{"scores": [1], "epsilon": 0}'; exit 0; }; mkdir -p runs/sb3; cd runs/sb3
            printf 'seconds,steps,score\\n1,1,1\\n' > curve.csv; n='"evaluations": 1, "evaluation_seconds": 1'
            echo '{"steps": 1, "updates": 1, '"$n"', "settings": {}, "versions": {}}' > result.json""",
            "100",
        ),
        (
            """mkdir -p runs/sb3; cd runs/sb3; echo seconds,steps,score > curve.csv
            n='"evaluations": 0, "evaluation_seconds": 0'
            echo '{"steps": 1, "updates": 1, '"$n"', "settings": {}, "versions": {}}' > result.json""",
            "no curve",
        ),
    ],
)
def test_a_failed_run_is_not_recorded_and_its_reason_is_printed(tmp_path, capfd, script, message):
    python = program(tmp_path, f"#!/bin/sh\n{script}\n")
    assert run(tmp_path, "--peer-python", str(python), system="sb3") == 1
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert records_of(tmp_path) == []


def test_a_run_finds_the_environments_of_the_examples(tmp_path, capfd):
    script = f"#!{sys.executable}\nimport os, apex, examples.memory\nprint('in', os.getcwd(), apex.__file__)\n"
    assert run(tmp_path, "--python", str(program(tmp_path, script)), task="cue") == 1  # It leaves no run folder.
    output = capfd.readouterr().out
    assert output.startswith("in /")
    assert str(learning.ROOT) in output  # the packages whose commit the record names


def test_a_stopped_run_is_not_recorded_although_its_command_succeeds(tmp_path, capfd):
    # The command interrupts this process, like Ctrl-C, and then runs until it is interrupted itself.
    text = "#!/bin/sh\ntrap 'exit 0' INT\nkill -INT $PPID\nwhile :; do sleep 0.05; done\n"
    assert run(tmp_path, "--peer-python", str(program(tmp_path, text)), system="sb3") == 1
    assert "stopped" in capfd.readouterr().err
    assert records_of(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tables", "--", "more"], "--"),
        (["run", "--task", "tetris"], "tetris"),
        (["run", "--task", "pong", "--system", "apex", "--seed", "1000000"], "1000000"),
        (["run", "--task", "pong", "--system", "sb3", "--seed", "1", "--peer-python", "no/python"], "no/python"),
    ],
)
def test_a_mistake_is_refused_in_one_line(tmp_path, capsys, arguments, part):
    assert learning.main(["--root", str(tmp_path), *arguments]) == 2
    errors = capsys.readouterr().err
    assert part in errors
    assert len(errors.splitlines()) == 1
