"""A whole run: it trains, keeps its keys secret, executes no data, and believes no other user of the machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields
from support.listening import listening
from support.messages import HELLO, RESULT, make_heartbeat
from support.programs import CALM, running_in
from support.waiting import until
from zmq.utils import z85

from apex.launch.status import ask
from apex.runs.folder import RunFolder
from apex.transport.curve.command import new_folder
from apex.transport.curve.key_store import Keys
from apex.transport.messages.control import Goodbye, StatusRequest, decode_answer
from apex.transport.messages.results import ActorScores, Scores
from apex.transport.messages.run_status import RunStatus
from apex.transport.run_codec import RunCodec
from apex.types import Role
from apexreplay.transport.control_socket import ControlSocket
from apexreplay.transport.handshakes import NO_KEY, OTHER_SERVER, UNFINISHED
from apexreplay.transport.sockets import open_context

# Records every class that unpickling would create, and every import of a module that pickles. The interpreter executes
# it at the start of each program; forked children inherit it.
AUDIT = """
import os, sys
_file = os.open(os.environ["APEX_TEST_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def _note(*parts):
    os.write(_file, (" ".join(map(str, parts)) + chr(10)).encode())
def _hook(event, arguments):
    if event == "pickle.find_class":
        _note("found", *arguments)
    elif event == "import" and arguments[0].partition(".")[0] in ("cloudpickle", "dill", "joblib", "shelve"):
        _note("imported", arguments[0])
sys.addaudithook(_hook)
_note("started", *sys.orig_argv)
"""
LOADS = "import pickle; pickle.loads(pickle.dumps(ArithmeticError))"


@pytest.fixture
def audit(tmp_path, monkeypatch):
    """The file in which every Python program of the test records the code that data would execute."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "sitecustomize.py").write_text(AUDIT)
    path = os.pathsep.join([str(tmp_path / "audit"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("APEX_TEST_AUDIT", str(tmp_path / "audit" / "noted"))
    return tmp_path / "audit" / "noted"


def secrets(folder):
    """Every secret, in each encoding in which a file may contain it."""
    for role in Role:
        secret = Keys(folder, role).secret
        raw = z85.decode(secret)
        yield from (secret, raw, raw.hex().encode(), repr(raw)[2:-1].encode())


def arguments(folder):
    for pid in running_in(folder):
        yield Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def forge(endpoint, run, keys):
    """Sends an evaluation, a score and a goodbye that end the run, if the learner believes them."""
    result = replace_fields(RESULT, mean=2e6, confirmed=True)
    with open_context(keys) as context:
        client = ControlSocket(context, endpoint, decode_answer)
        client.send_frames(RunCodec(run.run_id, run.schema).encode_evaluation(result, None))
        client.send(make_heartbeat("actor", run_id=run.run_id, scores=Scores([ActorScores(3, 1, 2e6, 8)])), run.run_id)
        client.send(Goodbye(HELLO.session), run.run_id)
        client.send(StatusRequest())
        assert client.receive(1.0) is None


def test_a_run_trains_hides_its_secrets_and_believes_no_stranger(programs, audit):
    programs.start("train", "train", *CALM, *programs.offset, "--name", "one")
    observer = until(programs.observer, "keys", seconds=240.0)
    known = list(secrets(programs.folder / "runs" / "one" / "keys"))

    def training():
        assert programs.running["train"].poll() is None, programs.output("train")
        status = ask(programs.endpoint, 1.0, observer)
        everyone = {"replay", "actor", "evaluator"}
        return status and status.updates > 10 and {row.role for row in status.roles} == everyone

    until(training, "training with every program", seconds=240.0)
    new_folder(programs.folder / "old")
    for stranger in (None, Keys(programs.folder / "old", "evaluator")):
        forge(programs.endpoint, RunFolder.open(programs.folder / "runs" / "one"), stranger)
    refused = programs.status(lambda status: f"control: {OTHER_SERVER}" in status.refused_connections)
    assert {f"control: {NO_KEY}", f"control: {UNFINISHED}"} & set(refused.refused_connections)
    status = programs.status(lambda status: status.updates > refused.updates)
    assert status.end is None
    assert max(filter(None, (status.evaluator.best, status.actors.score)), default=0.0) < 2e6
    programs.start("status", "status", *programs.learner)  # It finds the keys by itself.
    assert programs.wait("status") == 0, programs.output("status")
    assert not any(secret in text for text in arguments(programs.folder) for secret in known)
    folder = RunFolder.open(programs.folder / "runs" / "one")
    tensorboard = folder.config.run.tensorboard_port
    until(
        lambda: any(port == tensorboard for _, port in listening(running_in(programs.folder))),
        "TensorBoard",
        seconds=240.0,
    )
    found = listening(running_in(programs.folder))
    assert {address for address, _ in found} == {"127.0.0.1"}
    ports = {port for _, port in found}
    (batches,) = [port for setting, port in folder.config.ports if setting == "transport.batches_port"]
    assert ports >= {port for _, port in folder.config.ports} - {batches} | {tensorboard}
    assert batches not in ports  # The loader draws from shared memory.

    with open_context(observer) as context:  # An observer may request the status, but not join.
        client = ControlSocket(context, programs.endpoint, decode_answer)
        client.send(HELLO)
        client.send(StatusRequest())
        assert isinstance(client.receive(10.0), RunStatus)

    programs.running["train"].send_signal(signal.SIGTERM)
    assert programs.wait("train") == 0, programs.output("train")
    written = [path for path in [*folder.path.rglob("*"), programs.folder / "train.log"] if path.is_file()]
    assert len(written) > 10
    assert [path for path in written for secret in known if secret in path.read_bytes()] == []

    noted = audit.read_text().splitlines()
    for program in ("replay", "learner", "actor", "evaluator"):
        assert any(line.startswith("started") and f"apex.{program}" in line for line in noted)
    assert any(line.startswith("started") and "tensorboard.main" in line for line in noted)
    assert [line for line in noted if not line.startswith("started")] == []
    subprocess.run([sys.executable, "-c", LOADS], check=True)  # The hook does record an unpickled class.
    assert audit.read_text().splitlines()[-1] == "found builtins ArithmeticError"
