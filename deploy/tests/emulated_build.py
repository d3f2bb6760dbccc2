"""Runs `packer build` against an emulated EC2, in which each instance is a Debian system in a changed root.

    unshare -mn python emulated_build.py JOB.json

Packer, its amazon-ebs builder, SSH and the provisioners are real. The emulator (moto) answers for AWS. Behind every
address of an instance, a real sshd runs in that root and accepts the same key as EC2's own first boot: the key pair
that Packer has created. The only difference to a real machine is that no kernel boots: systemd is installed but does
not run.

JOB.json has: template (a folder), packer (arguments, or null), base (folder of a system), user (login name), begun
(state of an earlier job to continue, or null), state (a folder), outside (a pid), out (a file), look ({name: shell
script that runs at the end}).
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

EMULATOR = "http://127.0.0.1:5000"
WHEELS = Path("/opt/wheels")  # PyTorch without CUDA, on machines that cannot reach its package index
USERS = ("ubuntu",)  # owner of the base images
HIDDEN = ("root", "home", "tmp", "run", "srv", "mnt", "media", "work", "var/tmp", "var/lib/cloud")
SSHD = ("-i", "-e", "-o", "UsePAM=no", "-o", "HostKey=/run/emulated/key", "-o", "PubkeyAcceptedAlgorithms=+ssh-rsa")


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, check=True, **options)


def pip_settings(others: dict[str, str]) -> str:
    """Returns this machine's settings of pip, except `others`, as a file of settings."""
    settings = run(sys.executable, "-m", "pip", "config", "list", capture_output=True, text=True).stdout
    found = {}
    for line in settings.splitlines():
        name, _, value = line.partition("=")
        if name.startswith((":env:.", "global.")):
            found[name.rpartition(".")[2]] = value[1:-1]
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in {**found, **others}.items()), ""])


class Machine:
    """A system in a changed root: the layer `base`, and above it the changes in `state`."""

    def __init__(self, base: str, begun: str | None, state: Path, outside: int) -> None:
        self.root = state / "root"
        self._network = ("nsenter", f"--net=/proc/{outside}/ns/net")
        for name in ("root", "upper", "work"):
            (state / name).mkdir(parents=True, exist_ok=True)
        if begun:  # A copy, because a layer of an overlay may not be inside another one.
            run("cp", "--archive", "--reflink=auto", f"{begun}/upper/.", str(state / "upper"))
        stack = f"lowerdir={base},upperdir={state / 'upper'},workdir={state / 'work'}"
        run("mount", "-t", "overlay", "overlay", "-o", stack, str(self.root))
        for name in HIDDEN if base == "/" else ("tmp", "run"):
            if (self.root / name).is_dir():
                run("mount", "-t", "tmpfs", "tmpfs", str(self.root / name))
        run("mount", "-t", "proc", "proc", str(self.root / "proc"))
        run("mount", "--rbind", "/dev", str(self.root / "dev"))
        run("mount", "-t", "tmpfs", "tmpfs", str(self.root / "dev/shm"))
        (self.root / "tmp").chmod(0o1777)
        for name in ("run/sshd", "run/emulated", "run/lock"):
            (self.root / name).mkdir(exist_ok=True)
        self._share_package_settings()

    def _share_package_settings(self) -> None:
        """Gives the root this machine's access to packages: pip's settings, certificates, wheels and downloads."""
        for name in ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt", "etc/hosts"):
            source, target = Path("/", name), self.root / name
            if source.exists() and source.resolve() != target:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                target.write_bytes(source.read_bytes())
        (self.root / "etc/pip.conf").write_text(pip_settings({"cache-dir": "/var/cache/emulated-pip"}))
        shared = {WHEELS: "opt/wheels", Path("~/.cache/pip").expanduser(): "var/cache/emulated-pip"}
        for source, name in shared.items():
            if source.is_dir():
                (self.root / name).mkdir(parents=True, exist_ok=True)
                run("mount", "--bind", str(source), str(self.root / name))

    def chroot(self, *command: str, **options) -> subprocess.CompletedProcess:
        """Runs a command in the root, with the network of `outside` and the small environment of a machine's shell."""
        clean = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return run(*self._network, "chroot", str(self.root), *command, env=clean, **options)

    def install_base(self) -> None:
        """Installs what a base image has and this root may lack: an SSH server, sudo, and the login user."""
        if not all((self.root / name).exists() for name in ("usr/sbin/sshd", "usr/bin/sudo")):
            (self.root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
            (self.root / "usr/sbin/policy-rc.d").chmod(0o755)
            self.chroot("apt-get", "-qq", "update")
            arguments = ("-qq", "install", "--yes", "--no-install-recommends", "openssh-server", "sudo", "python3")
            self.chroot("apt-get", *arguments, stdout=subprocess.DEVNULL)
        for user in USERS:
            if subprocess.run(["chroot", str(self.root), "id", user], capture_output=True).returncode:
                self.chroot("useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", user)
            self.chroot("install", "-d", "-o", user, "-g", user, "-m", "0700", f"/home/{user}", f"/home/{user}/.ssh")
            (self.root / f"etc/sudoers.d/{user}").write_text(f"{user} ALL=(ALL) NOPASSWD:ALL\n")
        self.chroot("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/run/emulated/key")

    def serve_ssh(self, user: str, public_keys) -> None:
        """Answers on port 22 of every address. `public_keys()`: the keys that a first boot would accept for `user`."""
        listener = socket.create_server(("", 22))

        def serve() -> None:
            known: set[str] = set()
            while True:
                connection, _ = listener.accept()
                for key in set(public_keys()) - known:
                    known.add(key)
                    with (self.root / f"home/{user}/.ssh/authorized_keys").open("a") as file:
                        file.write(key + "\n")
                command = (*self._network, "chroot", str(self.root), "/usr/sbin/sshd", *SSHD)
                subprocess.Popen(
                    command, stdin=connection, stdout=connection, stderr=sys.stderr, env={"PATH": "/usr/sbin:/usr/bin"}
                )
                connection.close()

        threading.Thread(target=serve, daemon=True).start()


def start_emulator(state: Path) -> subprocess.Popen:
    images = Path(__file__).with_name("base_images.json")
    (state / "moto").mkdir(exist_ok=True)
    log = (state / "moto/log").open("w")
    emulator = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "5000"],
        env={**os.environ, "MOTO_AMIS_PATH": str(images), "MOTO_RECORDER_FILEPATH": str(state / "moto/requests")},
        stdout=log,
        stderr=log,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(EMULATOR + "/moto-api/data.json", timeout=5).close()
            return emulator
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the emulator did not start: {(state / 'moto/log').read_text()}")


def _control_recorder(word: str) -> bytes:
    asked = urllib.request.Request(f"{EMULATOR}/moto-api/recorder/{word}", method="POST")
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return answer.read()


def requests() -> list[dict[str, str]]:
    """Packer's requests to EC2: the fields of each."""
    _control_recorder("stop-recording")
    with urllib.request.urlopen(f"{EMULATOR}/moto-api/recorder/download-recording", timeout=30) as answer:
        recorded = [json.loads(line) for line in answer.read().decode().splitlines() if line]
    found = []
    for entry in recorded:
        body = entry.get("body") or ""
        if entry.get("body_encoded"):
            body = base64.b64decode(body).decode()
        found.append(dict(urllib.parse.parse_qsl(body)))
    return found


def public_keys(ec2) -> list[str]:
    """Writes the account's key pairs as a first boot does: each with its name, by which Packer recognizes its own."""
    pairs = ec2.describe_key_pairs(IncludePublicKey=True)["KeyPairs"]
    return [f"{pair['PublicKey']} {pair['KeyName']}" for pair in pairs]


def facts(ec2) -> dict:
    """Returns the contents of the emulated account after the build."""
    images = ec2.describe_images(Owners=["self"])["Images"]
    reservations = ec2.describe_instances()["Reservations"]
    return {
        "images": images,
        "instances": [instance for reservation in reservations for instance in reservation["Instances"]],
        "volumes": ec2.describe_volumes()["Volumes"],
        "keys": ec2.describe_key_pairs()["KeyPairs"],
        "groups": [group["GroupName"] for group in ec2.describe_security_groups()["SecurityGroups"]],
    }


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    state = Path(job["state"])
    run("ip", "link", "set", "lo", "up")
    for network in ("0.0.0.0/1", "128.0.0.0/1"):  # Every address of an instance belongs to this machine.
        run("ip", "route", "add", "local", network, "dev", "lo")
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "emulated",
        "AWS_SECRET_ACCESS_KEY": "emulated",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_POLL_DELAY_SECONDS": "1",
        "AWS_MAX_ATTEMPTS": "60",
        "CHECKPOINT_DISABLE": "1",
        "PACKER_CONFIG_DIR": str(state),
        "PACKER_CACHE_DIR": str(state / "cache"),
        "no_proxy": "*",
    }
    import boto3

    machine = Machine(job["base"], job["begun"], state, job["outside"])
    machine.install_base()
    if job["packer"] is None:
        return 0
    emulator = start_emulator(state)
    try:
        ec2 = boto3.client("ec2", region_name="us-east-1", endpoint_url=EMULATOR)
        machine.serve_ssh(job["user"], lambda: public_keys(ec2))
        _control_recorder("start-recording")
        command = ["packer", "build", "-color=false", *job["packer"], "."]
        status = subprocess.run(command, cwd=job["template"]).returncode
        found = facts(ec2) | {"requests": requests()}
    finally:
        emulator.terminate()
        emulator.wait()
    found["status"] = status
    found["looks"] = {name: _look(machine, script) for name, script in job["look"].items()}
    Path(job["out"]).write_text(json.dumps(found, default=str))
    return 0


def _look(machine: Machine, script: str) -> dict:
    """Returns the output of a shell script in the root after the build."""
    found = subprocess.run(["chroot", str(machine.root), "bash", "-c", script], capture_output=True, text=True)
    return {"status": found.returncode, "text": found.stdout + found.stderr}


if __name__ == "__main__":
    sys.exit(main())
