"""Checks whether a run can start on this host: one function per requirement, with figures and a remedy.

`apex doctor` prints all checks. `apex train` makes the same checks, and refuses to start with the same words. The
result of a check depends only on its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from apex.config import Config, LearnerConfig
from apex.config.sizing import Machine
from apex.errors import UsageError
from apex.launch.preflight.leftovers import Leftovers, bytes_to_come
from apex.launch.preflight.requirements import Memory, files_needed, gpu_bytes, memory_needed, store_bytes
from apex.replay_memory.store.file import require_processor
from apex.replay_memory.store.location import MEMORY
from apex.runtime.gpu import Cuda, version_name
from apex.runtime.hardware import FileLimit, Space, read_available_memory, read_file_limit, read_space
from apex.runtime.ports import choose_ports
from apex.runtime.text import size
from apex.types import Schema

GIB = 2**30


class Check(NamedTuple):
    """One row of the report."""

    name: str
    figures: str  # what was checked, with the figures
    verdict: Literal["ok", "warning", "short"] = "ok"  # short: training cannot start
    remedy: str = ""  # what to type or to set; "" if nothing needs to be done


class Room(NamedTuple):
    """The resources of a host."""

    memory: int  # bytes of memory that this process may use in total
    available: int  # bytes of unused memory, including the bytes that the start of a run would free
    tmpfs: Space  # its free space includes the bytes that the start of a run would free
    files: FileLimit
    gpu: int  # bytes of memory of the learner's GPU; 0: the learner uses no GPU


def read_room(machine: Machine, cuda: Cuda, leftovers: Leftovers, own: Path | None, device: str) -> Room:
    """Reads the current resources of this host. A learner on `device` uses the first GPU.

    `own`: the replay memory file of a run that is to be resumed.
    """
    to_come, tmpfs = bytes_to_come(leftovers, own), read_space(MEMORY)
    return Room(
        memory=machine.memory_bytes,
        available=read_available_memory() + to_come,
        tmpfs=tmpfs._replace(free=tmpfs.free + to_come),
        files=read_file_limit(),
        gpu=cuda.gpus[0].memory_bytes if machine.gpu and device != "cpu" else 0,
    )


def check_room(config: Config, schema: Schema, room: Room) -> list[Check]:
    """Compares what a run with this sized configuration needs with what the host has."""
    checks = [
        check_memory(memory_needed(config, schema, cuda=bool(room.gpu)), room),
        check_tmpfs(store_bytes(config, schema), room, MEMORY),
        check_files(config, room.files),
    ]
    return [*checks, check_gpu_memory(gpu_bytes(config, schema), room.gpu)] if room.gpu else checks


def require_all(checks: Iterable[Check]) -> None:
    """Raises UsageError, with the figures and remedies of all checks whose verdict is short, if there are any."""
    short = [f"{check.name}: {check.figures} -> {check.remedy}" for check in checks if check.verdict == "short"]
    if short:
        raise UsageError("; ".join(short))


# --- the software -----------------------------------------------------------------------------------------------------


def check_packages(versions: Mapping[str, str | None], requirements: Sequence[str]) -> Check:
    """Checks installed `versions`, by package name, against `requirements` such as "torch>=2.6"."""
    bad = []
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[[^\]]*\])?(?:>=([\d.]+))?$", requirement)
        if found is None or found[1] not in versions:  # for example, a requirement of an extra
            continue
        name, least = found[1], found[2] or "0"
        version = versions[name]
        if version is None:
            bad.append(f"{name} is missing")
        elif _numbers(version) < _numbers(least):
            bad.append(f"{name} {version} is older than {least}")
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if bad:
        return Check("software", f"{told}; {', '.join(bad)}", "short", "pip install --upgrade -e . in this environment")
    return Check("software", told)


def check_native(*native: str) -> Check:
    """Checks, by their descriptions `native`, that the compiled loops can be used. Without them, a run is slower."""
    absent = [told.removeprefix("none: ") for told in native if told.startswith("none")]
    if absent:
        remedy = "install a C compiler and liblz4, then pip install -e . again"
        if all(told.startswith("the CPU") for told in absent):
            remedy = "use a newer CPU; no package can replace the missing instructions"
        return Check("native loops", f"not available: {'; '.join(absent)}", "warning", remedy)
    return Check("native loops", ", ".join(native))


def check_processor(architecture: str, learner: LearnerConfig, *, has_bfloat16: bool, on_gpu: bool) -> Check:
    """Checks that the CPU keeps the order of stores, which lock-free reads rely on, and whether bfloat16 is fast."""
    try:
        require_processor(architecture)
    except UsageError as error:
        return Check("CPU", str(error).rpartition(". ")[0], "short", "run on an x86-64 host")
    flags = "AVX512-BF16 or AMX" if has_bfloat16 else "neither AVX512-BF16 nor AMX"
    figures = f"{architecture}, {flags}"
    if learner.bfloat16 == "on" and not has_bfloat16 and not on_gpu:
        return Check("CPU", f"{figures}: emulated bfloat16 is slow", "warning", "set --learner.bfloat16 auto")
    speed = "is faster for wide networks" if has_bfloat16 else "would be slower than float32"
    return Check("CPU", f"{figures}: bfloat16 {speed}")


def check_gpu(device: str, cuda: Cuda, torch_version: str) -> Check:
    """Checks whether torch can use the GPU. If not: "short" if a GPU was requested, else "warning"."""
    verdict: Literal["warning", "short"] = "short" if device == "cuda" else "warning"
    asked = f"--device {device}"
    if not cuda.gpus:
        figures = f"{asked}, but no GPU was found{'' if cuda.driver else ': the driver (libnvidia-ml.so.1) is missing'}"
        if device == "cuda":
            remedy = "install NVIDIA's driver; in a container use docker run --gpus all; or use --device cpu"
            return Check("GPU", figures, "short", remedy)
        return Check("GPU", f"{asked}, and no GPU was found: the learner computes on the CPU")
    gpu = cuda.gpus[0]
    figures = f"{asked}: {gpu.name}, {size(gpu.memory_bytes)}, driver for CUDA {version_name(cuda.driver)}"
    if device == "cpu":
        return Check("GPU", f"{figures}; the GPU is not used")
    if not cuda.torch:
        remedy = "pip install --force-reinstall torch, without a package index of CPU builds; or use --device cpu"
        return Check("GPU", f"{figures}, but torch {torch_version} is built for the CPU only", verdict, remedy)
    figures += f", torch {torch_version} for CUDA {version_name(cuda.torch)}"
    if not cuda.usable:
        remedy = "update the driver, or install a torch built for the driver's CUDA; or use --device cpu"
        return Check("GPU", f"{figures}, which is newer than the driver supports", verdict, remedy)
    return Check("GPU", figures)


# --- room -------------------------------------------------------------------------------------------------------------


def check_cores(cores: int, *, host: int, affinity: int, limits: Sequence[float]) -> Check:
    """Checks the number of cores. `limits`: CPU time that the control groups allow, in cores."""
    group = f"the control group allows {min(limits):g}" if limits else "no control group limits them"
    figures = f"{cores} usable: the host has {host}, CPU affinity allows {affinity}, {group}"
    if min([float(affinity), *limits]) < 2:
        remedy = "use two or more cores: docker run --cpus=2, or taskset"
        return Check("cores", f"{figures}; actors and learner share one", "warning", remedy)
    return Check("cores", figures)


def check_threads(config: Config, cores: int) -> Check:
    """Checks that no part is configured with more threads than there are cores, because they slow each other down."""
    asked = {
        "--learner.num-threads": config.learner.num_threads,
        "--learner.num-loaders": config.learner.num_loaders,
        "--actor.num-threads": config.actor.num_threads,
    }
    many = {setting: number for setting, number in asked.items() if number > cores}
    if many:
        figures = f"{', '.join(f'{setting} {number}' for setting, number in many.items())}: more than the {cores} cores"
        return Check("threads", figures, "warning", f"remove {' and '.join(many)}, so that the defaults apply")
    return Check("threads", f"no part is configured with more threads than the {cores} cores")


def check_memory(needed: Memory, room: Room) -> Check:
    """Checks the memory of the whole run. All of it except the replay memory is an estimate."""
    figures = (
        f"needs about {size(needed.total)}: {size(needed.store)} replay memory, {size(needed.actors)} actors, "
        f"{size(needed.learner)} learner, {size(needed.others)} others; "
        f"this host has {size(room.memory)}, {size(room.available)} of it free"
    )
    remedy = "lower --replay.capacity or --actor.num-processes, or end other programs"
    if needed.total > room.memory or needed.store > room.available:
        return Check("memory", figures, "short", remedy)
    return Check("memory", figures, "warning", remedy) if needed.total > room.available else Check("memory", figures)


def check_tmpfs(needed: int, room: Room, folder: Path) -> Check:
    """Checks the tmpfs at `folder`, because the replay memory is a file there, allocated at the start."""
    tmpfs, wanted = room.tmpfs, f"needs {size(needed)} of tmpfs for the replay memory"
    if tmpfs.flaw:
        remedy = f"mount -t tmpfs tmpfs {folder}, or mount -o remount,rw {folder}; in containers docker run --shm-size"
        return Check("tmpfs", f"{wanted}, but {folder} {tmpfs.flaw}", "short", remedy)
    figures = f"{wanted}, {folder} has {size(tmpfs.free)} free of {size(tmpfs.size)}"
    if needed <= tmpfs.free:
        return Check("tmpfs", figures)
    more = -(-(needed - tmpfs.free + tmpfs.size) // GIB)
    remedy = (
        f"docker run --shm-size={more}g, or mount -o remount,size={more}g {folder}; "
        "or lower --replay.capacity or --replay.max-bytes"
    )
    return Check("tmpfs", figures, "short", remedy)


def check_gpu_memory(needed: int, there: int) -> Check:
    """Checks the memory of the GPU. `needed` is an estimate that does not include custom networks."""
    figures = f"the learner needs about {size(needed)}; the GPU has {size(there)}"
    if needed > there:
        return Check("GPU memory", figures, "short", "lower --learner.batch-size, or --device cpu")
    return Check("GPU memory", figures)


def check_files(config: Config, limit: FileLimit) -> Check:
    """Checks that the process with the most open files stays within the limit; `config` must be sized."""
    needed, sum_of = files_needed(config)
    figures = f"one process may need {needed} open files = {sum_of}; the limit is {limit.soft}"
    if needed <= limit.soft:
        return Check("open files", figures)
    if needed <= limit.hard:
        return Check("open files", f"{figures}; apex train raises the limit automatically")
    remedy = (
        f"ulimit -n {needed} as root, docker run --ulimit nofile={needed}, or LimitNOFILE={needed} in a systemd unit; "
        "or use fewer actors"
    )
    return Check("open files", f"{figures} and can be raised to {limit.hard} only", "short", remedy)


def check_disk(needed: int, folder: Path, space: Space, *, writable: bool) -> Check:
    """Checks the disk of the run folders. A full disk does not end a run, but prevents checkpoints."""
    figures = f"needs up to {size(needed)} for checkpoints and snapshots, {folder} has {size(space.free)} free"
    if not writable:
        return Check("disk", f"{figures}, but is not writable", "short", "set --run.folder DIR")
    if needed > space.free:
        remedy = "set --run.folder DIR on a larger disk, add --checkpoint.no-replay, or lower --checkpoint.keep"
        return Check("disk", figures, "warning", remedy)
    return Check("disk", figures)


def check_ports(config: Config, free: Callable[[str, int], bool]) -> tuple[Check, Config]:
    """Checks the ports of the run and of TensorBoard; also returns the configuration with the ports to be used."""
    asked: list[int] = []
    said: list[str] = []

    def note(host: str, port: int) -> bool:
        asked.append(port)
        return free(host, port)

    try:
        chosen = choose_ports(config, note, said.append)
    except UsageError as error:
        remedy = "stop the program that uses the port, or set --transport.port-offset or --transport.bind"
        return Check("ports", str(error), "short", remedy), config
    figures = f"{', '.join(map(str, sorted(set(asked))))} on {config.transport.bind}"
    if said:
        return Check("ports", f"{figures}: not all are free", "warning", f"nothing to do: {'; '.join(said)}"), chosen
    return Check("ports", f"{figures}: all free"), chosen


def check_logout(affected: str) -> Check:
    """Checks whether logging out removes the replay memory. `affected`: user name or "", see `find_affected`."""
    if not affected:
        return Check("logout", "the replay memory stays when you log out")
    return Check(
        "logout",
        f"systemd-logind removes the replay memory when the last session of {affected} ends (RemoveIPC=yes)",
        "warning",
        f"loginctl enable-linger {affected}, or stay logged in until the run has ended, for example in tmux",
    )


# --- other runs -------------------------------------------------------------------------------------------------------


def check_leftovers(leftovers: Leftovers) -> Check:
    """Reports the files of dead runs, programs without a launcher, and other runs on the host."""
    figures, remedies = [], []
    if leftovers.dead:
        names = ", ".join(path.name for path in leftovers.dead)
        num_bytes = size(sum(leftovers.dead.values()))
        kept = "the next start removes them, but --resume keeps the files of its run"
        figures.append(f"files of dead runs: {names}, {num_bytes}; {kept}")
    if leftovers.orphans:
        figures.append(", ".join(f"{role} ({pid}) without its launcher" for pid, role in leftovers.orphans))
        pids = " ".join(str(pid) for pid, _ in leftovers.orphans)
        remedies.append(f"kill {pids}, unless systemd manages these processes")
    if leftovers.in_use:
        names = ", ".join(path.name for path in leftovers.in_use)
        num_bytes = size(sum(leftovers.in_use.values()))
        figures.append(f"other runs use this host: their replay memory is {names}, {num_bytes}")
        remedies.append("use fewer --actors for one of the runs, or wait until the other run ends")
    told = "; ".join(figures) or "none: no files of dead runs, no programs without a launcher, no other run"
    return Check("leftovers", told, "warning" if remedies else "ok", "; ".join(remedies))


def _numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version.partition("+")[0])[:3]]
