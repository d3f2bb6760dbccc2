"""Runs the provisioners of an image in a changed root, as root, in the place of a build machine.

    unshare --mount --pid --fork python emulated_build.py JOB.json

The root is a layer above a Debian system, and no kernel boots: systemd is installed but does not run.

JOB.json has: base (folder of a system), begun (state of an earlier job to continue, or null), state (a folder), files
({path in the root: file or folder}), steps ([script, its variables]), out (a file), look ({name: shell script that runs
at the end}).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

WHEELS = Path("/opt/wheels")  # PyTorch without CUDA, on machines that cannot reach its package index
HIDDEN = ("root", "home", "tmp", "run", "srv", "mnt", "media", "work", "var/tmp", "var/lib/cloud")


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

    def __init__(self, base: str, begun: str | None, state: Path) -> None:
        self.root = state / "root"
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
        (self.root / "run/lock").mkdir(exist_ok=True)
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
        """Runs a command in the root with the small environment of a machine's shell; returns its status and output."""
        clean = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        return subprocess.run(["chroot", str(self.root), *command], env=clean, **options)

    def put(self, path: str, source: Path) -> None:
        """Copies a file or a folder into the root."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    machine = Machine(job["base"], job["begun"], Path(job["state"]))
    for path, source in job["files"].items():
        machine.put(path, Path(source))
    for script, variables in job["steps"]:
        machine.put("tmp/step", Path(script))
        if status := machine.chroot("env", *variables, "bash", "/tmp/step").returncode:
            return status
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    looks = {name: machine.chroot("bash", "-c", script, **output).stdout for name, script in job["look"].items()}
    Path(job["out"]).write_text(json.dumps(looks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
