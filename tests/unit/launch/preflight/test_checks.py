"""Each check on simulated hosts: its figures, its verdict and its remedy."""

import dataclasses
import importlib.metadata
from functools import partial
from pathlib import Path

import pytest

from apex.config import ActorConfig, Config, LearnerConfig, ReplayConfig, RunConfig
from apex.launch.preflight.checks import (
    Room,
    check_cores,
    check_disk,
    check_gpu,
    check_kept,
    check_leftovers,
    check_link,
    check_native,
    check_packages,
    check_ports,
    check_processor,
    check_room,
    check_sizes,
    check_tmpfs,
    refused,
)
from apex.launch.preflight.leftovers import Leftovers, Orphan
from apex.launch.preflight.report import Check, require_all
from apex.launch.preflight.requirements import files_needed, gpu_bytes, memory_needed, store_bytes
from apex.runtime.gpu import Cuda, Gpu, version_name
from apex.runtime.hardware import FileLimit, Machine
from apex.schema import Schema
from apex.sizing import size_to_machine
from apexreplay.errors import UsageError
from apexreplay.native import NativeError
from apexreplay.process.limits import Space
from apexreplay.store.location import claim_path

GIB = 2**30
SHM = Path("/dev/shm")
PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
PLENTY = Room(
    memory=64 * GIB, available=60 * GIB, tmpfs=Space(32 * GIB, 32 * GIB), files=FileLimit(1_024, 4_096), gpu=0
)
H200 = Gpu("NVIDIA H200", 140 * GIB, (9, 0))
SIZED = size_to_machine(Config(), Machine(cores=4, memory_bytes=64 * GIB, gpu=False), PIXELS).config


@pytest.mark.parametrize(
    ("have", "need", "want", "verdict"),
    [(2, 2, 2, "ok"), (2, 2, 3, "warning"), (2, 3, 0, "short"), (2, 3, 3, "short"), (0, 0, 0, "ok")],
)
def test_the_verdict_compares_what_there_is_with_what_is_needed(have, need, want, verdict):
    assert Check("memory", have, need, want).verdict == verdict


def test_all_shortages_are_refused_together_with_their_remedies():
    checks = [Check("a", 1, 2, note="n1", remedy="r1"), Check("b", 1), Check("c", 0, 1, note="n2", remedy="r2")]
    with pytest.raises(UsageError) as error:
        require_all(checks)
    assert (error.value.problem, error.value.remedy) == ("a: n1; c: n2", "r1; r2")
    require_all([Check("b", 1), Check("d", 1, want=2)])


@pytest.mark.parametrize("text", ["cannot open map a.txt; 3 other maps exist", "map: a.txt"])
def test_a_problem_is_never_split(text):
    check = refused("environment", UsageError(text), "see --help")
    assert (check.verdict, check.note, check.remedy) == ("short", text, "see --help")
    assert refused("keys", UsageError(text, "fix; it: now"), "see --help").remedy == "fix; it: now"


@pytest.mark.parametrize(
    ("installed", "requirement", "usable"),
    [
        ("2.13.0+cpu", "torch>=2.6", True),
        ("2.5.1+cu124", "torch>=2.6", False),
        (None, "torch", False),
        ("1.4.0", "torch[atari,box2d]>=1.1", True),
        ("0.12.10", "torch>=0.12.9", True),
        (None, 'torch>=1; extra == "dev"', True),
    ],
)
def test_packages_are_compared_with_the_requirements(installed, requirement, usable, monkeypatch):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    check = check_packages({"python": "3.11.7", "torch": installed}, [requirement])
    assert check.verdict == ("ok" if usable else "short")
    assert ("3.11.7" if usable else f"({installed or 'missing'})") in check.note


@pytest.mark.parametrize(
    ("problems", "verdict", "remedy"),
    [(["", ""], "ok", ""), (["", "build"], "warning", "C compiler"), (["cpu", ""], "warning", "CPU")],
)
def test_missing_native_loops_are_a_warning(problems, verdict, remedy):
    def find(problem):
        if problem:
            raise NativeError(problem, "why")

    check = check_native({f"loop-{i}": partial(find, problem) for i, problem in enumerate(problems)})
    assert (check.verdict, check.have, check.want) == (verdict, problems.count(""), 2)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("architecture", "has", "on_gpu", "verdict"),
    [
        ("x86_64", False, False, "warning"),
        ("x86_64", False, True, "ok"),
        ("x86_64", True, False, "ok"),
        ("aarch64", False, False, "short"),
    ],
)
def test_the_processor_is_x86_and_not_slow_in_bfloat16(architecture, has, on_gpu, verdict):
    check = check_processor(architecture, LearnerConfig(bfloat16="on"), has_bfloat16=has, on_gpu=on_gpu)
    assert check.verdict == verdict
    assert architecture in check.note
    assert check_processor("x86_64", LearnerConfig(), has_bfloat16=has, on_gpu=on_gpu).verdict == "ok"


@pytest.mark.parametrize(
    ("device", "cuda", "verdict", "remedy"),
    [
        ("auto", Cuda(0, 0, ()), "ok", ""),
        ("cuda", Cuda(0, 0, ()), "short", "docker run --gpus all"),
        ("cuda", Cuda(12_040, 12_040, ()), "short", "--device cpu"),
        ("auto", Cuda(12_040, 12_040, (H200,)), "ok", ""),
        ("cuda", Cuda(12_040, 12_040, (H200,)), "ok", ""),
        ("cpu", Cuda(12_040, 0, (H200,)), "ok", ""),
        ("auto", Cuda(12_040, 0, (H200,)), "warning", " --index-url https://download.pytorch.org/whl/cu126"),
        ("cuda", Cuda(13_010, 0, (H200,)), "short", " --index-url https://download.pytorch.org/whl/cu130"),
        ("auto", Cuda(12_040, 13_000, (H200,)), "warning", " --index-url https://download.pytorch.org/whl/cu126"),
        ("cuda", Cuda(11_080, 13_000, (H200,)), "short", "update the driver"),
        ("cuda", Cuda(12_080, 13_000, (H200._replace(capability=(10, 0)),)), "short", "update the driver"),
        ("cuda", Cuda(13_000, 0, (H200._replace(capability=(7, 0)),)), "short", "torch==2.9+cu126"),
    ],
)
def test_an_unusable_gpu_is_named_with_its_remedy(device, cuda, verdict, remedy):
    check = check_gpu(device, cuda, "2.9")
    assert check.verdict == verdict
    assert f"--device {device}" in check.note
    assert all(text in check.note for text in ("NVIDIA H200", "140.0 GiB", version_name(cuda.driver)) if cuda.gpus)
    assert remedy in check.remedy


def test_one_core_is_a_warning():
    check = check_cores(host=64, affinity=8, limits=[4.0, 1.5])
    assert (check.have, check.verdict) == (1.5, "warning")
    assert check_cores(host=8, affinity=1, limits=[]).verdict == "warning"
    assert check_cores(host=64, affinity=8, limits=[4.0]).verdict == "ok"


def find(room, name, config=SIZED):
    return next(check for check in check_room(config, PIXELS, room) if check.name == name)


def verdicts(room, config=SIZED):
    return {check.name: check.verdict for check in check_room(config, PIXELS, room) if check.verdict != "ok"}


def test_a_large_host_has_room_for_everything():
    assert verdicts(PLENTY) == {}
    names = ["memory", "free memory", "tmpfs", "open files"]
    assert [check.name for check in check_room(SIZED, PIXELS, PLENTY)] == names


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory": GIB}, {"memory": "short"}),
        ({"available": GIB}, {"free memory": "short"}),
        ({"tmpfs": Space(GIB, GIB)}, {"tmpfs": "short"}),
        ({"tmpfs": Space(2**40, 2**40, "is not writable")}, {"tmpfs": "short"}),
        ({"files": FileLimit(64, 64)}, {"open files": "short"}),
        ({"files": FileLimit(64, 4_096)}, {}),  # A run raises the soft limit.
        ({"gpu": GIB}, {"GPU memory": "short"}),
        ({"gpu": 80 * GIB}, {}),
    ],
)
def test_each_resource_can_be_short_alone(changes, expected):
    assert verdicts(PLENTY._replace(**changes)) == expected


def test_the_bounds_are_exact():
    needed, files = memory_needed(SIZED, PIXELS, cuda=False), files_needed(SIZED)
    exact = PLENTY._replace(
        memory=needed.total,
        available=needed.total,
        tmpfs=Space(2**40, store_bytes(SIZED, PIXELS)),
        files=FileLimit(files, files),
    )
    assert verdicts(exact) == {}
    assert verdicts(exact._replace(memory=needed.total - 1)) == {"memory": "short"}
    assert verdicts(exact._replace(available=needed.total - 1)) == {"free memory": "warning"}  # an estimate
    assert verdicts(exact._replace(available=needed.store)) == {"free memory": "warning"}
    assert verdicts(exact._replace(available=needed.store - 1)) == {"free memory": "short"}
    assert verdicts(exact._replace(tmpfs=Space(2**40, exact.tmpfs.free - 1))) == {"tmpfs": "short"}
    assert verdicts(exact._replace(files=FileLimit(files - 1, files - 1))) == {"open files": "short"}
    assert str(files) in find(exact, "open files").remedy
    gpu = gpu_bytes(SIZED, PIXELS)
    assert find(exact._replace(gpu=gpu), "GPU memory").verdict == "ok"
    assert find(exact._replace(gpu=gpu - 1), "GPU memory").verdict == "short"


def test_the_remedy_for_a_small_tmpfs_is_large_enough():
    check = check_tmpfs(300 * 2**20, Space(64 * 2**20, 60 * 2**20), SHM)
    assert (check.verdict, check.have, check.need) == ("short", 60 * 2**20, 300 * 2**20)
    assert "--shm-size=1g" in check.remedy
    assert "remount,size=1g /dev/shm" in check.remedy
    assert "--shm-size=4g" in check_tmpfs(2 * GIB + 1, Space(2 * GIB, GIB), SHM).remedy  # Used space stays used.


@pytest.mark.parametrize(
    ("setting", "link", "note"),
    [
        (0, 10**10, "312.5 MB/s to all hosts, a quarter of the link's 10 Gbit/s;"),
        (0, 0, "312.5 MB/s to all hosts, a quarter of the link's 10 Gbit/s, which are assumed;"),
        (5_000_000, 10**9, "5 MB/s to all hosts"),
    ],
)
def test_the_budget_of_the_parameters_is_named(setting, link, note):
    check = check_link(Config(learner=LearnerConfig(publish_bytes_per_second=setting)), link)
    assert (check.verdict, note in check.note) == ("ok", True), check.note


def test_many_actors_need_more_open_files():
    many = dataclasses.replace(SIZED, actor=ActorConfig(num_actors=65_536, num_processes=1, envs_per_process=1))
    assert verdicts(PLENTY, many) == {"open files": "short"}


def test_a_small_disk_is_a_warning_and_a_missing_folder_is_short(tmp_path):
    assert check_disk(1, tmp_path / "new" / "runs").verdict == "ok"
    small = check_disk(2**62, tmp_path)
    (tmp_path / "file").touch()
    blocked = check_disk(1, tmp_path / "file" / "runs")
    assert (small.verdict, small.want, blocked.verdict) == ("warning", 2**62, "short")
    assert "--run.folder" in small.remedy
    assert "--run.folder" in blocked.remedy


@pytest.mark.parametrize(
    ("config", "warnings"),
    [
        (Config(), {}),
        (Config(actor=ActorConfig(num_actors=9, num_processes=2, envs_per_process=2)), {"actors": (4, 9)}),
        (Config(actor=ActorConfig(num_actors=9, envs_per_process=2), run=RunConfig(head=True)), {}),
        (Config(actor=ActorConfig(num_processes=3)), {"threads": (2, 3)}),
        (Config(learner=LearnerConfig(num_threads=64, num_loaders=2)), {"threads": (2, 64)}),
        (Config(replay=ReplayConfig(max_bytes=4_096)), {"capacity": (163, 50_000)}),
    ],
)
def test_sizes_that_contradict_each_other_are_warnings(config, warnings):
    checks = check_sizes(size_to_machine(config, Machine(cores=2, memory_bytes=2**35, gpu=False), VECTORS))
    assert {check.name: (check.have, check.want) for check in checks if check.verdict != "ok"} == warnings


@pytest.mark.parametrize(
    ("taken", "verdict", "offset", "tensorboard"),
    [((), "ok", 0, 6_006), ((21_001, 6_006), "warning", 100, 6_007), (range(65_536), "short", 0, 6_006)],
)
def test_used_ports_are_a_warning_because_the_run_takes_others(taken, verdict, offset, tensorboard):
    check, config = check_ports(Config(), lambda host, port: port not in taken)
    assert check.verdict == verdict
    assert (config.transport.port_offset, config.run.tensorboard_port) == (offset, tensorboard)
    if verdict != "short":
        ports = [*(port for _, port in config.ports), tensorboard]
        assert all(str(port) in check.note for port in ports)


def test_files_of_dead_runs_need_no_action():
    dead = {SHM / "apex-1-0.replay": 3 * GIB, SHM / "apex-1-0.counters": 64}
    checks = check_leftovers(Leftovers(dead, {}, {}, []))
    assert {check.verdict for check in checks} == {"ok"}
    assert all(text in checks[0].note for text in ("apex-1-0.replay", "3.0 GiB", "apex-1-0.counters"))


def test_memories_of_killed_runs_are_a_warning_that_names_them(tmp_path):
    store = tmp_path / "apex-1-0.replay"
    claim_path(store).write_text("0-0:0:/data/runs/first")
    check = check_kept({store: 3 * GIB, tmp_path / "apex-2-0.replay": GIB})
    assert check.verdict == "warning"
    assert all(text in check.note for text in ("/data/runs/first", "3.0 GiB", "apex-2-0.replay", "1.0 GiB"))
    assert "doctor --clean" in check.remedy
    assert check_kept({}).verdict == "ok"


def test_orphans_and_other_runs_are_warnings():
    orphans = [Orphan(7, "apex.actor"), Orphan(8, "apex.replay")]
    leftovers = Leftovers({}, {}, {SHM / "apex-2-0.replay": GIB}, orphans)
    _, orphans, others = check_leftovers(leftovers)
    assert (orphans.verdict, others.verdict) == ("warning", "warning")
    assert "kill 7 8" in orphans.remedy
    assert "apex-2-0.replay" in others.note
