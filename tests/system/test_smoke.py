"""Whole runs with the real programs, which are started by hand in any order, or by one command."""

import json
import os
import re
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.listening import listening
from support.programs import CALM, DEADLINE, FEW_GAMES, TINY, UNSCORED, children_of, running_in
from support.waiting import until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apex.facts import EndReason
from apex.runs.folder import RunFolder
from apex.runs.metrics.tensorboard_layout import GLANCE, LAYOUT
from apex.runs.metrics.writer import read_curve
from apex.sentences import PHASES
from apexreplay.errors import FINISHED, NEIGHBOUR_GONE
from apexreplay.files.file_lock import is_owned
from apexreplay.server.open_store import reclaim
from apexreplay.store.file import open_file
from apexreplay.store.layout import COMMIT, Store
from apexreplay.store.location import claim_path, memory_folder, store_path

pytestmark = pytest.mark.timeout(700)  # longer than the tests' own deadlines


@pytest.mark.covers_programs
@pytest.mark.parametrize(
    ("order", "batches"),
    [
        (("learner", "replay", "actor"), "--transport.shared-memory"),
        (("actor", "replay", "learner"), "--transport.no-shared-memory"),
    ],
)
def test_three_programs_in_any_order_train_and_end_together(programs, order, batches):
    options = ["--max-updates", "300", "--name", "by-hand", "--evaluator.final-seconds", "0"]  # There is no evaluator.
    commands = {
        "learner": ["learner", *TINY, *programs.offset, *options, batches],
        "replay": ["replay", *programs.learner],
        "actor": ["actor", *programs.learner],
    }
    for name in order:
        programs.start(name, *commands[name])
    assert [programs.wait(name) for name in order] == [0, 0, 0], "".join(map(programs.output, order))
    folder = RunFolder.open(programs.folder / "runs" / "by-hand")
    last = read_curve(folder.curves / "learner.jsonl")[-1]["scalars"]
    assert last["learner/updates"] == 300
    assert last["learner/loaders_draw"] == (batches == "--transport.shared-memory")
    assert "actor_highest_id/score" in " ".join((folder.curves / "actor.jsonl").read_text().split())
    shown = EventAccumulator(str(folder.path / "tensorboard" / "by-hand")).Reload()
    assert shown.Histograms("replay/priority")[0].histogram_value.num > 0
    assert b": " in shown.Tensors("limited_by/setting/text_summary")[0].tensor_proto.string_val[0]
    assert not list(memory_folder().glob(f"apex-{folder.run_id:016x}*"))


def test_a_late_actor_host_leases_the_free_ids(programs):
    programs.start("learner", "learner", *CALM, *programs.offset)
    programs.start("replay", "replay", *programs.learner)
    programs.start("first", "actor", *programs.learner, "--envs", "2")
    programs.status(lambda status: status.actors.leased == 2 and status.updates > 10)
    programs.start("second", "actor", *programs.learner, "--envs", "2")
    programs.status(lambda status: status.actors.leased == 4)
    both = programs.status(
        lambda status: len([r for r in status.roles if r.role == "actor" and r.steps_per_second]) == 2
    )
    assert both.limited_by
    programs.running["first"].send_signal(signal.SIGTERM)
    assert programs.wait("first") == NEIGHBOUR_GONE
    programs.status(lambda status: status.actors.leased == 2)
    programs.start("third", "actor", *programs.learner)
    programs.status(lambda status: status.actors.leased == 4)
    for name, status in {"second": NEIGHBOUR_GONE, "third": NEIGHBOUR_GONE, "learner": FINISHED}.items():
        programs.running[name].send_signal(signal.SIGTERM)
        assert programs.wait(name) == status, programs.output(name)
    assert programs.wait("replay") == 75, programs.output("replay")  # The learner was only stopped.


@pytest.mark.covers_programs
def test_one_command_trains_with_one_actor_and_leaves_nothing(programs):
    programs.start(
        "train",
        "train",
        *TINY[:2],
        "--actors",
        "1",
        *programs.offset,
        "--max-steps",
        "3000",
        "--name",
        "one",
        *FEW_GAMES,
        "--stop-score",
        "501",
    )
    assert programs.wait("train") == 0, programs.output("train")
    output = programs.output("train")
    assert "next: " in output
    assert "\x1b" not in output
    folder = RunFolder.open(programs.folder / "runs" / "one")
    assert folder.end == EndReason("steps", 3000.0)
    assert folder.has_saved
    assert list((folder.path / "tensorboard").iterdir())
    tags = {tag for file in folder.curves.glob("*.jsonl") for line in read_curve(file) for tag in line["scalars"]}
    charts = [tag for chart in LAYOUT[GLANCE].values() for tag in chart if not tag.startswith("evaluator/")]
    assert [tag for tag in charts if not any(re.match(tag, each) for each in tags)] == []
    assert not list(memory_folder().glob(f"apex-{folder.run_id:016x}*"))
    programs.start("evaluate", "evaluate", "runs/one", "--episodes", "3", "--json")
    assert programs.wait("evaluate") == 0, programs.output("evaluate")
    assert json.loads(programs.output("evaluate").splitlines()[-1])["episodes"] == 3
    programs.start("watch", "watch", "runs/one", "--seconds", "1", "--out", "game.gif")
    assert programs.wait("watch") == 0, programs.output("watch")
    assert (programs.folder / "game.gif").read_bytes()[:6] == b"GIF89a"


def stop(programs, name="train", signum=signal.SIGTERM):
    """Stops a run by a signal. It must end, also on a busy machine, within 60 s and leave no process."""
    programs.running[name].send_signal(signum)
    began = time.monotonic()
    assert programs.wait(name) == (130 if signum == signal.SIGINT else 0), programs.output(name)
    assert time.monotonic() - began < 60
    until(lambda: not running_in(programs.folder), "end of all processes", seconds=60.0)


def steps_and_updates(folder):
    """Every row of the replay server's and of the learner's curve."""
    rows = [read_curve(folder.curves / f"{role}.jsonl") for role in ("replay", "learner")]
    return [row["steps"] for row in rows[0]], [row["scalars"]["learner/updates"] for row in rows[1]]


def test_a_run_that_a_signal_stops_is_saved_and_resumed(programs):
    options = ["--replay.samples-per-insert", "8", "--run.no-tensorboard", "--name", "one", *UNSCORED]
    programs.start("train", "train", *CALM, *options, *programs.offset)
    programs.status(lambda status: status.updates > 50)
    folder = RunFolder.open(programs.folder / "runs" / "one")
    memory = f"apex-{folder.run_id:016x}*"
    assert {address for address, _ in listening(running_in(programs.folder))} == {"127.0.0.1"}
    stop(programs, signum=signal.SIGINT)
    assert "train --resume" in programs.output("train")
    assert [int(path.name) > 0 for path in folder.checkpoints.glob("[0-9]*")] == [True]
    assert list((folder.checkpoints / "replay").rglob("*.segments"))
    assert not list(memory_folder().glob(memory))
    before = steps_and_updates(folder)

    programs.start("refused", "train", "--resume", "one", "--learner.batch-size", "64", "--max-minutes", "1")
    assert programs.wait("refused") == 2
    assert "learner.batch_size 32 -> 64" in programs.output("refused")

    programs.start("hangup", "train", "--resume", "one")
    programs.status(lambda status: status.updates > before[1][-1] + 50)
    stop(programs, "hangup", signal.SIGHUP)
    steps, updates = steps_and_updates(folder)

    goal = steps[-1] + 2_000
    programs.start("again", "train", "--resume", "runs/one", "--max-steps", str(goal))
    assert programs.wait("again") == 0, programs.output("again")
    again = RunFolder.open(folder.path)
    assert again.end == EndReason("steps", float(goal))
    assert again.run_id == folder.run_id
    assert len(again.manifest["resumed"]) == 2
    all_steps, all_updates = steps_and_updates(again)
    assert len(all_steps) > len(steps) > len(before[0])
    assert len(all_updates) > len(updates) > len(before[1])
    assert all_steps == sorted(all_steps)  # The curves continue.
    assert all_updates == sorted(all_updates)
    assert all_steps[-1] >= goal
    assert all_updates[-1] > updates[-1] > before[1][-1] > 50
    replayed = [row["scalars"]["replay/num_inserted"] for row in read_curve(folder.curves / "replay.jsonl")]
    assert replayed == sorted(replayed)
    ratio = 32 * (all_updates[-1] - updates[-1]) / (all_steps[-1] - steps[-1])
    assert ratio < 1.5 * 8  # The learner makes no additional updates for the pause.
    assert (folder.logs / "replay.log").read_text().count("restored") == 2
    assert not list(memory_folder().glob(memory))


def kill_launcher(programs, name):
    """Kills a launcher whose learner is stopped. All programs must end."""
    assert len(running_in(programs.folder)) >= 6  # at least launcher, replay, coordinator, learner, loader and actor
    os.kill(learner_of(programs.folder), signal.SIGSTOP)
    programs.running[name].kill()
    until(lambda: not running_in(programs.folder), "end of all processes", seconds=30.0)


def test_the_memory_outlives_a_killed_run_and_the_start_of_another(programs):
    programs.start("train", "train", *CALM, *programs.offset, "--name", "one")
    programs.status(lambda status: status.updates > 10)
    kill_launcher(programs, "train")
    folder = RunFolder.open(programs.folder / "runs" / "one")
    assert store_path(folder.run_id).exists()
    steps, _ = steps_and_updates(folder)
    programs.start("again", "train", "--resume", "one", "--run.no-tensorboard")
    programs.status(lambda status: status.steps > steps[-1] + 1_000)
    for process in running_in(programs.folder):
        with suppress(ProcessLookupError):  # The process has ended with its parent.
            os.kill(process, signal.SIGKILL)
    until(lambda: not running_in(programs.folder), "end of all processes", seconds=60.0)
    assert "attached to /dev/shm" in (folder.logs / "replay.log").read_text()
    all_steps, _ = steps_and_updates(folder)
    assert all_steps == sorted(all_steps)
    assert store_path(folder.run_id).exists()
    programs.start("other", "train", *CALM, *UNSCORED, *programs.offset, "--name", "other", "--run.no-tensorboard")
    programs.status(lambda status: status.run == "other" and status.steps)
    found = Store(open_file(store_path(folder.run_id), folder.schema.table, writable=False))
    assert found.num_inserted >= all_steps[-1]  # Nothing that was acknowledged is lost.
    programs.start("status", "status", "--json")  # without --learner: of the newest live run in ./runs
    assert programs.wait("status") == 0, programs.output("status")
    assert json.loads(programs.output("status").splitlines()[-1])["run"] == "other"
    stop(programs, "other")
    folder.path.rename(programs.folder / "elsewhere")
    reclaim(store_path(1), 0)  # as the start of a run does
    assert not list(memory_folder().glob(f"apex-{folder.run_id:016x}*"))


def test_a_launcher_killed_during_the_start_leaves_no_process(programs):
    """Some programs already have a child that sends Hello."""
    programs.start("train", "train", *CALM, *programs.offset, "--name", "one", "--run.no-tensorboard")
    until(lambda: len(running_in(programs.folder)) >= 7, "the programs", seconds=DEADLINE)
    programs.running["train"].kill()
    assert programs.running["train"].wait(DEADLINE) == -signal.SIGKILL
    assert until(lambda: not running_in(programs.folder), "end of all processes", seconds=30.0)


def test_a_stuck_loader_and_a_stuck_actor_are_killed_and_restarted(programs):
    """The learner detects its stuck child, the loader. The launcher detects the stuck program, the actor."""
    options = ["--run.stuck-seconds", "20", "--run.no-tensorboard", "--name", "one", *UNSCORED]
    programs.start("train", "train", *CALM, *options, *programs.offset)
    status = programs.status(lambda status: status.updates > 50)
    learner = learner_of(programs.folder)
    os.kill(sorted(children_of(learner))[1], signal.SIGSTOP)  # The learner's first child is the coordinator.
    actor = next(row.pid for row in status.roles if row.role == "actor")
    os.kill(actor, signal.SIGSTOP)
    until(lambda: not {learner, actor} & set(running_in(programs.folder)), "the end of both", seconds=DEADLINE)
    steps = status.steps
    programs.status(lambda status: status.steps > steps + 500 and status.updates_per_second and status.updates > 50)
    logs = programs.folder / "runs" / "one" / "logs"
    assert re.search(r"actor had no heartbeat", (logs / "launcher.log").read_text())
    assert re.search(r"ERROR loader-0 .*heartbeat", (logs / "learner.log").read_text())
    stop(programs)


def test_a_killed_evaluator_evaluates_the_final_policy_again(programs):
    """An evaluator's games take seconds. Without a restart, the run would end without the final policy's score."""
    options = ["--run.no-tensorboard", "--name", "one", "--max-steps", "1000", "--evaluator.episodes", "60"]
    programs.start("train", "train", *CALM, *options, *programs.offset)
    until(lambda: PHASES["evaluating_final_policy"] in programs.output("train"), "end of training", seconds=DEADLINE)
    os.kill(member(programs, "evaluator").pid, signal.SIGKILL)
    assert programs.wait("train") == 0, programs.output("train")
    output = programs.output("train")
    assert "evaluator was ended" in output
    assert "the final policy" in output.rpartition("score: ")[2]


def member(programs, role):
    """The newest heartbeat of the program; waits until it has joined the run."""
    status = programs.status(lambda status: any(row.role == role for row in status.roles))
    return next(row for row in status.roles if row.role == role)


def test_a_run_survives_a_kill_of_each_program_and_the_loss_of_its_memory(programs):
    """Steps and updates grow after each fault. The run keeps its replay memory until the test removes the file."""
    options = ["--name", "one", "--run.no-tensorboard", "--run.crash-budget", "9"]
    programs.start("train", "train", *CALM, *programs.offset, *options)
    status = programs.status(lambda status: status.updates > 50)
    folder = RunFolder.open(programs.folder / "runs" / "one")
    for role in ("replay", "actor", "evaluator", "learner", "coordinator", "loader"):
        if role in ("replay", "actor", "evaluator"):
            pid = member(programs, role).pid
        else:
            # After the learner's end, its coordinator may still answer for a moment.
            learner = until(lambda: learner_of(programs.folder), "a learner with children")
            coordinator, loader, *_ = sorted(children_of(learner))
            pid = {"learner": learner, "coordinator": coordinator, "loader": loader}[role]
        os.kill(pid, signal.SIGKILL)
        assert is_owned(claim_path(store_path(folder.run_id)))  # No other run removes this memory.
        steps = status.steps
        status = programs.status(
            lambda status, steps=steps, pid=pid: (
                status.steps > steps + 500
                and status.updates_per_second
                and all(row.pid != pid or row.last_seen_seconds > 2 for row in status.roles)
            )
        )
    log = folder.logs / "replay.log"
    assert log.read_text().count("created ") == 1
    assert log.read_text().count("attached to ") == 1
    store_path(folder.run_id).unlink()  # as systemd-logind does at a logout, while the programs continue
    programs.status(lambda later: later.steps > status.steps + 500 and later.updates > status.updates + 50)
    restored = re.search(r"restored .*\(([0-9]+) inserted in total", log.read_text())
    assert restored is not None
    assert int(restored[1]) >= status.steps
    stop(programs)
    assert not claim_path(store_path(folder.run_id)).exists()


@pytest.mark.parametrize("batches", ["--transport.shared-memory", "--transport.no-shared-memory"])
def test_a_run_survives_a_kill_of_one_replay_shard(programs, batches):
    options = ["--replay.num-shards", "2", "--run.no-tensorboard", batches, *UNSCORED]
    programs.start("train", "train", *CALM, *options, *programs.offset, "--name", "one")
    status = programs.status(lambda status: status.updates > 50)
    folder = RunFolder.open(programs.folder / "runs" / "one")
    shards = [row for row in status.roles if row.role == "replay"]
    assert [row.shard for row in shards] == [0, 1]
    os.kill(shards[1].pid, signal.SIGKILL)
    steps, updates = status.steps, status.updates
    programs.status(
        lambda status: (
            status.steps > steps + 500
            and status.updates > updates + 50
            and any(row.pid != shards[1].pid and row.shard == 1 for row in status.roles)
        )
    )
    for shard in range(2):
        regions = open_file(store_path(folder.run_id, shard), folder.schema.table, writable=False)
        received = np.flatnonzero(regions.streams["incarnation"].any(axis=1))
        assert received.tolist() == [shard, 2 + shard]
        assert regions.cells[COMMIT] > 300
    assert [(folder.logs / f"replay-{shard}.log").read_text().count("created ") for shard in range(2)] == [1, 1]
    assert "attached to " in (folder.logs / "replay-1.log").read_text()
    stop(programs)
    steps, updates = steps_and_updates(folder)
    programs.start("again", "train", "--resume", "one", "--max-steps", str(steps[-1] + 1_000))
    assert programs.wait("again") == 0, programs.output("again")
    for shard in range(2):
        output = (folder.logs / f"replay-{shard}.log").read_text()
        # On a busy machine the last snapshot may be late: the memory then stays. Shard 1 was attached once before.
        assert "restored" in output or output.count("attached to ") > shard
    all_steps, all_updates = steps_and_updates(folder)
    assert all_steps == sorted(all_steps)
    assert all_updates[-1] > updates[-1]
    assert not list(memory_folder().glob(f"apex-{folder.run_id:016x}*"))


def learner_of(folder):
    """The process id of the learner itself, not of its children; None while it has less than two children."""
    for pid in running_in(folder):
        with suppress(FileNotFoundError):  # a process that ends
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").split(b" ")
            if b"apex.learner" in command and len(children_of(pid)) > 1:
                return pid
    return None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "--preset", "pnog"], ["pnog", "pong"]),
        (["train", "--actors", "-1"], ["actor.num_actors", "from 0 to 65536", "-1"]),
        (["train", "--env", "NoSuchEnv-v0"], ["NoSuchEnv-v0"]),
        (["train", "--env", "Pendulum-v1", "--algorithm", "dqn"], ["Pendulum-v1", "dqn", "continuous"]),
        (["train", "--replay.capactiy", "5"], ["replay.capactiy", "replay.capacity"]),
        (["train", "--transport.bind", "0.0.0.0"], ["0.0.0.0", "--transport.keys", "--insecure-no-auth"]),
        (["learner", "--device", "cuda"], ["cuda"]),
        (["learner", "--run-folder"], ["--run-folder"]),
        (["learner", "--run-folder", "nowhere"], ["nowhere", "not a run folder"]),
        (["actor", "--learner", "host:x"], ["--learner", "host:x"]),
        (["actor", "--processes", "-1"], ["--processes"]),
        (["evaluate", "nowhere"], ["nowhere"]),
        (["evlauate"], ["evaluate"]),
    ],
)
def test_a_mistake_is_named_and_ends_with_status_2(commands, tmp_path, arguments, parts):
    ended = commands.run(tmp_path, arguments)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 2, output
    assert "Traceback" not in output
    for part in parts:
        assert part in output
    assert not list((tmp_path / "runs").glob("*"))


def test_status_without_a_run_names_the_address(programs):
    programs.start("status", "status", *programs.learner, "--timeout", "0.3")
    assert programs.wait("status") == 75
    assert programs.endpoint in programs.output("status")


def test_a_taken_port_is_named_and_ends_the_program(programs, offset):
    programs.start("learner", "learner", *CALM, *programs.offset)
    programs.status(lambda status: True)
    port = 21001 + offset
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        programs.start("second", "learner", *CALM, *programs.offset)
        programs.start("replay", "replay", *programs.learner)
        assert (programs.wait("second"), programs.wait("replay")) == (2, 2)
    assert f"{port + 1002}" in programs.output("second")
    assert f"{port}" in programs.output("replay")
    assert "Traceback" not in programs.output("replay")
    stop(programs, "learner")
    for manifest in (programs.folder / "runs").glob("*/manifest.json"):
        run_id = json.loads(manifest.read_text())["run_id"]
        assert not list(memory_folder().glob(f"apex-{run_id:016x}*"))
