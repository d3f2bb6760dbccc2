"""The Jobs of Kubernetes manifests, running: each pod is a machine in namespaces that runs its containers' commands.

Replaces the Job controller, the kubelet and DNS. Containers have the user and group of their securityContext, in a user
namespace. They see the files of this host, read-only, and the pod's volumes. Images, cgroups and seccomp are left out.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from namespaces import SECONDS, Machine, Switch, wait_until

MOST_PODS = 12  # more: pods fail again and again
OTHER = 1  # owner of volumes on this host: not the user of the containers, as with a kubelet
PYTHONPATH = ":".join(path for path in sys.path if Path(path).is_dir())
# The first process of a pod. The network is complete when it reads a line.
INIT = """
read -r _; mount -t tmpfs none /mnt; mkdir -p {places}; mount --bind {shared}/hosts /etc/hosts
{protect}
{mounts}
{inits}
exec {main}
"""
PROTECT = """
while read -r _ at _; do
  case $at in /proc* | /sys* | /dev*) ;; *) mount -o remount,bind,ro "$at" || true ;; esac
done </proc/mounts 2>/dev/null # A mount below another one cannot be found.
[ ! -w / ]
"""

Manifest = Mapping[str, Any]


class Pod(Machine):
    """A pod with new volumes, made from the template of a Job."""

    def __init__(self, job: Manifest, others: Mapping[str, Manifest], address: str, folder: Path) -> None:
        """`others`: the manifests beside the Job by "KIND/NAME". `folder`: is created for the pod's volumes and log.

        Its parent has `hosts`, the answers of DNS, and `mirror`, a folder that all pods see as /mnt/mirror.
        """
        self.labels: dict[str, str] = job["spec"]["template"]["metadata"]["labels"]
        spec = job["spec"]["template"]["spec"]
        (self.container,) = spec["containers"]
        self._user, self._others, self.folder = spec["securityContext"], others, folder
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        uses = {use["mountPath"]: volumes[use["name"]] for one in self._all(spec) for use in one["volumeMounts"]}
        closed = all(one["securityContext"]["readOnlyRootFilesystem"] for one in self._all(spec))
        folder.mkdir(parents=True)
        mounts = [self._mount(at, volume) for at, volume in uses.items()]
        script = INIT.format(
            places=shlex.join([*(at for at in uses if at.startswith("/mnt/")), "/mnt/mirror"]),
            shared=folder.parent,
            protect=PROTECT if closed else "",
            mounts="\n".join([*mounts, bind(folder.parent / "mirror", "/mnt/mirror")]),
            inits="\n".join(shlex.join(self.command(one)) for one in spec["initContainers"]),
            main=shlex.join(self.command(self.container)),
        )
        super().__init__(folder.name, address, ["sh", "-euc", script], folder / "log")

    @staticmethod
    def _all(spec: Manifest) -> list[Manifest]:
        return [*spec["initContainers"], *spec["containers"]]

    def _mount(self, at: str, volume: Manifest) -> str:
        """Makes a volume on this host, and returns the command that mounts it."""
        place = self.folder / volume["name"]
        place.mkdir(exist_ok=True)
        group = 0 if self._user["fsGroup"] == self._user["runAsGroup"] else OTHER  # 0 here is the group of containers.
        os.chown(place, OTHER, group)
        place.chmod(0o2777)
        if secret := volume.get("secret"):
            return self._write_secret(place, secret, group, at)
        if volume["emptyDir"].get("medium") == "Memory":
            size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
            return f"mount -t tmpfs -o size={size},mode=2777,uid={OTHER},gid={group} none {at}"
        return bind(place, at)

    def _write_secret(self, place: Path, secret: Manifest, group: int, at: str) -> str:
        """Writes the files as a kubelet does: links to files that belong to root and fsGroup."""
        (place / "..data").mkdir()
        for name, text in self._others[f"Secret/{secret['secretName']}"]["data"].items():
            path = place / "..data" / name
            path.write_bytes(base64.b64decode(text))
            os.chown(path, OTHER, group)
            path.chmod(secret["defaultMode"])
            (place / name).symlink_to(f"..data/{name}")
        return bind(place, at, "ro")

    def command(self, container: Manifest, command: list[str] | None = None) -> list[str]:
        """Returns the command line that runs a container, or another command in it."""
        environment = {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": PYTHONPATH}  # of the image
        for source in container.get("envFrom", []):
            if "configMapRef" in source:  # The only Secret is optional, and absent.
                environment |= self._others[f"ConfigMap/{source['configMapRef']['name']}"]["data"]
        environment |= {one["name"]: one["value"] for one in container.get("env", [])}
        words = command or [*container["command"], *container.get("args", [])]
        words = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        user = [f"--map-user={self._user['runAsUser']}", f"--map-group={self._user['runAsGroup']}"]
        names = [f"{name}={value}" for name, value in environment.items()]
        inside = ["env", f"--chdir={container.get('workingDir', '/')}", "-i", *names, "setpriv", "--no-new-privs"]
        return [*inside, "unshare", "--user", *user, *words]

    @property
    def first(self) -> int:
        """The process id of the container's program, or of the init containers' shell before."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])

    def probe(self, name: str, owner: Pod | None = None) -> bool:
        """Returns whether a probe of the container, or of another pod's container, succeeds here."""
        command = self.command(self.container, (owner or self).container[name]["exec"]["command"])
        enter = ["nsenter", f"--target={self.first}", "--mount", "--net", "--pid"]
        seconds = 10 * (owner or self).container[name]["timeoutSeconds"]  # on a busy machine
        return subprocess.run([*enter, *command], capture_output=True, timeout=seconds).returncode == 0

    def terminate(self) -> None:
        """Asks the container to end, as a kubelet does on a node that is drained."""
        os.kill(self.first, signal.SIGTERM)


class Jobs:
    """The Jobs of a namespace and their pods, which end with the context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hosts = folder / "hosts"
        self._stack = ExitStack()
        self._objects: dict[str, Manifest] = {}
        self._num_pods = 0
        self.pods: dict[tuple[str, int], Pod] = {}  # newest pod by Job and index
        self.statuses: dict[tuple[str, int], list[int]] = {}  # exit statuses of ended pods, likewise

    def apply(self, *objects: Manifest) -> None:
        """Replaces manifests. Running pods stay as they are."""
        self._objects |= {f"{one['kind']}/{one['metadata']['name']}": one for one in objects}

    def reconcile(self) -> None:
        """Makes the pods that are missing, and replaces those that have failed, as their Job says."""
        for job in [one for one in self._objects.values() if one["kind"] == "Job"]:
            for index in range(job["spec"].get("completions", 1)):
                self._reconcile((job["metadata"]["name"], index), job)

    def _reconcile(self, key: tuple[str, int], job: Manifest) -> None:
        pod, statuses = self.pods.get(key), self.statuses.setdefault(key, [])
        if pod is not None:
            if (status := pod.process.poll()) is None:
                return
            pod.kill()
            del self.pods[key]
            statuses.append(status if status >= 0 else 128 - status)
            assert decide(job, statuses[-1]) != "FailJob", f"{key}: {statuses} {self.logs()}"
        if not statuses or statuses[-1]:
            self.pods[key] = self._start(key, job)

    def _start(self, key: tuple[str, int], job: Manifest) -> Pod:
        self._num_pods += 1
        assert self._num_pods <= MOST_PODS, self.logs()
        address, folder = f"10.78.0.{self._num_pods}", self.folder / f"{key[0]}-{key[1]}-{self._num_pods}"
        pod = Pod(job, self._objects, address, folder)
        self._stack.callback(pod.kill)
        self._switch.plug(pod)
        pods = [*self.pods.values(), pod]
        for service in [one for one in self._objects.values() if one["kind"] == "Service"]:
            chosen = [one.address for one in pods if service["spec"]["selector"].items() <= one.labels.items()]
            if chosen:
                self._hosts.write_text(f"127.0.0.1 localhost\n{chosen[-1]} {service['metadata']['name']}\n")
        pod.send("start")
        return pod

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
        """See namespaces.wait_until; keeps the pods running meanwhile."""

        def check() -> object:
            self.reconcile()
            return condition()

        wait_until(check, what, seconds, self.logs)

    def logs(self) -> str:
        """Returns the end of each pod's log."""
        return "".join(f"\n-- {path.parent.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*/log"))

    def __enter__(self) -> Self:
        self._hosts.write_text("127.0.0.1 localhost\n")
        (self.folder / "mirror").mkdir()
        self._switch = Switch([], self.folder / "switch.log")
        self._stack.callback(self._switch.kill)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def bind(place: Path, at: str, mode: str = "rw") -> str:
    """Returns the commands that mount a folder, which is read-only where it lies."""
    return f"mount --bind {place} {at}; mount -o remount,bind,{mode} {at}"


def decide(job: Manifest, status: int) -> str:
    """Returns the action of the Job's first rule for this exit status; "Count" without one."""
    rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    return next((rule["action"] for rule in rules if status in rule["onExitCodes"]["values"]), "Count")
