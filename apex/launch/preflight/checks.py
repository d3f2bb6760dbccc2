"""Checks whether a run can start on this host: one function per requirement, with figures and a remedy.

`apex doctor` prints all checks. `apex train` makes those that can refuse a run, with the same sentences. The
result of a check depends only on its arguments.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from apex.config import Config, LearnerConfig
from apex.launch.preflight.leftovers import Leftovers, bytes_to_come
from apex.launch.preflight.report import Check
from apex.launch.preflight.requirements import files_needed, gpu_bytes, memory_needed, store_bytes
from apex.learning.parameter_publisher import ASSUMED_LINK, publish_budget
from apex.runtime.gpu import Cuda, version_name
from apex.runtime.hardware import FileLimit, Machine, read_file_limit
from apex.runtime.ports import choose_ports
from apex.schema import Schema
from apex.sizing import Sized
from apexreplay.errors import UsageError
from apexreplay.native import NativeError
from apexreplay.process.limits import Space, read_available_memory, read_space
from apexreplay.process.text import size
from apexreplay.store.file import require_processor
from apexreplay.store.location import MEMORY, read_run_folder

GIB = 2**30
# Builds of torch 2.13, newest first: major version of CUDA, lowest capability, and the one above the highest
# (https://github.com/pytorch/pytorch, RELEASE.md).
BUILDS = {"cu130": (13, (7, 5), (13, 0)), "cu126": (12, (5, 0), (10, 0))}


class Room(NamedTuple):
    """The resources of a host."""

    memory: int  # bytes of memory that this process may use in total
    available: int  # bytes of unused memory, including the bytes that the start of a run would free
    tmpfs: Space  # its free space includes the bytes that the start of a run would free, if needed
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


def check_link(config: Config, link: int) -> Check:
    """Names the budget of the parameters; `link`: bits per second, 0: unknown."""
    budget = f"parameters: at most {publish_budget(config, link) / 1e6:g} MB/s to all hosts"
    if config.learner.publish_bytes_per_second:
        return Check("network", 1, note=budget)
    known = f"a quarter of the link's {(link or ASSUMED_LINK) / 1e9:g} Gbit/s" + ("" if link else ", which are assumed")
    return Check("network", 1, note=f"{budget}, {known}; change it with --learner.publish-bytes-per-second")


def check_room(config: Config, schema: Schema, room: Room) -> list[Check]:
    """Compares what a run with this sized configuration needs with what the host has.

    All needed memory except that of the store, which is allocated at the start, is an estimate.
    """
    memory, files = memory_needed(config, schema, cuda=bool(room.gpu)), files_needed(config)
    parts = ", ".join(f"{size(num_bytes)} {part}" for part, num_bytes in memory._asdict().items())
    less = "lower --replay.capacity or --actor.num-processes, or end other programs"
    raise_limit = f"ulimit -n {files} as root, docker run --ulimit nofile={files}, or LimitNOFILE={files} in systemd"
    checks = [
        Check("memory", room.memory, memory.total, unit="bytes", note=parts, remedy=less),
        Check("free memory", room.available, memory.store, memory.total, unit="bytes", remedy=less),
        check_tmpfs(store_bytes(config, schema), room.tmpfs, MEMORY),
        Check("open files", room.files.hard, files, unit="files", remedy=f"{raise_limit}; or use fewer actors"),
    ]
    if room.gpu:
        remedy = "lower --learner.batch-size, or use --device cpu"
        checks.append(Check("GPU memory", room.gpu, gpu_bytes(config, schema), unit="bytes", remedy=remedy))
    return checks


def check_tmpfs(needed: int, tmpfs: Space, folder: Path) -> Check:
    """Checks the tmpfs at `folder`, because the replay memory is a file there, allocated at the start."""
    more = -(-(needed - tmpfs.free + tmpfs.size) // GIB)
    note = f"free of {size(tmpfs.size)} in {folder}"
    remedy = f"docker run --shm-size={more}g, or mount -o remount,size={more}g"
    if tmpfs.flaw:
        note, remedy = f"{folder} {tmpfs.flaw}", "docker run --shm-size, mount -t tmpfs tmpfs, or mount -o remount,rw"
    remedy = f"{remedy} {folder}; or lower --replay.capacity or --replay.max-bytes"
    return Check("tmpfs", 0 if tmpfs.flaw else tmpfs.free, needed, unit="bytes", note=note, remedy=remedy)


def refused(name: str, error: UsageError, remedy: str = "") -> Check:
    """Returns the check for something that cannot be used; `remedy` is used if the error has none."""
    return Check(name, 0, 1, note=error.problem, remedy=error.remedy or remedy)


def check_sizes(sized: Sized) -> list[Check]:
    """Checks that the sizes suit the machine: configured sizes may be too large for it or for each other."""
    actor, learner, cores = sized.config.actor, sized.config.learner, sized.machine.cores
    streams = actor.num_actors if sized.config.run.head else actor.num_processes * actor.envs_per_process
    threads = {"actors": sized.actor_cores, "learner": learner.num_threads, "loaders": learner.num_loaders}
    most, note = max(threads.values()), ", ".join(f"{part} {number}" for part, number in threads.items())
    defaults = "leave out --actor.num-processes, --actor.num-threads, --learner.num-threads and --learner.num-loaders"
    more_hosts = "start apex actor on other hosts, or raise --actor.num-processes or --actor.envs-per-process"
    more_room = "raise --replay.max-bytes, or lower --replay.min-size-to-sample"
    fit, begin = sized.config.replay.max_bytes // sized.transition_bytes, sized.config.replay.min_size_to_sample
    return [
        Check("threads", cores, want=most, unit="cores", note=f"threads: {note}", remedy=defaults),
        Check("actors", streams, want=actor.num_actors, unit="environments", note="one per actor", remedy=more_hosts),
        Check("capacity", fit, want=begin, unit="transitions", note="before training starts", remedy=more_room),
    ]


def check_limit(config: Config) -> Check:
    """Checks that a limit of steps does not end the run before its first update."""
    limit, begin = config.run.max_steps, config.replay.min_size_to_sample * config.steps_per_item
    note = f"run.max_steps {limit:,}, updates begin at {begin:,} steps (replay.min_size_to_sample)"
    remedy = f"raise --max-steps well above {begin}, or lower --replay.min-size-to-sample"
    return Check("first update", int(not limit or limit >= begin), 1, note=note, remedy=remedy)


def check_packages(versions: Mapping[str, str | None], requirements: Sequence[str]) -> Check:
    """Checks the installed packages against `requirements` such as "torch>=2.6". The report shows `versions`."""
    from packaging.requirements import Requirement  # Imported here because only `apex doctor` needs it.

    needed = [each for each in map(Requirement, requirements) if not each.marker or each.marker.evaluate({"extra": ""})]
    bad = []
    for each in needed:
        try:
            version = importlib.metadata.version(each.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        if version == "missing" or not each.specifier.contains(version, prereleases=True):
            bad.append(f"{each} ({version})")
    note = ", ".join(bad or [f"{name} {version}" for name, version in versions.items() if version])
    return Check(
        "software", len(needed) - len(bad), len(needed), note=note, remedy="pip install --upgrade -e ./apexreplay -e ."
    )


def check_native(loops: Mapping[str, Callable[[], object]]) -> Check:
    """Checks whether the compiled loops, which these functions load, can be used. Without them, a run is slower."""
    missing = {}
    for name, find in loops.items():
        try:
            find()
        except NativeError as error:
            missing[name] = error
    remedy = "install a C compiler and liblz4, then pip install -e ./apexreplay -e . again"
    if all(error.problem == "cpu" for error in missing.values()):
        remedy = "use a newer CPU; no package can replace the missing instructions"
    note = "; ".join(f"{name}: {error}" for name, error in missing.items()) or ", ".join(loops)
    return Check("native loops", len(loops) - len(missing), want=len(loops), note=note, remedy=remedy)


def check_processor(architecture: str, learner: LearnerConfig, *, has_bfloat16: bool, on_gpu: bool) -> Check:
    """Checks that the CPU keeps the order of stores, which lock-free reads rely on, and whether bfloat16 is fast."""
    try:
        require_processor(architecture)
    except UsageError as error:
        return refused("CPU", error)
    wants = learner.bfloat16 == "on" and not on_gpu
    note = f"{architecture}, {'with' if has_bfloat16 else 'without'} bfloat16 (AVX512-BF16 or AMX)"
    return Check("CPU", int(has_bfloat16), want=int(wants), note=note, remedy="set --learner.bfloat16 auto")


def check_gpu(device: str, cuda: Cuda, torch_version: str) -> Check:
    """Checks whether torch can use the GPU. If not: "short" if a GPU was requested, else "warning"."""
    note = f"no GPU was found{'' if cuda.driver else ', and no driver (libnvidia-ml.so.1)'}"
    remedy = "install NVIDIA's driver; in a container use docker run --gpus all"
    for gpu in cuda.gpus[:1]:
        built_for = f"CUDA {version_name(cuda.torch)}" if cuda.torch else "the CPU only"
        driver = f"driver for CUDA {version_name(cuda.driver)}"
        note = f"{gpu.name}, {size(gpu.memory_bytes)}, {driver}, torch {torch_version} for {built_for}"
        builds = (
            name
            for name, (major, lowest, above) in BUILDS.items()
            if cuda.driver // 1000 >= major and lowest <= gpu.capability < above
        )
        remedy = "update the driver: no build of torch fits it and this GPU"
        if build := next(builds, ""):
            torch = f"torch=={torch_version.partition('+')[0]}+{build}"
            remedy = f"pip install {torch} --index-url https://download.pytorch.org/whl/{build}"
    want = int(device == "auto" and bool(cuda.gpus))
    note, remedy = f"--device {device}: {note}", f"{remedy}; or use --device cpu"
    return Check("GPU", int(cuda.usable), int(device == "cuda"), want, note=note, remedy=remedy)


def check_cores(*, host: int, affinity: int, limits: Sequence[float]) -> Check:
    """Checks that actors and learner need not share one core. `limits`: cores that the control groups allow."""
    note = f"the host has {host}, CPU affinity allows {affinity}, control groups allow {min(limits, default=host):g}"
    remedy = "use two or more cores: docker run --cpus=2, or taskset"
    return Check("cores", min([float(affinity), *limits]), want=2, unit="cores", note=note, remedy=remedy)


def check_logout(affected: str) -> Check:
    """Checks whether logging out removes the replay memory. `affected`: user name or "", see `find_affected`."""
    note = "the replay memory stays when you log out"
    if affected:
        note = f"systemd-logind removes the replay memory when the last session of {affected} ends (RemoveIPC=yes)"
    remedy = f"loginctl enable-linger {affected}, or stay logged in until the run ends, for example in tmux"
    return Check("logout", int(not affected), want=1, note=note, remedy=remedy)


def check_disk(needed: int, folder: Path) -> Check:
    """Checks the disk of the run folders. A full disk does not end a run, but prevents checkpoints."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    space = read_space(there)
    if space.flaw or not there.is_dir():
        return Check("disk", 0, 1, note=f"{there} {space.flaw or 'is not a folder'}", remedy="set --run.folder DIR")
    remedy = "set --run.folder DIR on a larger disk, add --checkpoint.no-replay, or lower --checkpoint.keep"
    return Check("disk", space.free, want=needed, unit="bytes", note=str(folder), remedy=remedy)


def check_ports(config: Config, free: Callable[[str, int], bool]) -> tuple[Check, Config]:
    """Checks the ports of the run and of TensorBoard; also returns the configuration with the ports to be used."""
    try:
        chosen = choose_ports(config, free, lambda sentence: None)
    except UsageError as error:
        return refused("ports", error, "stop the program that uses the port, or set --transport.port-offset"), config
    ports = sorted({port for _, port in chosen.ports} | {chosen.run.tensorboard_port})
    note = f"{', '.join(map(str, ports))} on {config.transport.bind}"
    remedy = "nothing to do: the configured ports are in use, and the run uses these instead"
    return Check("ports", int(chosen == config), want=1, note=note, remedy=remedy), chosen


def check_kept(kept: Mapping[Path, int]) -> Check:
    """Reports the memories of killed runs, which take memory until the runs are resumed."""
    names = [f"{read_run_folder(path) or path.name} ({size(num_bytes)})" for path, num_bytes in kept.items()]
    note = f"of runs that were killed; a start removes them if it needs the space: {', '.join(names) or 'none'}"
    remedy = "continue these runs with apex train --resume RUN, or remove the memories with apex doctor --clean"
    return Check("killed runs", int(not kept), want=1, note=note, remedy=remedy)


def check_leftovers(leftovers: Leftovers) -> list[Check]:
    """Reports the files that no run can use, programs without a launcher, and other runs on the host."""
    orphans = ", ".join(f"{role} ({pid})" for pid, role in leftovers.orphans)
    kill = f"kill {' '.join(str(pid) for pid, _ in leftovers.orphans)}, unless systemd manages these processes"
    wait = "use fewer --actors for one of the runs, or wait until the other run ends"
    freed = "the next start removes files that no run can use any more: "
    return [
        Check("dead runs", 1, note=freed + _names(leftovers.dead)),
        Check(
            "orphans", int(not orphans), want=1, note=f"programs without a launcher: {orphans or 'none'}", remedy=kill
        ),
        Check("other runs", int(not leftovers.in_use), want=1, note=_names(leftovers.in_use), remedy=wait),
    ]


def _names(files: Mapping[Path, int]) -> str:
    return ", ".join(f"{path.name} ({size(num_bytes)})" for path, num_bytes in files.items()) or "none"
