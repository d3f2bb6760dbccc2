"""A run on several machines of one's own, over ssh: what it takes, what it survives, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from support.machines import Machines, can_make_machines, has_sshd
from support.programs import CALM_FILE
from support.waiting import until

from apex.config import load_toml
from apex.runs.metrics.writer import read_curve

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not can_make_machines(), reason="needs root, network namespaces, iproute2 and util-linux"),
]
DOCUMENT = Path(__file__).parents[2] / "docs" / "own-machines.md"
NAMES = ("desk", "gpu1", "box2", "box3", "box4")
TINY = (
    "--preset cartpole --run.no-tensorboard --replay.min-size-to-sample 300 --learner.batch-size 32 "
    "--evaluator.episodes 3 --evaluator.num-envs 3 --evaluator.confirm-episodes 0 --evaluator.period-seconds 1 "
    "--env calm:Calm --replay.samples-per-insert 8 --replay.no-inserts-wait "  # It need not take every core.
    "--stop-score 501"  # More than CartPole gives: three lucky games would end the run before it is told to.
)
FILE = """
ssh = "{ssh}"
[learner]
host = "gpu1"
address = "{gpu1}"
[replay]
host = "box2"
address = "{box2}"
[evaluator]
host = "box2"
[[actor]]
host = "box3"
processes = 1
[[actor]]
host = "box4"
processes = 1
"""


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path, *NAMES)
    text = FILE.format(ssh=machines.ssh, **machines.addresses)
    (machines.home("desk") / "hosts.toml").write_text(text)
    for name in NAMES:
        (machines.home(name) / "calm.py").write_text(CALM_FILE)
    yield machines
    machines.close()


class Launcher:
    """`apex train --hosts` at the desk."""

    def __init__(self, machines, options):
        self.log = machines.folder / "launcher.log"
        self.process = machines.start("desk", f".venv/bin/apex train --hosts hosts.toml {options}", self.log)

    def said(self):
        return self.log.read_text()

    def wait(self, seconds=60.0):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"does not end:\n{self.said()}")

    def until(self, get, what):
        def look():
            found = get()
            if not found and self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before there was {what}:\n{self.said()}")
            return found

        return until(look, f"{what}:\n{self.said()}", seconds=100.0)


def updates(machines, name):
    with suppress(FileNotFoundError, IndexError):
        rows = read_curve(machines.home("gpu1") / "runs" / name / "curves" / "learner.jsonl")
        return rows[-1]["scalars"]["learner/updates"]
    return 0


def nothing_runs(machines):
    return not any(machines.processes(name) for name in NAMES[1:])


def secrets_in(machines):
    """Keys that lie on any machine."""
    return [path for path in machines.folder.rglob("*") if path.suffix in (".key_secret", ".job")]


def lose_a_connection_then_the_launcher(machines, begun):
    """A run takes back a host whose connection was lost, and leaves nothing when its launcher is killed."""
    run = Launcher(machines, f"{TINY} --name one")
    run.until(lambda: begun(machines), "beginning")
    config = load_toml(machines.home("gpu1") / "runs" / "one" / "config.toml")
    assert config.replay.host_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # box2's
    keys = {path.name: path.stat().st_mode & 0o777 for path in machines.home("box3").rglob("keys/*")}
    assert keys == {"actor.key_secret": 0o600, "learner.key": 0o600, "replay.key": 0o600}
    paths = [path for path in secrets_in(machines) if path.suffix == ".key_secret"]
    secrets = [line.split('"')[1] for path in paths for line in path.read_text().splitlines() if "secret-key" in line]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for name in NAMES for pid in machines.processes(name)]
    assert len(lines) > 20
    assert not any(secret.encode() in line for secret in secrets for line in lines)

    connections = set(machines.processes("desk", "BatchMode=yes", "box3"))
    (connection,) = connections - set(machines.processes("desk", "apex.launch.ssh.client"))
    before = set(machines.processes("box3", "apex.actor"))
    os.kill(connection, signal.SIGKILL)
    run.until(lambda: set(machines.processes("box3", "apex.actor")) - before, "actor on box3 again")
    assert not set(machines.processes("box3", "apex.actor")) & before
    assert "actor@box3 ended with status 75; it starts again in " in run.said()

    run.process.kill()
    run.process.wait()
    until(lambda: not any(machines.processes(name, "apex") for name in NAMES), "end of everything", seconds=60.0)


def test_a_run_takes_a_lost_host_back_leaves_nothing_when_killed_and_goes_on(machines):
    lose_a_connection_then_the_launcher(machines, begun=lambda machines: updates(machines, "one") > 10)
    done = updates(machines, "one")

    run = Launcher(machines, "--resume runs/one")
    run.until(lambda: updates(machines, "one") > done, "more training")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.said()
    assert nothing_runs(machines)
    assert not secrets_in(machines)
    said = run.said()
    assert "finished: interrupted" in said, said
    asked = [said.find(f"stopping {name}") for name in ("actor@box4", "evaluator@box2", "learner@gpu1")]
    assert -1 not in asked, said
    assert asked == sorted(asked)
    assert "box2 " in said
    assert "go on: ./run.sh --hosts hosts.toml --resume one" in said


@pytest.mark.skipif(not has_sshd(), reason="there is no sshd here: apt install openssh-server")
def test_over_a_real_ssh_too_a_lost_host_comes_back_and_nothing_stays(machines):
    machines.serve_ssh()
    programs = {"gpu1": "apex.learner", "box2": "apex.replay", "box3": "apex.actor", "box4": "apex.actor"}
    lose_a_connection_then_the_launcher(
        machines, begun=lambda machines: all(machines.processes(*program) for program in programs.items())
    )


def test_every_line_by_hand_is_as_the_document_says(machines):
    copier = machines.folder / "bin" / "scp"  # No ssh is needed for this; a machine's home is a folder here.
    copier.parent.mkdir()
    copier.write_text(f'#!/bin/sh\ntest "$1" = -rp && exec cp "$1" "$2" "{machines.folder}/$(echo "$3" | tr : /)"\n')
    copier.chmod(0o755)
    make, start, look = read_document("## By hand")
    for line, name in make:
        machines.run(name, f"PATH={copier.parent}:$PATH {line}")
    options = " --name one --replay.min-size-to-sample 300 --learner.batch-size 32"
    running = {}
    for line, name in start:
        role = line.split()[1]
        more = options if role == "learner" else ""
        running[name, role] = machines.start(name, line + more, machines.folder / f"{name}-{role}.log")
    (bundle, _), (status, _) = look
    machines.run("gpu1", bundle)

    def all_are_there():
        with suppress(subprocess.CalledProcessError):  # It says so when no learner answers.
            roles = json.loads(machines.run("gpu1", f"{status} --json").splitlines()[-1])["roles"]
            return sorted(row["role"] for row in roles) == ["actor", "actor", "evaluator", "replay"]

    until(all_are_there, "programs", seconds=100.0)
    machines.run("gpu1", status)
    until(lambda: updates(machines, "one") > 10, "training", seconds=100.0)
    running["gpu1", "learner"].send_signal(signal.SIGINT)  # Ctrl-C in the learner's shell ends the others too.
    assert {program: process.wait(60) for program, process in running.items()} == dict.fromkeys(running, 0)
    assert nothing_runs(machines)


def read_document(heading):
    """Its blocks of commands: lines, each with the machine that it is for."""
    text = DOCUMENT.read_text().partition(heading + "\n")[2]
    blocks = [block.partition("```")[0] for block in text.split("```bash\n")[1:]]
    return [[tuple(part.strip() for part in line.split("  # ")) for line in block.splitlines()] for block in blocks]


@pytest.mark.covers_programs
def test_a_host_that_refuses_ends_the_run_with_its_status_and_its_words(machines):
    run = Launcher(machines, f"{TINY} --learner.device cuda")
    assert run.wait() == 2
    assert (
        "the run ended with status 2: learner@gpu1 refused to run: apex: --device cuda, but there is no GPU"
        in run.said()
    )
    assert nothing_runs(machines)
    assert not secrets_in(machines)


def test_a_run_without_any_actor_host_left_ends_and_says_why(machines):
    broken = "#!/bin/sh\nif [ $1 = -c ]; then echo 1000000; else echo no libc here; exit 2; fi\n"  # once it is asked
    for name in ("box3", "box4"):
        (machines.home(name) / ".venv" / "bin" / "python").write_text(broken)
    run = Launcher(machines, TINY)
    assert run.wait() == 1
    last = run.said()[run.said().index("the run ended with status 1: ") :]
    assert "no actor host is left; going on without actor@box" in last
    assert "refused to run: no libc here; see runs/hosts/calm-" in last
    assert nothing_runs(machines)


def test_what_cannot_begin_names_each_machine_and_what_to_do(machines):
    (machines.home("gpu1") / ".venv" / "bin" / "apex").write_text("#!/bin/sh\necho apex 0.0.1\n")
    (machines.home("box2") / ".venv" / "bin" / "apex").unlink()
    machines.home("box3").rename(machines.folder / "box3" / "elsewhere")
    (machines.folder / "box4" / "pid").unlink()
    run = Launcher(machines, TINY)
    assert run.wait(20.0) == 2
    said = run.said()
    assert "gpu1 has apex 0.0.1 in apex-zeromq, here is apex" in said
    assert "box2 has no apex-zeromq/.venv/bin/apex: name its folder, or on box2 do: git clone" in said
    assert "box3 has no apex-zeromq: name its folder" in said
    assert "box4 cannot be reached (ssh: connect to host box4 port 22: No route to host): `" in said
    assert "ssh box4 true` must work without a question" in said
    assert nothing_runs(machines)
