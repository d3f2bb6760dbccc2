"""Whether a run can start on this host: one check for each thing it needs, each with its figures and its remedy.

`apex doctor` prints all of them; `apex train` refuses by the same ones, in the same words. A check looks at what it is
given and at nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from apex.config import Config, LearnerConfig
from apex.config.sizing import Machine
from apex.errors import ConfigError
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
    figures: str  # what was looked at, and how much of it there is
    verdict: Literal["ok", "warning", "short"] = "ok"  # short: training cannot start
    remedy: str = ""  # what to type or to set, where not all is well


class Room(NamedTuple):
    """What a host has to give."""

    memory: int  # bytes, all of it that may be used
    available: int  # bytes of it that nobody uses, and that a start would free
    tmpfs: Space  # with what a start would free
    files: FileLimit
    gpu: int  # bytes of the memory of the GPU that the learner uses; 0: it uses none


def read_room(machine: Machine, cuda: Cuda, leftovers: Leftovers, own: Path | None, device: str) -> Room:
    """This host's, now. A learner on `device` uses the first GPU; `own` is the store of a run that is to go on."""
    to_come, tmpfs = bytes_to_come(leftovers, own), read_space(MEMORY)
    return Room(
        memory=machine.memory_bytes,
        available=read_available_memory() + to_come,
        tmpfs=tmpfs._replace(free=tmpfs.free + to_come),
        files=read_file_limit(),
        gpu=cuda.gpus[0].memory_bytes if machine.gpu and device != "cpu" else 0,
    )


def check_room(config: Config, schema: Schema, room: Room) -> list[Check]:
    """All that a run with this sized configuration takes, against what there is."""
    checks = [
        check_memory(memory_needed(config, schema, cuda=bool(room.gpu)), room),
        check_tmpfs(store_bytes(config), room, MEMORY),
        check_files(config, room.files),
    ]
    return [*checks, check_gpu_memory(gpu_bytes(config, schema), room.gpu)] if room.gpu else checks


def require_all(checks: Iterable[Check]) -> None:
    """Raises ConfigError with the sentences of everything that is short."""
    short = [f"{check.name}: {check.figures} -> {check.remedy}" for check in checks if check.verdict == "short"]
    if short:
        raise ConfigError("; ".join(short))


# --- the software -----------------------------------------------------------------------------------------------------


def check_packages(versions: Mapping[str, str | None], requirements: Sequence[str]) -> Check:
    """`versions` of what is installed by name; `requirements` as in "torch>=2.6"."""
    bad = []
    for requirement in requirements:
        found = re.match(r"([\w.-]+)(?:\[[^\]]*\])?(?:>=([\d.]+))?$", requirement)
        if found is None or found[1] not in versions:  # an extra's, say, or of no matter here
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
    """What `describe_native` and its like say. Without the loops everything works, more slowly."""
    absent = [told.removeprefix("none: ") for told in native if told.startswith("none")]
    if absent:
        remedy = "install a C compiler and liblz4, then pip install -e . again"
        if all(told.startswith("the processor") for told in absent):
            remedy = "nothing can be installed for it; a newer processor has them"
        return Check("native loops", f"none: {'; '.join(absent)}", "warning", remedy)
    return Check("native loops", ", ".join(native))


def check_processor(architecture: str, learner: LearnerConfig, *, has_bfloat16: bool, on_gpu: bool) -> Check:
    """The order of stores that reading without locks needs, and which numbers are fast."""
    try:
        require_processor(architecture)
    except ConfigError as error:
        return Check("processor", str(error).rpartition(". ")[0], "short", "run on an x86-64 host")
    flags = "AVX512-BF16 or AMX" if has_bfloat16 else "neither AVX512-BF16 nor AMX"
    figures = f"{architecture}, which keeps the order of stores; {flags}"
    if learner.bfloat16 == "on" and not has_bfloat16 and not on_gpu:
        return Check("processor", f"{figures}: bfloat16 is emulated, slowly", "warning", "--learner.bfloat16 auto")
    pays = "pays where networks are wide" if has_bfloat16 else "would be slower than float32"
    return Check("processor", f"{figures}: bfloat16 {pays}")


def check_gpu(device: str, cuda: Cuda, torch_version: str) -> Check:
    """Whether torch can use the GPU that is asked for, or that lies idle."""
    verdict: Literal["warning", "short"] = "short" if device == "cuda" else "warning"
    asked = f"--device {device}"
    if not cuda.gpus:
        figures = f"{asked}, and no GPU is seen{'' if cuda.driver else ': libnvidia-ml.so.1, the driver, is not here'}"
        if device == "cuda":
            remedy = "install NVIDIA's driver; in a container docker run --gpus all; or --device cpu"
            return Check("GPU", figures, "short", remedy)
        return Check("GPU", f"{asked}, and no GPU is seen: the learner computes on the processor")
    gpu = cuda.gpus[0]
    figures = f"{asked}: {gpu.name}, {size(gpu.memory_bytes)}, driver for CUDA {version_name(cuda.driver)}"
    if device == "cpu":
        return Check("GPU", f"{figures}, which is not used")
    if not cuda.torch:
        remedy = "pip install --force-reinstall torch, without an extra index of builds for the CPU; or --device cpu"
        return Check("GPU", f"{figures}, but torch {torch_version} is built for the CPU alone", verdict, remedy)
    figures += f", torch {torch_version} for CUDA {version_name(cuda.torch)}"
    if not cuda.usable:
        remedy = "update the driver, or install a torch that is built for its CUDA; or --device cpu"
        return Check("GPU", f"{figures}, which is newer than the driver", verdict, remedy)
    return Check("GPU", figures)


# --- room -------------------------------------------------------------------------------------------------------------


def check_cores(cores: int, *, host: int, affinity: int, limits: Sequence[float]) -> Check:
    """`limits`: cores' worth of time that control groups allow."""
    group = f"its control group {min(limits):g}" if limits else "no control group limits them"
    figures = f"{cores} to be used: the host has {host}, affinity leaves {affinity}, {group}"
    if min([float(affinity), *limits]) < 2:
        remedy = "two or more are worth it: docker run --cpus=2, taskset"
        return Check("cores", f"{figures}; actors and learner share one", "warning", remedy)
    return Check("cores", figures)


def check_threads(config: Config, cores: int) -> Check:
    """What was asked for beyond the cores: such threads only wait for one another."""
    asked = {
        "--learner.num-threads": config.learner.num_threads,
        "--learner.num-loaders": config.learner.num_loaders,
        "--actor.num-threads": config.actor.num_threads,
    }
    many = {setting: number for setting, number in asked.items() if number > cores}
    if many:
        figures = f"{', '.join(f'{setting} {number}' for setting, number in many.items())}, but {cores} cores to run on"
        return Check("threads", figures, "warning", f"leave {' and '.join(many)} to the machine")
    return Check("threads", f"no part is asked to compute with more than the {cores} cores")


def check_memory(needed: Memory, room: Room) -> Check:
    """All memory of the run, estimated but for the replay memory."""
    figures = (
        f"needs about {size(needed.total)}: {size(needed.store)} replay memory, {size(needed.actors)} actors, "
        f"{size(needed.learner)} learner, {size(needed.others)} the rest; "
        f"{size(room.memory)} here, {size(room.available)} of it free"
    )
    remedy = "lower --replay.capacity or --actor.num-processes, or end other programs"
    if needed.total > room.memory or needed.store > room.available:
        return Check("memory", figures, "short", remedy)
    return Check("memory", figures, "warning", remedy) if needed.total > room.available else Check("memory", figures)


def check_tmpfs(needed: int, room: Room, folder: Path) -> Check:
    """The replay memory is a file in tmpfs, allocated at the start."""
    tmpfs, wanted = room.tmpfs, f"needs {size(needed)} of tmpfs for the replay memory"
    if tmpfs.flaw:
        remedy = f"mount -t tmpfs tmpfs {folder}, or mount -o remount,rw {folder}; in a container docker run --shm-size"
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
    """An estimate, networks of one's own aside."""
    figures = f"the learner needs about {size(needed)} of the GPU's memory, it has {size(there)}"
    if needed > there:
        return Check("GPU memory", figures, "short", "lower --learner.batch-size, or --device cpu")
    return Check("GPU memory", figures)


def check_files(config: Config, limit: FileLimit) -> Check:
    """Open files of the busiest process; `config` is sized."""
    needed, sum_of = files_needed(config)
    figures = f"one process may need {needed} open files = {sum_of}; the limit is {limit.soft}"
    if needed <= limit.soft:
        return Check("open files", figures)
    if needed <= limit.hard:
        return Check("open files", f"{figures}, which apex train raises by itself")
    remedy = (
        f"ulimit -n {needed} as root, docker run --ulimit nofile={needed}, LimitNOFILE={needed} in a systemd unit; "
        "or fewer actors"
    )
    return Check("open files", f"{figures}, and at most {limit.hard}", "short", remedy)


def check_disk(needed: int, folder: Path, space: Space, *, writable: bool) -> Check:
    """Where run folders are. A full disk ends no run, but then there are no checkpoints."""
    figures = f"needs up to {size(needed)} for checkpoints and snapshots, {folder} has {size(space.free)} free"
    if not writable:
        return Check("disk", f"{figures}, but may not be written to", "short", "--run.folder DIR")
    if needed > space.free:
        remedy = "--run.folder DIR on a larger disk, --checkpoint.no-replay, or a lower --checkpoint.keep"
        return Check("disk", figures, "warning", remedy)
    return Check("disk", figures)


def check_ports(config: Config, free: Callable[[str, int], bool]) -> tuple[Check, Config]:
    """Ports of the run, and TensorBoard's; the configuration with those that it would take."""
    asked: list[int] = []
    said: list[str] = []

    def note(host: str, port: int) -> bool:
        asked.append(port)
        return free(host, port)

    try:
        chosen = choose_ports(config, note, said.append)
    except ConfigError as error:
        remedy = "end what listens there, or set --transport.port-offset or --transport.bind"
        return Check("ports", str(error), "short", remedy), config
    figures = f"{', '.join(map(str, sorted(set(asked))))} on {config.transport.bind}"
    if said:
        return Check("ports", f"{figures}: not all are free", "warning", f"none is needed: {'; '.join(said)}"), chosen
    return Check("ports", f"{figures}: all free"), chosen


# --- what others left -------------------------------------------------------------------------------------------------


def check_leftovers(leftovers: Leftovers) -> Check:
    """What dead runs left, and what shares the host."""
    figures, remedies = [], []
    if leftovers.dead:
        names = ", ".join(path.name for path in leftovers.dead)
        num_bytes = size(sum(leftovers.dead.values()))
        figures.append(f"{names} of dead runs, {num_bytes}: the next start removes them, --resume goes on with its own")
    if leftovers.orphans:
        figures.append(", ".join(f"{role} ({pid}) without its launcher" for pid, role in leftovers.orphans))
        pids = " ".join(str(pid) for pid, _ in leftovers.orphans)
        remedies.append(f"kill {pids}, unless systemd runs them")
    if leftovers.in_use:
        names = ", ".join(path.name for path in leftovers.in_use)
        figures.append(f"a run goes on here ({names}, {size(sum(leftovers.in_use.values()))}) and shares the cores")
        remedies.append("fewer --actors for one of them, or wait for its end")
    told = "; ".join(figures) or "none: no files of dead runs, no programs without a launcher, no other run"
    return Check("leftovers", told, "warning" if remedies else "ok", "; ".join(remedies))


def _numbers(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version.partition("+")[0])[:3]]
