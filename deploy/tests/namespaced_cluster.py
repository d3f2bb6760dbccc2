"""A cluster's instances, as EC2 lists them, each as a machine in namespaces: its address, its groups, its user data."""

from __future__ import annotations

import base64
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import emulator
import yaml
from cloud_beyond import AWS, ENDPOINT, cloud
from namespaces import Machine, Switch
from security_groups import METADATA, Passage, closed, opened, passages

INIT = Path(__file__).with_name("machine_init.py")
ACTORS_NICE = 10  # an actor host has cores of its own; here the learner goes before it
# What the hosts' programs need beside their user data to believe in this AWS, and to be of this tree.
ENVIRONMENT = {
    **emulator.environment(ENDPOINT),
    "NO_PROXY": "*",
    "PYTHONPATH": ":".join(path for path in sys.path if Path(path).is_dir()),
}


class Host(Machine):
    """A machine that boots as an instance does."""

    def __init__(self, instance: dict[str, Any], folder: Path, user_data: str, nice: int) -> None:
        """`folder` is made; what the machine leaves is there. `nice` is an actor host's."""
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
        """Does what cloud-init does with the user data: writes files, and starts a unit."""
        for file in self._user_data["write_files"]:
            path = self.folder / "etc" / Path(file["path"]).relative_to("/etc/apex")
            path.write_text(file["content"])
            path.chmod(int(file["permissions"], 8))
        for command in self._user_data["runcmd"]:
            assert command[:4] == ["systemctl", "enable", "--now", "--no-block"], command
            for unit in command[4:]:
                self.start(unit)

    def start(self, unit: str) -> None:
        """`systemctl start --no-block`."""
        self.tell(f"start {unit}")

    def ended(self, unit: str) -> list[str]:
        """The exit statuses of a unit's program, as often as it has ended."""
        path = self.folder / "log/ended"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[-1] for line in lines if line.startswith(f"{unit} ")]

    @property
    def is_up(self) -> bool:
        """Whether it has booted."""
        return (self.folder / "etc/cluster.env").exists()

    def log_of(self, unit: str) -> str:
        """All that a unit has logged."""
        path = self.folder / "log" / unit
        return path.read_text(errors="replace") if path.exists() else ""

    def asked_of_systemd(self) -> list[str]:
        """What the units' own scripts have said to systemctl."""
        path = self.folder / "home/systemctl"
        return path.read_text().splitlines() if path.exists() else []

    def said(self) -> str:
        """The end of what each unit has logged."""
        logs = sorted((self.folder / "log").iterdir())
        return "".join(f"\n-- {self.name}: {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


class NamespacedCluster:
    """The switch, the cloud beyond it, and the hosts that were added. To be closed by `close`, whatever happens."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        """`endpoint` is this process's AWS, with the cluster applied."""
        self._ec2 = emulator.client("ec2", endpoint)
        self._folder = folder
        self._stack = ExitStack()
        self._ids: dict[str, str] = {}  # by address
        self.hosts: dict[str, Host] = {}  # by id
        self.switch = Switch([AWS, METADATA], folder / "switch.log")
        self._stack.callback(self.switch.kill)
        self._stack.enter_context(cloud(self.switch, self._ids))

    def add_new(self, nice: int = ACTORS_NICE) -> list[Host]:
        """Makes a machine of every instance that is new; not one of them boots yet."""
        pages = self._ec2.describe_instances(Filters=[{"Name": "instance-state-name", "Values": ["running"]}])
        instances = [instance for page in pages["Reservations"] for instance in page["Instances"]]
        new = [self._make(instance, nice) for instance in instances if instance["InstanceId"] not in self.hosts]
        self._open()
        return new

    def add_person(self, name: str, address: str) -> Machine:
        """A machine of somebody's, beyond the cluster."""
        machine = Machine(name, address, ["sleep", "infinity"], self._folder / "people.log")
        self._stack.callback(machine.kill)
        self.switch.plug(machine)
        return machine

    def of(self, role: str) -> list[Host]:
        """The hosts of a role, by address."""
        return sorted((host for host in self.hosts.values() if host.role == role), key=lambda host: host.address)

    def lose(self, host: Host) -> None:
        """The host dies without a word, and EC2 knows."""
        self.switch.cut(host)
        host.kill()
        del self.hosts[host.id]
        self._ec2.terminate_instances(InstanceIds=[host.id])

    def close(self) -> None:
        """Ends everything; raises if a process is left."""
        with self._stack:
            for host in self.hosts.values():
                host.process.kill()  # All at once, and then each is waited for.
                self._stack.callback(host.kill)

    def said(self) -> str:
        """For whoever must find out what went wrong."""
        return "".join(host.said() for host in self.hosts.values())

    def _make(self, instance: dict[str, Any], nice: int) -> Host:
        identity = instance["InstanceId"]
        told = self._ec2.describe_instance_attribute(InstanceId=identity, Attribute="userData")["UserData"]["Value"]
        host = Host(instance, self._folder / identity, base64.b64decode(told).decode(), nice)
        self.hosts[identity] = host
        self._ids[host.address] = identity
        self.switch.plug(host)
        host.ip(*closed())
        return host

    def _open(self) -> None:
        """Brings the machines' rules up to those of their groups; who is new belongs to them at once."""
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
