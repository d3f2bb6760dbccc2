"""Programs that read a hostile file, or join a hostile learner, run no command of theirs. Ports of three attacks."""

import subprocess
import sys
import time

import pytest
import zmq
from support.builders import VECTORS
from support.hostile import HostileRun, plant

from apex.config import to_dict
from apex.transport.messages.control import WelcomeAnswer
from apexreplay.types import Stream
from apexreplay.wire.json_codec import encode_control

COMMANDS = ("evaluate", "watch", "report", "export", "plot", "train --resume", "evaluate a model")
ENDS = {role: f"tcp://127.0.0.1:{9 + i}" for i, role in enumerate(("experience", "priorities", "receipts"))}


def command_of(name, run):
    """The command line for the run folder, or for the exported model."""
    more = {"watch": ["--out", "game.gif"], "plot": ["--out", "a.png"], "export": ["--episodes", "1"]}.get(name, [])
    path = run.model if name.endswith("model") else run.path
    return [sys.executable, "-m", "apex", *name.removesuffix(" a model").split(), str(path), *more]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_program_runs_no_command_of_a_file(name, tmp_path):
    touch = {"args": ["sh", "-c", f"touch {tmp_path}/ran"]}
    run = HostileRun(tmp_path, "environment.id", "subprocess:check_output", touch)
    command = command_of(name, run)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not (tmp_path / "ran").exists()
    assert name == "plot" or "--allow subprocess" in ended.stderr, ended.stderr
    assert ended.returncode == (0 if name == "report" else 2), ended.stderr  # The page has no video.


def test_a_report_imports_nothing_from_the_current_folder(tmp_path):
    run = HostileRun(tmp_path, "environment.id", "CartPole-v1", {})
    plant(tmp_path)
    (tmp_path / "canary.py").rename(tmp_path / "numpy.py")
    command = [sys.executable, "-P", "-m", "apex", "report", str(run.path)]  # as the command `apex report` does
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert not (tmp_path / "imported").exists()
    assert b"<video" in (run.path / "report.html").read_bytes(), ended.stderr


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_a_program_without_keys_runs_no_command_of_a_learner(role, tmp_path):
    touch = {"args": ["sh", "-c", f"touch {tmp_path}/ran"]}
    config = HostileRun(tmp_path, "environment.id", "subprocess:check_output", touch).config
    answer = WelcomeAnswer(
        run_id=7,
        config=to_dict(config),
        schema=VECTORS,
        num_parameters=4,
        num_actors=8,
        memory="",
        replay=[ENDS],
        absent="",
        table={},
        parameters=[],
        streams=[Stream(7, 1)] if role == "actor" else [],
    )
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, "-m", "apex", role, "--learner", f"127.0.0.1:{port}"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as program:
            until = time.monotonic() + 100
            while program.poll() is None and time.monotonic() < until:
                if router.poll(100):
                    identity, *_ = router.recv_multipart()
                    router.send_multipart([identity, *encode_control(answer, 7)])
            program.kill()
            said = program.stderr.read()
    assert not (tmp_path / "ran").exists()
    assert program.returncode == 2, said
    assert "--allow subprocess" in said
