"""Whole runs on this machine, whose programs `sh -c` replaces."""

import dataclasses
import json
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launches import cartpole, stand_in
from support.users import in_own_tmpfs, needs_root

from apex.command_line import parse_config
from apex.config import LearnerConfig, TransportConfig, load_toml
from apex.environments.factory import describe
from apex.facts import Ending, EndReason, ProgramEvent
from apex.launch.start import Start
from apex.launch.train import execute, main, show
from apex.runs.folder import RunFolder
from apex.sentences import describe_event, describe_failure
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import Keys
from apexreplay.errors import FINISHED, REFUSED, UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.store.location import claim_run, store_path

pytestmark = pytest.mark.programs


def run(config, *programs, stop=None, **options):
    """Runs these programs instead of the usual ones."""
    return execute(
        Start(config=config, argv=["x"], edit_programs=lambda usual: list(programs), **options), stop or Stop()
    )


MINE = """
from gymnasium.envs.classic_control import CartPoleEnv

class Broken(CartPoleEnv):
    def step(self, action):
        raise RuntimeError("boom")

def make(*arguments):
    raise RuntimeError("boom")
"""
FINISHES = stand_in("learner", "exit 0", ends_run=True)


def test_a_run_goes_from_its_folder_to_its_summary(tmp_path, capsys):
    config = cartpole(tmp_path)
    config = dataclasses.replace(config, learner=LearnerConfig(batch_size=0, bfloat16="auto", device="cpu"))
    outcome = run(config, stand_in("actor", "exec sleep 600"), FINISHES)
    assert outcome.ending == Ending(FINISHED, "learner")
    folder = RunFolder.open(tmp_path / "mine")
    assert load_toml(folder.config_file) == folder.config == outcome.config
    assert outcome.config.learner.batch_size >= 64  # chosen for this machine
    assert outcome.config.learner.bfloat16 in ("on", "off")
    assert show(outcome) == FINISHED
    output = capsys.readouterr().out
    assert "CartPole-v1, seed 1" in output
    assert output.count(f"run folder: {tmp_path / 'mine'}") == 2  # at the start and at the end
    event = describe_event(ProgramEvent("actor", "stopping"))
    assert event in output
    assert event in (folder.logs / "launcher.log").read_text()


def test_a_run_that_its_mirror_refuses_leaves_its_name_free(tmp_path):
    config = cartpole(tmp_path)
    (tmp_path / "file").touch()
    mirrored = dataclasses.replace(config, run=dataclasses.replace(config.run, mirror=str(tmp_path / "file/mirror")))
    with pytest.raises(UsageError, match="mirror"):
        run(mirrored, FINISHES)
    assert run(config, FINISHES).ending.status == FINISHED


def test_a_running_run_is_not_resumed_and_a_finished_one_is(tmp_path):
    refused = []

    def resume(usual):
        with pytest.raises(UsageError, match=r"mine.*running") as error:
            execute(Start(config=config, argv=[], folder=tmp_path / "mine"), Stop())
        refused.append(error)
        return [FINISHES]

    config = cartpole(tmp_path)
    outcome = execute(Start(config=config, argv=[], edit_programs=resume), Stop())
    assert len(refused) == 1
    assert "resumed" not in RunFolder.open(tmp_path / "mine").manifest
    again = run(outcome.config, FINISHES, folder=tmp_path / "mine")
    assert again.ending.status == FINISHED
    assert [start["argv"] for start in RunFolder.open(tmp_path / "mine").manifest["resumed"]] == [["x"]]


def test_a_repeated_command_of_a_run_at_its_limit_prints_the_score_only(tmp_path, capsys):
    options = ["--preset", "cartpole", "--max-updates", "40", "--run.folder", str(tmp_path), "--name", "mine"]
    config = parse_config(options, prog="apex train")
    folder = RunFolder.create(config, describe(config.environment, config.actor.n_step))
    folder.end = EndReason("updates", 40.0)
    row = {"time": time.time(), "steps": 90, "scalars": {"evaluator/score": 21.5, "evaluator/episodes": 10}}
    (folder.curves / "evaluator.jsonl").write_text(json.dumps(row) + "\n")
    assert main([*options, "--continue"]) == FINISHED
    *lines, score = capsys.readouterr().out.splitlines()
    assert score == "score: 21.5, mean of 10 games of the last evaluation; best: 21.5"
    assert any("reached 40 updates" in line for line in lines)
    assert not any(folder.logs.iterdir())  # Nothing was started.


def keys_seen(config, **options):
    """Starts a run; returns its outcome, and the learner's public key in the folders that its programs get."""
    seen = []

    def look(usual):
        commands = [program.command for program in usual if "--keys" in program.command]
        for folder in {Path(command[command.index("--keys") + 1]) for command in commands}:
            seen.append(Keys(folder, "learner").public)
            assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.iterdir()))
        return [FINISHES]

    return execute(Start(config=config, argv=[], edit_programs=look, **options), Stop()), seen


def test_each_start_makes_keys_and_removes_them_at_its_end(tmp_path):
    outcome, first = keys_seen(cartpole(tmp_path))
    keys = tmp_path / "mine" / "keys"
    assert not keys.exists()
    new_folder(keys)  # as a killed launcher leaves them
    left = Keys(keys, "learner").public
    again, second = keys_seen(outcome.config, folder=tmp_path / "mine")
    assert len({*first, left, *second}) == 3
    assert not keys.exists()
    assert again.config.transport.keys == RunFolder.open(tmp_path / "mine").config.transport.keys == ""


def start_two_shards(path):
    """In a tmpfs of 96 MB, of which a killed run has 50: each shard of 30 MB finds space, but not both."""
    subprocess.run(["mount", "-o", "remount,size=96m", "/dev/shm"], check=True)
    with claim_run(1, path):
        store_path(1).write_bytes(bytes(50_000_000))
    config = cartpole(path)
    replay = dataclasses.replace(config.replay, num_shards=2, max_bytes=60_000_000)
    assert run(dataclasses.replace(config, replay=replay), FINISHES).ending.status == FINISHED
    assert not store_path(1).exists()


@needs_root
def test_space_is_made_for_all_shards_before_they_start(tmp_path):
    assert in_own_tmpfs(start_two_shards, tmp_path) == ""


def test_configured_keys_are_used_and_kept(tmp_path):
    new_folder(tmp_path / "own")
    transport = TransportConfig(keys=str(tmp_path / "own"))
    _, seen = keys_seen(dataclasses.replace(cartpole(tmp_path), transport=transport))
    assert seen == [Keys(tmp_path / "own", "learner").public]
    assert not (tmp_path / "mine" / "keys").exists()


def test_no_keys_are_made_with_insecure_no_auth(tmp_path):
    transport = TransportConfig(insecure_no_auth=True)
    _, seen = keys_seen(dataclasses.replace(cartpole(tmp_path), transport=transport))
    assert seen == []


def test_keys_that_cannot_be_private_refuse_the_start(tmp_path, monkeypatch):
    """As on a disk without file modes."""
    monkeypatch.setattr("apex.launch.local.new_folder", lambda folder: (new_folder(folder), folder.chmod(0o777)))
    with pytest.raises(UsageError, match=r"mine/keys.*0777") as refused:
        run(cartpole(tmp_path), FINISHES)
    assert "--insecure-no-auth" in refused.value.remedy


def test_a_run_ends_with_the_status_of_the_program_that_refused(tmp_path, capsys):
    outcome = run(cartpole(tmp_path), stand_in("learner", "echo starting; echo 'no GPU here'; exit 2", ends_run=True))
    assert show(outcome) == REFUSED
    assert (outcome.ending.failure.kind, outcome.ending.failure.detail) == ("refused", "no GPU here")
    assert describe_failure(outcome.ending.failure) in capsys.readouterr().err
    assert RunFolder.open(outcome.folder).end == EndReason("failed")


def test_a_run_that_is_stopped_before_it_begins_leaves_no_folder(tmp_path):
    stop = Stop()
    stop.request()
    assert run(cartpole(tmp_path / "runs"), stop=stop) is None
    assert show(None) == FINISHED
    assert not (tmp_path / "runs").exists()


def test_a_taken_port_moves_the_run(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = TransportConfig(experience_port=listener.getsockname()[1])
        outcome = run(dataclasses.replace(cartpole(tmp_path), transport=taken), FINISHES)
    assert outcome.config.transport.port_offset > 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--preset", "nosuch"], "nosuch"),
        (["--actors", "-1"], "actor.num_actors"),
        (["--replay.capactiy", "7"], "capactiy"),
        (["--env", "NoSuchEnv-v0"], "NoSuchEnv-v0"),
        (["--env", "mine:Broken"], "(mine.py, line 6)"),
        (["--preset", "cartpole", "--max-steps", "999"], "run.max_steps"),
        (["--preset", "cartpole", "--max-steps", "999", "--single-process"], "replay.min_size_to_sample"),
        (["--preset", "cartpole", "--network", "nope:Net"], "'nope:Net'"),
        (["--preset", "cartpole", "--network", "mine:make"], "(mine.py, line 9)"),
        (["--preset", "cartpole", "--network", "mine:make", "--single-process"], "(mine.py, line 9)"),
        (["--preset", "cartpole", "--algorithm", "mine:make"], "(mine.py, line 9)"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_names_it(arguments, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("mine.py").write_text(MINE)
    assert main([*arguments, "--device", "cpu"]) == REFUSED
    assert not Path("runs").exists()
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex train: ")
    assert name in errors[0]
