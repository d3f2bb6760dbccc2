"""Runs on a Ray cluster of several nodes: they learn, survive faults, and leave nothing behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from support.programs import CALM, CALM_FILE
from support.ray_clusters import RAY, RayCluster, apex_processes, needs_ray
from support.waiting import slowdown, until

from apex.facts import INTERRUPTED
from apex.launch.preflight.leftovers import find_leftovers
from apex.launch.ray.cluster import lets_anybody_in
from apex.runs.folder import RunFolder
from apex.runs.metrics.writer import read_curve
from apexreplay.errors import NEIGHBOUR_GONE
from apexreplay.store.location import discard, memory_folder, store_path
from chaos.audit import Follower, judge
from chaos.ledger import LedgerReader

pytestmark = [needs_ray, pytest.mark.timeout(400)]
CALMLY = [*CALM, "--checkpoint.period", "20", "--run.no-tensorboard", "--evaluator.final-seconds", "0", "--name", "run"]


@pytest.fixture
def clusters(tmp_path):
    made = []

    def make(num_cpus, **options):
        (tmp_path / "calm.py").write_text(CALM_FILE)
        made.append(RayCluster(tmp_path, num_cpus, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture
def short_folder():
    """A folder for Ray's sockets, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield folder


def train(cluster, *arguments, engine=("--actor-hosts", "1")):
    return cluster.start("driver", "apex", "train", "--engine", "ray", *engine, *arguments)


def updates(cluster, name="run"):
    with suppress(FileNotFoundError, IndexError):
        return read_curve(cluster.folder / "runs" / name / "curves" / "learner.jsonl")[-1]["scalars"]["learner/updates"]
    return 0


def until_output(driver, *patterns, seconds=150.0):
    def look():
        assert driver.poll() is None, driver.output()
        return all(re.search(pattern, driver.output()) for pattern in patterns)

    until(look, f"{patterns} in:\n{driver.output()}", seconds=seconds)


def count(cluster, log, text):
    """How often a text is in a log; `log`: its path below the folder of the cluster."""
    path = cluster.folder / log
    return path.read_text().count(text) if path.exists() else 0


def until_more(cluster, driver, than=0, seconds=150.0):
    def look():
        assert driver.poll() is None, driver.output()
        return updates(cluster) > than

    until(look, "training", seconds=seconds)
    return updates(cluster)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def find(cluster, *parts):
    return [pid for pid, line in apex_processes(cluster.folder).items() if all(part in line for part in parts)]


def nothing_stays(cluster):
    until(lambda: not find(cluster, "apex.", "-m"), "end of all programs", seconds=30.0)
    assert not list(cluster.folder.rglob("*.key_secret"))


def test_cartpole_is_solved_through_two_raylets(clusters):
    cluster = clusters(1)
    cluster.add_node(2)
    driver = train(cluster, "--preset", "cartpole", "--run.no-tensorboard", engine=("--actor-hosts", "2"))
    assert driver.wait(300) == 0, driver.output()
    assert "reached the score" in driver.output()
    (curve,) = (cluster.folder / "runs").glob("*/curves/evaluator.jsonl")
    evaluation = read_curve(curve)[-1]["scalars"]
    assert evaluation["evaluator/score"] >= 475
    assert evaluation["evaluator/episodes"] >= 100
    lines = [line for line in driver.output().splitlines() if " | " in line]
    assert max(map(len, lines)) <= 160
    assert not re.search(r" (learner|evaluator|actor) INFO ", driver.output())
    nothing_stays(cluster)
    assert not find_leftovers().dead


def test_a_lost_actor_node_is_replaced_and_its_ids_are_leased_again(clusters, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # every node imports `chaos` from there
    ledgers = tmp_path / "ledgers"
    ledgers.mkdir()
    witness = ["--env", "chaos.witness:make", "--env-arg", f"ledgers={ledgers}", "--replay.capacity", "500000"]
    cluster = clusters(2)
    node = cluster.add_node(1)
    driver = train(cluster, *CALMLY, *witness, engine=("--actor-hosts", "1", "--head-cpus", "2"))
    until_more(cluster, driver)
    run = RunFolder.open(tmp_path / "runs" / "run")
    ledger, store = LedgerReader(ledgers), Follower(store_path(run.run_id), run.schema)
    joins = partial(count, cluster, "runs/ray/run/actor-0/actor-0.log", "actor INFO actors")
    until(lambda: joins() == 1, "actor", seconds=150.0)
    cluster.kill_node(node)
    until_output(driver, "actor-0 was lost", seconds=60.0)
    until_output(driver, r"actor-0 waits .* 0 of [23] CPUs", seconds=60.0)
    ask = partial(subprocess.run, [RAY, "status"], env=cluster.environment, capture_output=True, text=True, timeout=60)
    demand = r"'CPU': 1\.0.*'memory': .*: 1\+ pending|'memory': .*'CPU': 1\.0.*: 1\+ pending"
    until(lambda: re.search(demand, ask().stdout), "demand, which an autoscaler meets")
    cluster.add_node(1)
    began = time.monotonic()
    until_output(driver, "(?s)was lost.*actor-0 is on", seconds=60.0)
    until(lambda: joins() == 2, "actor", seconds=60.0)
    assert time.monotonic() - began < 30
    until_more(cluster, driver, updates(cluster))
    ledger.read()
    acknowledged = dict(ledger.entries.acknowledged)
    assert store.read()
    store.look_again()
    ledger.read()
    verdict = judge(ledger.entries._replace(acknowledged=acknowledged), [store.content])
    assert len(ledger.actors) == 2, "one process before the loss, and one after"
    assert verdict.acknowledged > 100
    assert verdict.passed, verdict.sentence()
    print(verdict.sentence())
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) == 130, driver.output()
    nothing_stays(cluster)


def test_the_same_command_on_a_new_cluster_continues_from_the_mirror(clusters, tmp_path):
    mirror = tmp_path / "mirror"
    newest = mirror / "run/checkpoints/newest.json"
    command = [*CALMLY, "--checkpoint.period-seconds", "2", "--continue", "--run.mirror", str(mirror)]

    def saved():
        return json.loads(newest.read_text())["num_updates"] if newest.exists() else 0

    cluster = clusters(2)
    first = train(cluster, *command)
    until(
        lambda: saved() > 0 and (mirror / "run/manifest.json").exists(),
        f"a run in the mirror:\n{first.output()}",
        seconds=150.0,
    )
    run_id = RunFolder.open(tmp_path / "runs/run").run_id
    cluster.kill_node(0)  # the node of the head and of the driver
    first.kill()
    until(lambda: not find(cluster, "apex.", "-m"), "end of all programs", seconds=60.0)
    lost = saved()
    shutil.rmtree(tmp_path / "runs")
    discard(store_path(run_id))
    again = clusters(2)
    second = train(again, *command)
    until(lambda: saved() > lost, f"a newer checkpoint:\n{second.output()}", seconds=150.0)
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == NEIGHBOUR_GONE, second.output()
    assert RunFolder.open(tmp_path / "runs/run").run_id == run_id
    steps = [row["steps"] for row in read_curve(tmp_path / "runs/run/curves/learner.jsonl")]
    assert steps == sorted(steps)
    nothing_stays(again)


def test_the_head_and_its_learner_restart_and_training_continues(clusters):
    cluster = clusters(2)
    driver = train(cluster, *CALMLY)
    newest = cluster.folder / "runs/run/checkpoints/newest.json"
    resumed_lives = partial(count, cluster, "runs/run/logs/learner.log", "learner INFO resuming at update")

    def kill(pid, lives):
        """Kills a process; returns the seconds until the next learner has saved, and the slowdown of this machine.

        The seconds are divided by the slowdown. A learner saves every 20 updates.
        """
        began, slow = time.monotonic(), pool.submit(slowdown)
        os.kill(pid, signal.SIGKILL)
        until(lambda: resumed_lives() == lives, "learner", seconds=150.0)
        resumed = time.time()
        until(lambda: newest.stat().st_mtime > resumed, "updates", seconds=150.0)
        seconds = time.monotonic() - began
        return seconds / slow.result(), slow.result()

    until(newest.exists, "checkpoint", seconds=150.0)
    with ThreadPoolExecutor(1) as pool:
        seconds = {"learner": kill(learner_of(cluster), 1)}
        unit = parent_of(parent_of(learner_of(cluster)))
        assert "Head" in cmdline(unit)
        seconds["worker"] = kill(unit, 2)
    assert "head was lost" in driver.output()
    print(seconds)
    assert all(idle < 15 for idle, _ in seconds.values()), seconds
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) == 130, driver.output()
    assert "interrupted" in driver.output()
    nothing_stays(cluster)
    (cluster.folder / "driver.log").rename(cluster.folder / "before.log")
    driver = cluster.start("driver", "apex", "train", "--engine", "ray", "--resume", "runs/run")
    until_more(cluster, driver, updates(cluster))


def learner_of(cluster):
    (pid,) = [pid for pid in find(cluster, "apex.learner") if "apex.launch.guard" in cmdline(parent_of(pid))]
    return pid


def test_no_program_outlives_a_killed_driver_and_doctor_names_its_files(clusters):
    cluster = clusters(2)
    driver = train(cluster, *CALMLY)
    until_more(cluster, driver)
    driver.kill()
    driver.wait()
    until(lambda: not find(cluster, "apex.", "-m"), "end of all programs", seconds=30.0)
    assert RunFolder.open(cluster.folder / "runs/run").end == INTERRUPTED
    assert not list(cluster.folder.rglob("*.key_secret"))
    run_id = json.loads((cluster.folder / "runs/run/manifest.json").read_text())["run_id"]
    left = set(memory_folder().glob(f"apex-{run_id:016x}*.replay"))
    until(lambda: left <= set(find_leftovers().kept), "entry of the doctor", seconds=10.0)
    assert all(map(discard, left))


def test_a_run_without_its_control_service_is_saved_and_ends(clusters):
    cluster = clusters(1)
    cluster.add_node(2)
    driver = train(cluster, *CALMLY, engine=("--actor-hosts", "1", "--head-cpus", "2"))
    until_more(cluster, driver)
    cluster.kill_node(0)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(slowdown)
        until(lambda: "control service" in driver.output(), "end", seconds=100.0)
        seconds = time.monotonic() - began
        print(seconds, slow.result())
        assert seconds / slow.result() < 10
    assert driver.wait(100) == NEIGHBOUR_GONE, driver.output()
    assert f"--resume {cluster.folder / 'runs/ray/run'}" in driver.output()
    until(lambda: not find(cluster, "apex.", "-m", "run"), "end of all programs", seconds=100.0)
    assert RunFolder.open(cluster.folder / "runs/run").end == INTERRUPTED
    assert not list(cluster.folder.rglob("runs/ray/run/secrets"))


def submit(cluster, *arguments):
    """Starts a job with its own environment, called `job`; returns the program that shows its output."""
    folder = cluster.folder / "job"
    folder.mkdir()
    (folder / "brought.py").write_text(CALM_FILE)
    options = [
        "--address",
        f"http://127.0.0.1:{cluster.dashboard}",
        "--working-dir",
        str(folder),
        "--submission-id",
        "job",
    ]
    train = [sys.executable, "-m", "apex", "train", "--engine", "ray", *CALMLY, "--env", "brought:Calm", *arguments]
    runs = ["--run.folder", str(cluster.folder / "runs")]
    return cluster.start("driver", str(RAY), "job", "submit", *options, "--", *train, *runs)


def test_a_job_trains_in_an_environment_from_its_working_directory(clusters):
    cluster = clusters(2, dashboard=True)
    job = submit(cluster, "--max-updates", "30")
    assert job.wait(200) == 0, job.output()
    assert "reached 30 updates" in job.output()
    assert (cluster.folder / "runs" / "run" / "checkpoints" / "newest.json").exists()


def test_a_stopped_job_saves_and_leaves_no_secret_key(clusters):
    cluster = clusters(2, dashboard=True)
    job = submit(cluster)
    until_more(cluster, job)
    stop = [RAY, "job", "stop", "--address", f"http://127.0.0.1:{cluster.dashboard}", "job"]
    subprocess.run(stop, env=cluster.environment, check=True, capture_output=True, timeout=100)
    assert not list((cluster.folder / "runs/ray/run").glob("secrets/**/*.key_secret"))
    until(lambda: not list(cluster.folder.rglob("*.key_secret")), "end of the guards", seconds=60.0)
    assert RunFolder.open(cluster.folder / "runs/run").end == INTERRUPTED


LOOK = """
import urllib.request, ray
ray.init()
print([actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)])
for node in ray.nodes():
    print(urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics").read().decode())
"""


def test_the_tools_of_ray_show_units_by_name_and_figures_of_the_run(clusters):
    cluster = clusters(2)
    driver = train(cluster, *CALMLY)
    until_more(cluster, driver)

    def look():
        command = [sys.executable, "-c", LOOK]
        found = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=100)
        assert found.returncode == 0, found.stderr
        assert "run/head" in found.stdout
        assert "run/actor-0" in found.stdout
        return all(re.search(rf'^ray_apex_{name}{{.*run="run".*}} [1-9]', found.stdout, re.M) for name in FIGURES)

    until(look, "figures of the run", seconds=150.0)
    assert "ray::Head" in cmdline(parent_of(parent_of(learner_of(cluster))))


FIGURES = ("updates", "steps")


def test_the_head_waits_for_a_gpu_that_ray_up_may_start(clusters, tmp_path):
    types = {"gpus": {"max_workers": 1, "resources": {"CPU": 2, "GPU": 1}}}
    (tmp_path / "ray_bootstrap_config.yaml").write_text(json.dumps({"available_node_types": types}))
    cluster = clusters(2)
    cluster.environment["HOME"] = str(tmp_path)
    driver = train(cluster, *CALMLY, engine=())
    until_output(driver, r"head waits .* 2 CPUs, .* a GPU", seconds=60.0)
    cluster.add_node(2, "--num-gpus", "1", "--address", cluster.address)
    until_output(driver, "head is on", "actor-0 is on", seconds=60.0)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) in (0, 130), driver.output()
    nothing_stays(cluster)


API = """
import apex
def train(name, **limits):
    limits = {"stop_score": None, "tensorboard": False, "name": name, **limits}
    config = apex.preset("cartpole", evaluator={"enabled": False}, replay={"inserts_wait": False}, run=limits)
    run = apex.train(config, engine=apex.RayEngine(actor_hosts=1))
    print("returned", run.updates, run.end.kind, run.folder)
"""
SESSION = "import ray; ray.init(); train('one', max_updates=30); train('two', max_updates=30)"


def test_two_calls_train_in_one_session_of_the_caller(clusters):
    cluster = clusters(2)
    script = cluster.start("driver", sys.executable, "-c", API + SESSION)
    assert script.wait(200) == 0, script.output()
    for name in ("one", "two"):
        assert re.search(rf"returned \d+ updates .*/runs/{name}\n", script.output()), script.output()
    nothing_stays(cluster)


def test_sigterm_saves_the_run_of_a_call_and_ends_the_caller(clusters):
    cluster = clusters(2)
    script = cluster.start("driver", sys.executable, "-c", API + "train('run')")
    until_more(cluster, script)
    script.terminate()
    assert script.wait(60) == -signal.SIGTERM, script.output()
    assert RunFolder.open(cluster.folder / "runs/run").end == INTERRUPTED
    nothing_stays(cluster)


def test_without_a_cluster_a_local_one_lives_as_long_as_the_run(tmp_path, short_folder):
    (tmp_path / "calm.py").write_text(CALM_FILE)
    program = [sys.executable, "-m", "apex", "train", "--engine", "ray", *CALMLY, "--max-updates", "30"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # RAY_TMPDIR hides the machine's other cluster from this one, which writes its token to HOME.
    environment |= {"RAY_TMPDIR": short_folder, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "reached 30 updates" in ended.stdout
    until(lambda: not apex_processes(tmp_path), "end of all programs", seconds=20.0)
    until(
        lambda: not [p for p in Path("/proc").glob("[0-9]*/cmdline") if short_folder.encode() in read(p)], "end of Ray"
    )


def read(path):
    with suppress(OSError):
        return path.read_bytes()
    return b""


@pytest.mark.parametrize("token", [True, False])
def test_a_cluster_accepts_strangers_unless_it_requires_a_token(clusters, token):
    assert lets_anybody_in(clusters(1, token=token).address) is not token


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
