"""The file that names the machines of a run, how actors are shared among them, and what they answer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from apex.errors import ConfigError
from apex.launch.local import main
from apex.launch.monitor import WAIT
from apex.launch.ssh.hosts_file import HostEntry, divide, read_hosts
from apex.launch.ssh.launcher import HostLogs
from apex.launch.ssh.preflight import QUESTION, ask_hosts
from apex.runtime.lifecycle import REFUSED
from apex.version import VERSION

WHOLE = """
folder = "~/work/apex"
ssh = "ssh -F 'my config'"
[learner]
host = "ada@gpu1"
address = "10.0.0.1"
[replay]
host = "box2"
address = "10.0.0.2"
folder = "/opt/apex"
[[actor]]
host = "ssh://ada@box3:2222"
processes = 4
[[actor]]
host = "box4"
"""


def read(folder, text):
    path = folder / "hosts.toml"
    path.write_text(text)
    return read_hosts(path)


def test_says_who_runs_where(tmp_path):
    hosts = read(tmp_path, WHOLE)
    assert hosts.ssh == ("ssh", "-F", "my config")
    assert hosts.learner == HostEntry("learner", "ada@gpu1", "work/apex", "10.0.0.1")
    assert hosts.replay == HostEntry("replay", "box2", "/opt/apex", "10.0.0.2")
    assert hosts.evaluator is None
    assert [actor.processes for actor in hosts.actors] == [4, 0]
    assert [place.name for place in hosts.places] == ["replay@box2", "learner@gpu1", "actor@box3-2222", "actor@box4"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('host = "box4"', 'host = "box4"\nprocesses = 0', "actor: processes must be a whole number >= 1, got 0"),
        ('host = "box4"', 'host = "box4"\nprocesses = true', "processes must be a whole number >= 1, got True"),
        ('host = "box4"', 'host = "ssh://eve@box3:2222"', "actor@box3-2222 is there twice"),
        ('host = "box4"', 'host = "box4"\ncores = 3', "actor: unknown 'cores'; known: folder, host, processes"),
        ('host = "box4"', 'host = "-oProxyCommand=x"', "host must be what follows the word ssh, .* got '-oProxy"),
        ('host = "box4"', 'host = "box4; rm x"', "host must be what follows"),
        ('host = "box4"', "", "host must be what follows the word ssh, as in ada@box3, got None"),
        ('host = "box4"', "host = 4", "got 4"),
        ('address = "10.0.0.2"', "", "replay: address must be an IPv4 address of box2"),
        ('address = "10.0.0.2"', 'address = "box2"', "that the others reach, got 'box2'"),
        ('address = "10.0.0.2"', 'address = "0.0.0.0"', "0.0.0.0 is no host's"),
        ("[learner]", "[lerner]", "unknown 'lerner'; known: ssh, folder, learner, replay, evaluator, actor"),
        ("[[actor]]", "[[evaluator]]", r"has no \[\[actor\]\]"),
        ("[replay]", "[evaluator]", r"has no \[replay\]: it needs host"),
        ("[replay]", "[replay", "--hosts: cannot read the configuration .*own-machines.md shows one"),
        ('folder = "~/work/apex"', "folder = 3", "folder must be a path on ada@gpu1, got 3"),
        ("ssh = \"ssh -F 'my config'\"", 'ssh = ""', "ssh must be a command, got ''"),
        ("ssh = \"ssh -F 'my config'\"", 'ssh = "ssh \'x"', 'ssh must be a command, got "ssh \'x"'),
    ],
)
def test_refuses_what_it_does_not_understand_and_says_where(tmp_path, old, new, words):
    assert old in WHOLE
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, WHOLE.replace(old, new))


def test_the_documents_own_file_is_read(tmp_path):
    text = (Path(__file__).parents[4] / "docs" / "own-machines.md").read_text()
    hosts = read(tmp_path, text.partition("```toml\n")[2].partition("```")[0])
    assert [place.name for place in hosts.places] == [
        "replay@box2",
        "learner@gpu1",
        "evaluator@box2",
        "actor@box3",
        "actor@box4",
    ]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "none.toml"))):
        read_hosts(tmp_path / "none.toml")


@pytest.mark.parametrize("cores", [[1], [4, 4], [1, 2, 16], [2] * 16, [64, 1, 1]])
@pytest.mark.parametrize("num_actors", [16, 17, 80, 360, 1000])
def test_each_host_gets_its_share_by_its_cores_and_together_they_take_all(num_actors, cores):
    shares = divide(num_actors, cores)
    streams = [processes * envs for processes, envs in shares]
    assert all(processes <= own for (processes, _), own in zip(shares, cores, strict=True))
    assert min(streams) >= 1
    assert sum(streams) >= num_actors > sum(streams[:-1])
    for share, own in zip(streams, cores, strict=True):
        fair = num_actors * own / sum(cores)
        assert share <= fair + own + 1  # One process's worth more, as all of a host's have as many.


def test_too_few_actors_are_refused():
    with pytest.raises(ConfigError, match="--actors 2 cannot be shared among 3 actor hosts: raise it, or name fewer"):
        divide(2, [1, 1, 1])


def answer_by(folder, script):
    """Hosts whose ssh is a script that is asked about the machine in $1."""
    path = folder / "ssh"
    path.write_text(f'#!/bin/sh\nwhile [ "$#" -gt 2 ]; do shift; done\n{script}\n')
    path.chmod(0o755)
    text = WHOLE.replace("ssh -F 'my config'", str(path))
    return read(folder, text)


def test_machines_are_asked_once_each_and_answer_with_what_they_have(tmp_path):
    hosts = answer_by(
        tmp_path, f'echo "$1" >> {tmp_path}/asked; printf "Hello\\napex {VERSION}\\n6\\n64000\\nthere\\n"'
    )
    facts = ask_hosts(hosts, "runs/one")
    assert {tuple(fact) for fact in facts.values()} == {(6, 64000, True)}
    assert list(facts) == hosts.places
    assert sorted((tmp_path / "asked").read_text().split()) == ["ada@gpu1", "box2", "box4", "ssh://ada@box3:2222"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo Permission denied >&2; exit 255",
            r"box4 cannot be reached \(Permission denied\): `.*ssh box4 true` must",
        ),
        ("exit 3", "box4 has no work/apex: name its folder, or on box4 do: git clone"),
        ("exit 4", "box4 has no work/apex/.venv/bin/apex: name its folder, or on box4 do"),
        (
            "echo apex 0.0.9; echo 4; echo 64000; echo new",
            f"box4 has apex 0.0.9 in work/apex, here is apex {VERSION}: bring both",
        ),
        ("echo 'No module named apex' >&2; exit 1", r"box4 cannot run work/apex/.venv/bin/apex \(status 1: No module"),
        (f"echo apex {VERSION}; echo 4; echo much; echo new", r"box4 cannot run .* \(status 0: nothing\)"),
        ("echo Welcome to box4; exit 0", r"box4 cannot run .* \(status 0: nothing\)"),
    ],
)
def test_a_machine_that_cannot_take_part_is_named_with_the_remedy(tmp_path, script, words):
    well = f'printf "apex {VERSION}\\n6\\n64000\\nnew\\n"'
    hosts = answer_by(tmp_path, f'if [ "$1" = box4 ]; then {script}; else {well}; fi')
    with pytest.raises(ConfigError, match=words):
        ask_hosts(hosts, "runs/one")


def test_all_machines_that_cannot_take_part_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)these machines cannot take part:\n  .*box2.*\n  .*gpu1.*\n  .*box3"):
        ask_hosts(answer_by(tmp_path, "exit 3"), "runs/one")


@pytest.mark.parametrize(("fails", "status"), [("", 0), ("apex", 7), ("python", 7)])
def test_the_question_is_answered_by_a_real_shell_and_what_fails_there_is_its_status(tmp_path, fails, status):
    for name, answer in (("apex", f"apex {VERSION}"), ("python", "64000")):
        path = tmp_path / ".venv" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n" + ("exit 7\n" if name == fails else f"echo {answer}\n"))
        path.chmod(0o755)
    question = QUESTION.format(folder=tmp_path, run="runs/one")
    told = subprocess.run(["sh", "-c", question], capture_output=True, text=True, timeout=20)
    assert told.returncode == status
    if not fails:
        version, cores, memory, run = told.stdout.splitlines()
        assert (version, int(cores) >= 1, memory, run) == (f"apex {VERSION}", True, "64000", "new")


def test_an_ssh_that_is_not_there_is_named(tmp_path):
    hosts = read(tmp_path, WHOLE.replace("ssh -F 'my config'", "no-such-ssh"))
    with pytest.raises(
        ConfigError, match="cannot run 'no-such-ssh' here: No such file or directory; install it, or set"
    ):
        ask_hosts(hosts, "runs/one")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts"], "argument --hosts: expected one argument"),
        (["--hosts", "none.toml"], "--hosts: cannot read the configuration none.toml"),
        (["--hosts=hosts.toml", "--transport.keys", "k"], "transport.keys cannot be set with --hosts: leave it out"),
        (["--hosts", "hosts.toml", "--insecure-no-auth"], "transport.insecure_no_auth cannot be set with --hosts"),
        (["--hosts", "hosts.toml", "--single-process"], "run.single_process cannot be set with --hosts"),
        (["--hosts", "hosts.toml", "--actors", "1"], "--actors 1 cannot be shared among 2 actor hosts"),
        (["--hosts", "hosts.toml", "--actor", "1"], "unknown option --actor"),
        (
            ["--hosts", "hosts.toml", "--name", "one"],
            "--name one: ada@gpu1 has such a run already; take another name, or",
        ),
        (
            ["--hosts", "hosts.toml", "--resume", "one"],
            "--resume one: no such run was begun from here, as runs/hosts/one",
        ),
        (
            ["--hosts", "hosts.toml", "--resume", "one", "--actors", "3"],
            "goes on as the run was begun: leave out --actors 3",
        ),
    ],
)
def test_what_is_typed_beside_is_refused_before_anything_starts(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    answer_by(tmp_path, f'printf "apex {VERSION}\\n6\\n64000\\nthere\\n"')
    assert main(["--preset", "cartpole", *options] if "--resume" not in options else options) == REFUSED
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("everything", [True, False])
def test_lines_of_the_logs_have_their_hosts_name_and_a_wait_is_still_known_as_one(tmp_path, everything):
    logs = HostLogs(tmp_path, everything=everything)
    lines = ["12:00:01 actor INFO actors 0 to 7", "12:00:02 actor WARNING actor waits for a free actor id (10 s)"]
    (tmp_path / "actor@box3.log").write_text("\n".join([*lines, "half of a li"]))
    (tmp_path / "launcher.log").write_text("12:00:03 launcher WARNING what is shown anyway\n")
    found = logs.warnings()
    assert found == [f"box3 {line}" for line in lines if everything or "WARNING" in line]
    assert WAIT.fullmatch(found[-1])["wait"] == "actor waits for a free actor id"
    assert logs.warnings() == []
