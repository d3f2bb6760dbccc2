"""A cluster's instances, as EC2 lists them, each as a machine in namespaces with its address, groups and user data."""

from __future__ import annotations

import base64
import json
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import emulator
import yaml
from cloud_beyond import AWS, ENDPOINT, cloud
from namespaces import Machine, Switch, wait_until
from security_groups import METADATA, Passage, closed, opened, passages

INIT = Path(__file__).with_name("machine_init.py")
ACTORS_NICE = 10  # In AWS an actor host has cores of its own; here the learner has priority.
# environment that makes the hosts' programs use this AWS and this tree, beside their user data
ENVIRONMENT = {
    **emulator.environment(ENDPOINT),
    "NO_PROXY": "*",
    "HOME": "/var/lib/apex",  # The learner adds trusted modules there.
    "PYTHONPATH": ":".join(path for path in sys.path if Path(path).is_dir()),
}


class Host(Machine):
    """A machine that boots like an instance."""

    def __init__(self, instance: dict[str, Any], folder: Path, user_data: str, nice: int) -> None:
        """`folder` is created for the machine's files. `nice`: that of an actor host's programs."""
        self.id: str = instance["InstanceId"]
        self.role = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}["Role"]
        self.groups = {group["GroupId"] for group in instance["SecurityGroups"]}
        self.folder = folder
        self.let_through: set[Passage] = set()
        self._user_data = yaml.safe_load(user_data)
        for name in ("etc", "home", "log"):
            (folder / name).mkdir(parents=True)
        command = ["nice", "-n", str(nice if self.role == "actor" else 0), sys.executable, str(INIT), str(folder)]
        address = instance["PrivateIpAddress"]
        super().__init__(f"{self.role} {self.id}", address, command, folder / "log/init", ENVIRONMENT)

    def boot(self) -> None:
        """Processes the user data like cloud-init: writes files, and starts a unit."""
        for file in self._user_data["write_files"]:
            path = self.folder / "etc" / Path(file["path"]).relative_to("/etc/apex")
            path.write_text(file["content"])
            path.chmod(int(file["permissions"], 8))
        for command in self._user_data["runcmd"]:
            assert command[:4] == ["systemctl", "enable", "--now", "--no-block"], command
            for unit in command[4:]:
                self.start(unit)

    def start(self, unit: str) -> None:
        """Does the same as `systemctl start --no-block`."""
        self.send(f"start {unit}")

    def ended(self, unit: str, since: int = 0) -> list[str]:
        """Returns the exit statuses of a unit's program, in order. `since`: the number of lines to leave out."""
        return [line.split()[-1] for line in self.lines("log/ended")[since:] if line.startswith(f"{unit} ")]

    def end_cluster(self) -> None:
        """Ends the cluster, as systemctl does on request of a learner's host."""
        self.start("apex-end.service")
        wait_until(lambda: self.ended("apex-end.service"), "the end of the cluster")

    @property
    def is_up(self) -> bool:
        """Returns whether it has booted."""
        return (self.folder / "etc/cluster.env").exists()

    def lines(self, file: str) -> list[str]:
        """Returns the lines of a file, for example "log/ended"; none if it does not exist."""
        path = self.folder / file
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def logs(self) -> str:
        """Returns the end of each unit's log."""
        logs = sorted((self.folder / "log").iterdir())
        return "".join(f"\n-- {self.name}: {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


class NamespacedCluster:
    """The switch, the cloud beyond it, and the added hosts, which end with the context."""

    def __init__(self, name: str, endpoint: str, folder: Path) -> None:
        """`endpoint`: this process's AWS, with the cluster of this name applied."""
        self.name = name
        self.client = partial(emulator.client, endpoint=endpoint)
        self._ec2 = self.client("ec2")
        self._folder = folder
        self._stack = ExitStack()
        self._ids: dict[str, str] = {}  # hosts by address
        self.hosts: dict[str, Host] = {}  # hosts by id
        self.switch = Switch([AWS, METADATA], folder / "switch.log")
        self._stack.callback(self.switch.kill)
        self._stack.enter_context(cloud(self.switch, self._ids))

    def add_new(self, nice: int = ACTORS_NICE) -> list[Host]:
        """Makes a machine of every new instance, which does not boot yet."""
        own = {"tag:Cluster": self.name, "instance-state-name": "running"}  # Others may have hosts there.
        pages = self._ec2.describe_instances(Filters=[{"Name": name, "Values": [own[name]]} for name in own])
        instances = [instance for page in pages["Reservations"] for instance in page["Instances"]]
        new = [self._make(instance, nice) for instance in instances if instance["InstanceId"] not in self.hosts]
        self._open()
        return new

    def add_person(self, name: str, address: str) -> Machine:
        """Returns a machine outside the cluster."""
        machine = Machine(name, address, ["sleep", "infinity"], self._folder / "people.log")
        self._stack.callback(machine.kill)
        self.switch.plug(machine)
        return machine

    def of(self, role: str) -> list[Host]:
        """Returns the hosts of a role, by address."""
        return sorted((host for host in self.hosts.values() if host.role == role), key=lambda host: host.address)

    @property
    def learner(self) -> Host:
        """Returns the learner's host, of which there is one at a time."""
        (host,) = self.of("learner")
        return host

    def sizes(self) -> dict[str, int]:
        """Returns the desired number of hosts of each kind."""
        groups, prefix = self.client("autoscaling").describe_auto_scaling_groups(), f"apex-{self.name}-"
        sizes = {group["AutoScalingGroupName"]: group["DesiredCapacity"] for group in groups["AutoScalingGroups"]}
        return {name.removeprefix(prefix): size for name, size in sizes.items() if name.startswith(prefix)}

    def lose(self, host: Host) -> None:
        """Kills the host without a message; EC2 shows it as terminated."""
        self.switch.cut(host)
        host.kill()
        del self.hosts[host.id]
        self._ec2.terminate_instances(InstanceIds=[host.id])

    def boot(self, *new: Host) -> None:
        """Boots hosts, and updates the keys of the others, for which apex-keys.timer would need up to a minute."""
        for host in new:
            host.boot()
        ssm, paths = self.client("ssm"), [f"/apex/{self.name}/keys/{host.role}/{host.id}" for host in new]
        wait_until(lambda: not ssm.get_parameters(Names=paths)["InvalidParameters"], "the keys of hosts")
        for host in self.hosts.values():
            if host.is_up:
                host.start("apex-keys.service")

    def check_progress(self, host: Host, update: int = 0) -> str:
        """Checks the progress of a host as if there had been none since `update` for an hour; returns its health."""
        record = [update, int(time.monotonic()) - 3600]
        path = host.folder / "home/run/apex-stall/progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        unit, before = "apex-stall.service", len(host.lines("log/ended"))
        host.start(unit)
        wait_until(lambda: host.ended(unit, since=before), unit)
        found = self.client("autoscaling").describe_auto_scaling_instances(InstanceIds=[host.id])
        return str(found["AutoScalingInstances"][0]["HealthStatus"]).capitalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything; prints the logs, which pytest shows after a failure, and raises if a process remains."""
        print("".join(host.logs() for host in self.hosts.values()))
        with self._stack:
            for host in self.hosts.values():
                host.process.kill()  # Stop all of them first, then wait for each.
                self._stack.callback(host.kill)

    def _make(self, instance: dict[str, Any], nice: int) -> Host:
        identity = instance["InstanceId"]
        attribute = self._ec2.describe_instance_attribute(InstanceId=identity, Attribute="userData")
        user_data = base64.b64decode(attribute["UserData"]["Value"]).decode()
        host = Host(instance, self._folder / identity, user_data, nice)
        self.hosts[identity] = host
        self._ids[host.address] = identity
        self.switch.plug(host)
        host.ip(*closed())
        return host

    def _open(self) -> None:
        """Updates the machines' rules from their groups; new machines join their groups at once."""
        rules = self._ec2.describe_security_group_rules()["SecurityGroupRules"]
        members: dict[str, set[str]] = {}
        for host in self.hosts.values():
            for group in host.groups:
                members.setdefault(group, set()).add(host.address)
        for host in self.hosts.values():
            wanted = passages(rules, host.groups, members)
            lines = [line for passage in sorted(wanted - host.let_through) for line in opened(passage)]
            if lines:
                host.ip(*lines)
            host.let_through |= wanted
