"""Each shortage: its figures, its verdict and its remedy, on hosts that are not there."""

import dataclasses
from pathlib import Path

import pytest

from apex.config import ActorConfig, Config, LearnerConfig
from apex.config.sizing import Machine, size_to_machine
from apex.errors import UsageError
from apex.launch.preflight.checks import (
    Check,
    Room,
    check_cores,
    check_disk,
    check_files,
    check_gpu,
    check_gpu_memory,
    check_leftovers,
    check_memory,
    check_native,
    check_packages,
    check_ports,
    check_processor,
    check_room,
    check_threads,
    check_tmpfs,
    require_all,
)
from apex.launch.preflight.leftovers import Leftovers, Orphan
from apex.launch.preflight.requirements import Memory, files_needed
from apex.runtime.gpu import Cuda, Gpu
from apex.runtime.hardware import FileLimit, Space
from apex.types import Schema

GIB = 2**30
SHM = Path("/dev/shm")
PIXELS = Schema(frame_shape=(84, 84), frame_dtype="uint8", stack=4, num_actions=6, n_step=3, codec="lz4")
PLENTY = Room(
    memory=64 * GIB, available=60 * GIB, tmpfs=Space(32 * GIB, 32 * GIB), files=FileLimit(1_024, 4_096), gpu=0
)
H200 = Gpu("NVIDIA H200", 140 * GIB, (9, 0))
SIZED = size_to_machine(Config(), Machine(cores=4, memory_bytes=64 * GIB, gpu=False), PIXELS)


def judge(check):
    return check.verdict, check.remedy


# The software


def test_packages_are_named_with_their_versions():
    versions = {"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.0"}
    requirements = ["torch>=2.6", "numpy>=2.0", "gymnasium[atari,box2d]>=1.1", 'mypy>=1.15; extra == "dev"']
    assert check_packages(versions, requirements) == Check("software", "python 3.11.7, torch 2.13.0+cpu, numpy 2.0")


@pytest.mark.parametrize(
    ("versions", "requirement", "said"),
    [
        ({"torch": None}, "torch>=2.6", "torch is missing"),
        ({"torch": None}, "torch", "torch is missing"),
        ({"torch": "2.5.1+cu124"}, "torch>=2.6", "torch 2.5.1+cu124 is older than 2.6"),
        ({"gymnasium": "0.29.1"}, "gymnasium[atari,box2d]>=1.1", "gymnasium 0.29.1 is older than 1.1"),
        ({"ale-py": "0.12.0"}, "ale-py>=0.12.1", "ale-py 0.12.0 is older than 0.12.1"),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_short(versions, requirement, said):
    check = check_packages(versions, [requirement])
    assert check.figures.endswith(said)
    assert judge(check) == ("short", "pip install --upgrade -e . in this environment")


def test_version_numbers_are_compared_as_numbers():
    assert check_packages({"ale-py": "0.12.10"}, ["ale-py>=0.12.9"]).verdict == "ok"


def test_native_loops_are_told_and_the_absence_of_any_is_a_warning():
    assert check_native("liblz4 1.9.4", "convolution") == Check("native loops", "liblz4 1.9.4, convolution")
    without = check_native("liblz4 1.9.4", "none: not built: no C compiler; an update takes longer")
    assert (without.verdict, "C compiler" in without.remedy) == ("warning", True)
    older = check_native("liblz4 1.9.4", "none: the CPU lacks AVX2 or FMA; an update takes longer")
    assert (older.verdict, "newer CPU" in older.remedy) == ("warning", True)
    assert without.figures == "not available: not built: no C compiler; an update takes longer"


# The processor


@pytest.mark.parametrize(
    ("has", "said"), [(True, "bfloat16 is faster for wide networks"), (False, "would be slower than float32")]
)
def test_the_processor_is_x86_and_has_bfloat16_or_not(has, said):
    check = check_processor("x86_64", LearnerConfig(), has_bfloat16=has, on_gpu=False)
    assert (check.verdict, said in check.figures) == ("ok", True)


def test_another_processor_is_short():
    check = check_processor("aarch64", LearnerConfig(), has_bfloat16=False, on_gpu=False)
    assert "this host has aarch64" in check.figures
    assert judge(check) == ("short", "run on an x86-64 host")


@pytest.mark.parametrize(
    ("has", "on_gpu", "verdict"), [(False, False, "warning"), (False, True, "ok"), (True, False, "ok")]
)
def test_bfloat16_on_a_processor_without_it_is_a_warning(has, on_gpu, verdict):
    learner = LearnerConfig(bfloat16="on")
    check = check_processor("x86_64", learner, has_bfloat16=has, on_gpu=on_gpu)
    assert judge(check) == (verdict, "set --learner.bfloat16 auto" if verdict == "warning" else "")


# The GPU


@pytest.mark.parametrize(
    ("device", "cuda", "verdict", "figures", "remedy"),
    [
        ("auto", Cuda(0, 0, ()), "ok", "computes on the CPU", ""),
        (
            "cuda",
            Cuda(0, 0, ()),
            "short",
            "the driver (libnvidia-ml.so.1) is missing",
            "docker run --gpus all",
        ),
        ("cuda", Cuda(12_040, 12_040, ()), "short", "--device cuda, but no GPU was found", "--device cpu"),
        ("auto", Cuda(12_040, 12_040, (H200,)), "ok", "NVIDIA H200, 140.0 GiB, driver for CUDA 12.4, torch 2.9", ""),
        ("cpu", Cuda(12_040, 0, (H200,)), "ok", "the GPU is not used", ""),
        ("auto", Cuda(12_040, 0, (H200,)), "warning", "torch 2.9 is built for the CPU only", "pip install --force"),
        ("cuda", Cuda(12_040, 0, (H200,)), "short", "torch 2.9 is built for the CPU only", "pip install --force"),
        ("auto", Cuda(12_040, 13_000, (H200,)), "warning", "for CUDA 13.0, which is newer", "update the driver"),
        ("cuda", Cuda(12_040, 13_000, (H200,)), "short", "for CUDA 13.0, which is newer", "update the driver"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_named_with_its_remedy(device, cuda, verdict, figures, remedy):
    check = check_gpu(device, cuda, "2.9")
    assert check.verdict == verdict
    assert figures in check.figures
    assert remedy in check.remedy
    assert bool(check.remedy) == (verdict != "ok")


@pytest.mark.parametrize(("there", "verdict"), [(2 * GIB, "ok"), (2 * GIB - 1, "short")])
def test_too_large_an_update_for_the_gpu_is_short(there, verdict):
    check = check_gpu_memory(2 * GIB, there)
    assert judge(check) == (verdict, "lower --learner.batch-size, or --device cpu" if verdict == "short" else "")


# Room


def test_cores_are_what_the_narrowest_limit_leaves():
    check = check_cores(2, host=64, affinity=8, limits=[4.0, 1.5])
    assert check.figures.startswith("2 usable: the host has 64, CPU affinity allows 8, the control group allows 1.5")
    assert check.verdict == "warning"
    assert check_cores(4, host=64, affinity=8, limits=[4.0]).verdict == "ok"


def test_one_core_is_a_warning():
    assert judge(check_cores(1, host=8, affinity=1, limits=[])) == (
        "warning",
        "use two or more cores: docker run --cpus=2, or taskset",
    )


NEEDED = Memory(store=2 * GIB, actors=GIB, learner=GIB, others=GIB)


@pytest.mark.parametrize(
    ("memory", "available", "verdict"),
    [
        (5 * GIB, 5 * GIB, "ok"),
        (5 * GIB, 5 * GIB - 1, "warning"),  # Others may end; and most of it is an estimate.
        (5 * GIB, 2 * GIB, "warning"),
        (5 * GIB, 2 * GIB - 1, "short"),  # The store is allocated at the start.
        (5 * GIB - 1, 5 * GIB, "short"),
    ],
)
def test_memory_is_short_where_the_run_or_its_store_cannot_fit(memory, available, verdict):
    check = check_memory(NEEDED, PLENTY._replace(memory=memory, available=available))
    assert check.verdict == verdict
    assert "needs about 5.0 GiB: 2.0 GiB replay memory, 1.0 GiB actors, 1.0 GiB learner" in check.figures
    assert bool(check.remedy) == (verdict != "ok")


def test_a_containers_64_mib_of_tmpfs_are_short_and_the_remedy_is_enough():
    small = PLENTY._replace(tmpfs=Space(64 * 2**20, 60 * 2**20))
    check = check_tmpfs(300 * 2**20, small, SHM)
    assert check.figures == "needs 300 MiB of tmpfs for the replay memory, /dev/shm has 60 MiB free of 64 MiB"
    assert check.verdict == "short"
    assert check.remedy.startswith("docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm; or lower")
    used = PLENTY._replace(tmpfs=Space(2 * GIB, GIB))
    assert "--shm-size=4g" in check_tmpfs(2 * GIB + 1, used, SHM).remedy  # What is used stays used.


def test_exactly_enough_tmpfs_is_enough():
    assert check_tmpfs(GIB, PLENTY._replace(tmpfs=Space(GIB, GIB)), SHM).verdict == "ok"
    assert check_tmpfs(GIB + 1, PLENTY._replace(tmpfs=Space(9 * GIB, GIB)), SHM).verdict == "short"


def test_open_files_are_raised_as_far_as_the_hard_limit_goes_and_short_beyond():
    needed, _ = files_needed(SIZED)
    assert judge(check_files(SIZED, FileLimit(needed, needed))) == ("ok", "")
    raised = check_files(SIZED, FileLimit(needed - 1, needed))
    assert (raised.verdict, raised.figures.endswith("apex train raises the limit automatically")) == ("ok", True)
    short = check_files(SIZED, FileLimit(needed - 1, needed - 1))
    assert short.verdict == "short"
    assert f"one process may need {needed} open files = 64 + 2 x 2 actor processes" in short.figures
    assert short.remedy.startswith(f"ulimit -n {needed} as root, docker run --ulimit nofile={needed}")


@pytest.mark.parametrize(
    ("free", "writable", "verdict", "remedy"),
    [
        (GIB, True, "ok", ""),
        (GIB - 1, True, "warning", "set --run.folder DIR on a larger disk"),
        (GIB, False, "short", "set --run.folder DIR"),
    ],
)
def test_a_small_disk_is_a_warning_and_one_that_cannot_be_written_is_short(free, writable, verdict, remedy):
    check = check_disk(GIB, Path("/runs"), Space(9 * GIB, free), writable=writable)
    assert check.verdict == verdict
    assert check.remedy.startswith(remedy)


def test_threads_and_loaders_beyond_the_cores_are_a_warning():
    assert check_threads(Config(), 2).verdict == "ok"
    check = check_threads(Config(learner=LearnerConfig(num_threads=64, num_loaders=2)), 2)
    assert judge(check) == ("warning", "remove --learner.num-threads, so that the defaults apply")
    assert "--learner.num-threads 64: more than the 2 cores" in check.figures


def test_free_ports_are_named():
    check, config = check_ports(Config(), lambda host, port: True)
    assert check.figures == "6006, 21001, 21002, 21003, 22001, 22002, 22003, 22004 on 127.0.0.1: all free"
    assert (check.verdict, config) == ("ok", Config())


def test_taken_ports_are_a_warning_because_the_run_moves_aside():
    check, config = check_ports(Config(), lambda host, port: port not in (21_001, 6_006))
    assert check.verdict == "warning"
    assert "this run uses --transport.port-offset 100; port 6006 is in use: TensorBoard uses port 6007" in check.remedy
    assert (config.transport.port_offset, config.run.tensorboard_port) == (100, 6_007)


def test_without_any_free_port_it_is_short():
    check, config = check_ports(Config(), lambda host, port: False)
    assert check.verdict == "short"
    assert "--transport.port-offset 0;" in check.figures
    assert config == Config()


# What others left


def test_nothing_left_is_said():
    assert check_leftovers(Leftovers({}, {}, [])).verdict == "ok"


def test_files_of_dead_runs_are_named_and_need_nothing():
    check = check_leftovers(Leftovers({SHM / "apex-1-0.replay": 3 * GIB, SHM / "apex-1-0.board": 64}, {}, []))
    assert check.figures.startswith(
        "files of dead runs: apex-1-0.replay, apex-1-0.board, 3.0 GiB; the next start removes them"
    )
    assert judge(check) == ("ok", "")


def test_programs_without_a_launcher_and_other_runs_are_warnings():
    leftovers = Leftovers({}, {SHM / "apex-2-0.replay": GIB}, [Orphan(7, "apex.actor"), Orphan(8, "apex.replay")])
    check = check_leftovers(leftovers)
    assert "apex.actor (7) without its launcher, apex.replay (8) without its launcher" in check.figures
    assert "other runs use this host: their replay memory is apex-2-0.replay, 1.0 GiB" in check.figures
    assert check.verdict == "warning"
    assert check.remedy.startswith("kill 7 8, unless systemd manages these processes; use fewer --actors")


# All of them


def test_everything_that_is_short_is_refused_in_one_sentence_with_its_remedy():
    checks = [Check("a", "1 of 2", "short", "more"), Check("b", "fine"), Check("c", "0", "short", "less")]
    with pytest.raises(UsageError, match=r"^a: 1 of 2 -> more; c: 0 -> less$"):
        require_all(checks)
    require_all([Check("b", "fine"), Check("d", "nearly", "warning", "more")])


def shortages(room, config=SIZED):
    return [check.name for check in check_room(config, PIXELS, room) if check.verdict == "short"]


def test_a_host_with_room_for_everything_is_short_of_nothing():
    assert shortages(PLENTY) == []
    assert [check.name for check in check_room(SIZED, PIXELS, PLENTY)] == ["memory", "tmpfs", "open files"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory": GIB}, ["memory"]),
        ({"available": GIB}, ["memory"]),
        ({"tmpfs": Space(GIB, GIB)}, ["tmpfs"]),
        ({"files": FileLimit(64, 64)}, ["open files"]),
        ({"gpu": GIB}, ["GPU memory"]),
        ({"gpu": 80 * GIB}, []),
    ],
)
def test_each_thing_can_be_short_by_itself(changes, expected):
    assert shortages(PLENTY._replace(**changes)) == expected


def test_the_run_that_is_asked_for_decides_what_is_short():
    many = dataclasses.replace(SIZED, actor=ActorConfig(num_actors=65_536, num_processes=1, envs_per_process=1))
    assert shortages(PLENTY, many) == ["open files"]
