"""A Slurm cluster on this host: slurmctld and three slurmd, each on a machine in namespaces.

APEX_SLURM names a folder with Debian's unpacked packages, if they are not installed: installing them starts services.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import namespaces
from namespaces import Machine, Switch, wait_until

ROOT = Path(__file__).parents[2]
UNPACKED = os.environ.get("APEX_SLURM", "")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SYSTEM_PATH = f"{os.environ['PATH']}:/usr/sbin"
ADDRESSES = {"control": "10.77.0.1", "node1": "10.77.0.2", "node2": "10.77.0.3", "node3": "10.77.0.4"}
DAEMONS = {name: f"slurmd -D -N {name}" for name in ADDRESSES} | {"control": "slurmctld -Di"}
SETTINGS = """
ClusterName=test
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ReturnToService=2
# A requeued job may start again after a second more than this; default: 120.
AuthInfo=cred_expire=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
NodeName=node[1-3] CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
BOOT = """
hostname {name}
mount --bind {folder}/hosts /etc/hosts
for place in /run /dev/shm; do mount -t tmpfs none $place; done
{unpacked}
mkdir /run/munge
munged --force --key-file={folder}/munge.key --log-file=/run/munge/log --seed-file=/run/munge/seed
{daemon}
"""


class Job(NamedTuple):
    """What Slurm shows of a job."""

    state: str
    node: str  # "": none yet


class SlurmCluster:
    """The cluster; its machines and their programs end with the context, or with the tests' process."""

    def __init__(self, folder: Path) -> None:
        """Returns when all nodes are idle."""
        self.folder, self.shared, self.machines = folder, folder / "shared", dict[str, Machine]()
        self._environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{sys.prefix}/bin:{SYSTEM_PATH}",
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        self.shared.mkdir()
        names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        with ExitStack() as stack:
            self._switch = Switch([], folder / "switch.log")
            stack.callback(self._switch.kill)
            stack.callback(lambda: [machine.kill() for machine in self.machines.values()])
            for name in ADDRESSES:
                self.boot(name)
            wait_until(lambda: self.run("sinfo --noheader --format='%T %D' || true") == "idle 3\n", "three nodes")
            self._stack = stack.pop_all()

    def boot(self, name: str) -> None:
        """Starts a machine."""
        unpacked = f"mount -t overlay -o lowerdir={UNPACKED}/usr:/usr none /usr" if UNPACKED else ""
        script = BOOT.format(name=name, folder=self.folder, unpacked=unpacked, daemon=DAEMONS[name])
        command = ["unshare", "--uts", "sh", "-euc", script]
        machine = Machine(name, ADDRESSES[name], command, self.folder / f"{name}.log", self._environment)
        self.machines[name] = machine
        self._switch.plug(machine)

    def lose(self, node: str) -> None:
        """Kills a node, and marks it as down, as Slurm itself does after SlurmdTimeout, 300 s."""
        self.machines.pop(node).kill()
        self.run(f"scontrol update nodename={node} state=down reason=lost")

    def run(self, command: str) -> str:
        """Runs a user's command in the shared folder; returns its output."""
        spaces = f"/proc/{self.machines['control'].pid}/ns"
        enter = ["nsenter", f"--net={spaces}/net", f"--mount={spaces}/mnt", f"--pid={spaces}/pid_for_children"]
        done = subprocess.run(
            [*enter, f"--wd={self.shared}", "sh", "-c", command],
            env=os.environ | self._environment, capture_output=True, text=True, timeout=namespaces.SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self) -> dict[str, Job]:
        """Returns the jobs in the queue by their ids."""
        lines = self.run("squeue --noheader --array --format='%i|%T|%N'").splitlines()
        return {identity: Job(*rest) for identity, *rest in (line.split("|") for line in lines)}

    def log(self, job: str) -> str:
        """Returns the output of a job."""
        path = self.shared / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes; prints the ends of the logs, which pytest shows after a failure."""
        with self._stack:
            paths = [*self.shared.glob("slurm-*.out"), *self.folder.glob("*.log")]
            print("".join(f"\n-- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(paths)))


def missing() -> str:
    """Returns the reason why the cluster cannot be created here; "" if it can."""
    path = SYSTEM_PATH + (f":{UNPACKED}/usr/sbin:{UNPACKED}/usr/bin" if UNPACKED else "")
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(absent)}" if absent else namespaces.missing()
