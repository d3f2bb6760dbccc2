"""A run whose actors are on other hosts: they know the learner's host name and wait for its runs."""

import json
import subprocess
from contextlib import suppress

import pytest
from support.machines import Machines, can_make_machines
from support.programs import CALM_FILE
from support.waiting import until

from apexreplay.errors import NEIGHBOUR_GONE

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_machines(), reason="needs root, network namespaces, iproute2 and util-linux"),
]
NAMES = ("desk", "gpu1", "gpu2", "box3")
HEAD = (
    "--head --preset cartpole --actors 4 --env calm:Calm --run.no-tensorboard --replay.min-size-to-sample 300 "
    "--learner.batch-size 32 --replay.samples-per-insert 8 --replay.no-inserts-wait --evaluator.episodes 3 "
    "--evaluator.num-envs 3 --evaluator.final-seconds 0 --max-updates 30 --transport.keys ../../keys"
)


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path, *NAMES)
    for name in NAMES:
        (machines.home(name) / "calm.py").write_text(CALM_FILE)
    yield machines
    machines.close()


def test_an_actor_host_follows_a_name_to_new_runs_and_hosts(machines):
    """DNS has the learner's address. Each new connection looks up the name again."""
    hosts = machines.folder / "hosts"
    machines.run("desk", ".venv/bin/apex keys new ../../keys")
    machines.run("desk", ".venv/bin/apex keys bundle ../../keys --role actor ../../actor-keys")
    hosts.write_text(f"127.0.0.1 localhost\n{machines.addresses['gpu1']} learner.lab.test\n")
    machines.run("box3", f"mount --bind {hosts} /etc/hosts")
    join = ".venv/bin/apex actor --learner learner.lab.test --keys ../../actor-keys --processes 1 --envs 4"
    actor = machines.start("box3", f"{join} --wait-for-runs", machines.folder / "actor.log")
    any_address = "0.0.0.0 --transport.advertise learner.lab.test"
    for host, bind in (("gpu1", machines.addresses["gpu1"]), ("gpu1", any_address), ("gpu2", any_address)):
        hosts.write_text(f"127.0.0.1 localhost\n{machines.addresses[host]} learner.lab.test\n")
        command = f".venv/bin/apex train {HEAD} --transport.bind {bind}"
        head = machines.start(host, command, machines.folder / "head")
        assert head.wait(240) == 0, (machines.folder / "head").read_text()
        output = (machines.folder / "head").read_text()
        assert "reached 30 updates" in output, output
        assert "actors: 4, " in output
        assert not machines.processes(host, "apex.actor")
        assert actor.poll() is None, (machines.folder / "actor.log").read_text()
    actor.terminate()
    assert actor.wait(20) == NEIGHBOUR_GONE


def test_actors_follow_a_replay_server_that_is_known_by_name(machines):
    hosts = machines.folder / "hosts"
    hosts.write_text(f"{machines.addresses['gpu2']} replay-a.test\n{machines.addresses['box3']} replay-b.test\n")
    for name in NAMES:
        machines.run(name, f"mount --bind {hosts} /etc/hosts")
    for role in ("learner", "replay", "actor", "observer"):
        make = "new ../../keys" if role == "learner" else f"bundle ../../keys --role {role} ../../{role}-keys"
        machines.run("desk", f".venv/bin/apex keys {make}")
    learner = machines.addresses["gpu1"]
    options = (
        HEAD.replace("--head", "")
        .replace("--max-updates 30", "")
        .replace("--replay.samples", "--name x --replay.samples")
    )
    machines.start(
        "gpu1", f".venv/bin/apex learner {options} --transport.bind {learner}", machines.folder / "learner.log"
    )
    join = f".venv/bin/apex actor --learner {learner} --keys ../../actor-keys --processes 1 --envs 4"
    actor = machines.start("desk", join, machines.folder / "actor.log")

    def inserts(count):
        def look():
            with suppress(subprocess.CalledProcessError):
                asked = machines.run(
                    "desk", f".venv/bin/apex status --learner {learner} --keys ../../observer-keys --json"
                )
                status = json.loads(asked.splitlines()[-1])
                return status["steps"] > count and status["updates"]

        return look

    def serve(host, name):
        address = machines.addresses[host]
        arguments = f"--learner {learner} --bind {address} --advertise {name} --keys ../../replay-keys"
        return machines.start(host, f".venv/bin/apex replay {arguments}", machines.folder / f"{name}.log")

    replay = serve("gpu2", "replay-a.test")
    done = until(inserts(300), "training", seconds=240.0)
    replay.kill()
    serve("box3", "replay-b.test")
    until(
        lambda: "a replay server has moved: joining again" in (machines.folder / "actor.log").read_text(),
        "news",
        seconds=240.0,
    )
    until(lambda: (inserts(300)() or 0) > done, "more training", seconds=240.0)
    assert actor.poll() is None
