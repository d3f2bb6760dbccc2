"""`apex doctor` on this host: what it prints, how it ends, and that it leaves nothing behind."""

import io
import json
import subprocess
import sys

import pytest

from apex.config import ActorConfig, Config, EnvironmentConfig, ReplayConfig, RunConfig, TransportConfig
from apex.config.sizing import Machine, size_to_machine
from apex.errors import FAILED, FINISHED, REFUSED
from apex.launch.preflight.checks import Check
from apex.launch.preflight.doctor import (
    Report,
    check_environment,
    check_keys,
    check_sizes,
    describe_report,
    examine,
    main,
    print_report,
    verdict,
)
from apex.runs.folder import RunFolder
from apex.types import Schema

NAMES = [
    "software",
    "native loops",
    "CPU",
    "cores",
    "threads",
    "logout",
    "GPU",
    "environment",
    "sizes",
    "memory",
    "tmpfs",
    "open files",
    "disk",
]
VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
BOX = Machine(cores=2, memory_bytes=2**35, gpu=False)


class Terminal(io.StringIO):
    """A stream that a person looks at."""

    def isatty(self):
        return True


def report(*checks, sizes=(), sized=None):
    return Report(list(checks), list(sizes), sized)


def run(tmp_path, *words, limit=""):
    command = f"{limit}exec {sys.executable} -m apex {' '.join(words)}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=tmp_path)


# The whole


def test_it_takes_the_options_of_a_run_and_ends_with_an_object(tmp_path):
    done = run(tmp_path, "doctor", "--preset", "cartpole", "--actors", "3", "--device", "cpu", "--json")
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    assert [check["name"] for check in found["checks"]][: len(NAMES)] == NAMES
    assert found["can_start"] == all(check["verdict"] != "short" for check in found["checks"])
    assert done.returncode == (FINISHED if found["can_start"] else FAILED)
    assert found["chosen"]["actor.num_processes"] >= 1
    assert found["sizes"][0].startswith("machine: ")
    assert any(line.startswith(("ok ", "short ")) and " tmpfs " in line for line in lines)
    assert "training of CartPole-v1 can" in lines[-1]
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_shortage_ends_with_status_1_and_train_refuses_in_the_same_words(tmp_path):
    words = ["--preset", "cartpole", "--device", "cpu"]
    doctor = run(tmp_path, "doctor", *words, limit="ulimit -n 64; ")
    assert doctor.returncode == FAILED
    assert "training of CartPole-v1 cannot start: see open files" in doctor.stdout
    row = next(line for line in doctor.stdout.splitlines() if line.startswith("short"))
    train = run(tmp_path, "train", *words, limit="ulimit -n 64; ")
    assert train.returncode == REFUSED
    assert row.partition("open files")[2].strip() in train.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--env", "NoSuchEnv-v0"], ["--replay.capactiy", "7"], ["--resume", "nowhere"]])
def test_options_that_are_wrong_are_refused_as_train_refuses_them(words, capsys):
    assert main(words) == REFUSED
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex doctor: ")


def test_help_and_print_config_are_those_of_train(capsys):
    with pytest.raises(SystemExit):
        main(["--preset", "cartpole", "--print-config"])
    assert "CartPole-v1" in capsys.readouterr().out


def test_a_run_that_is_to_go_on_is_examined_in_its_own_words(tmp_path, capsys):
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), run=RunConfig(folder=str(tmp_path), name="old"))
    config = size_to_machine(config, BOX, VECTORS)
    RunFolder.create(config, VECTORS)
    main(["--resume", str(tmp_path / "old"), "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not {"actor.num_actors", "learner.batch_size", "replay.max_bytes"} & set(found["chosen"])
    assert main(["--resume", str(tmp_path / "old"), "--seed", "5"]) == REFUSED


# What cannot be examined, because something before it is short


def test_without_an_environment_there_are_no_sizes():
    found = examine(Config(environment=EnvironmentConfig(id="NoSuchEnv-v0")))
    assert "environment" in found.short
    assert (found.sizes, found.sized) == ([], None)
    assert [check.name for check in found.checks] == [*NAMES[:8], "leftovers"]


def test_a_replay_memory_that_can_never_fit_is_short():
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), replay=ReplayConfig(max_bytes=2**50))
    found = examine(config)
    assert found.short == ["sizes"]
    assert [check.name for check in found.checks] == [*NAMES[:9], "leftovers"]


def test_a_replay_memory_without_room_for_a_segment_is_short():
    check, sized = check_sizes(Config(replay=ReplayConfig(max_bytes=5)), BOX, VECTORS)
    assert (check.verdict, sized) == ("short", None)
    assert check.figures == (
        "replay.max_bytes 5 holds about 0 transitions, but each shard must hold a segment of 50 transitions"
    )


def test_keys_that_a_program_would_not_find_are_short(tmp_path):
    config = Config(transport=TransportConfig(keys=str(tmp_path / "none")))
    assert check_keys(config).figures == f"key folder {tmp_path / 'none'} does not exist"
    assert check_keys(config).verdict == "short"


def test_a_folder_that_cannot_be_written_is_short(tmp_path):
    (tmp_path / "file").touch()
    environment = EnvironmentConfig(id="CartPole-v1")
    config = Config(environment=environment, run=RunConfig(folder=str(tmp_path / "file" / "runs")))
    assert "disk" in examine(config).short


def test_a_folder_that_is_yet_to_be_made_lies_on_the_disk_of_its_parent(tmp_path):
    environment = EnvironmentConfig(id="CartPole-v1")
    config = Config(environment=environment, run=RunConfig(folder=str(tmp_path / "a" / "b")))
    assert "disk" not in examine(config).short


def test_the_environment_is_described():
    check, schema = check_environment(Config())
    assert check == Check("environment", "ALE/Pong-v5: observations 4 x 84 x 84 uint8, 6 actions")
    assert schema is not None


def test_a_rom_that_is_not_there_is_short(tmp_path, monkeypatch):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    check, schema = check_environment(Config())
    assert (check.verdict, schema) == ("short", None)
    assert "the ROM of pong cannot be read" in check.figures
    assert "unset ALE_ROMS_DIR" in check.remedy


@pytest.mark.parametrize(
    ("config", "said", "remedy"),
    [
        (
            Config(actor=ActorConfig(num_actors=9, num_processes=2, envs_per_process=2)),
            "but only 4 environments",
            "start apex actor on other hosts",
        ),
        (
            Config(actor=ActorConfig(num_processes=3)),
            "but only 2 cores",
            "leave out --actor.num-processes",
        ),
        (
            Config(replay=ReplayConfig(max_bytes=4_096)),
            "the memory holds only 163 transitions, and training begins at 50,000",
            "raise --replay.max-bytes",
        ),
    ],
)
def test_sizes_that_cannot_be_what_was_meant_are_warnings(config, said, remedy):
    check, sized = check_sizes(config, BOX, VECTORS)
    assert check.verdict == "warning"
    assert said in check.figures
    assert check.remedy.startswith(remedy)
    assert sized is not None


# What is printed

CHECKS = [
    Check("memory", "needs 1, has 2"),
    Check("cores", "1", "warning", "more of them"),
    Check("tmpfs", "needs 2, has 1", "short", "docker run --shm-size=1g"),
]


def test_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    print_report(Config(), report(*CHECKS, sizes=["machine: 2 cores"]), stream)
    assert stream.getvalue().splitlines() == [
        "ok       memory       needs 1, has 2",
        "warning  cores        -> more of them",
        "                      1",
        "short    tmpfs        -> docker run --shm-size=1g",
        "                      needs 2, has 1",
        "",
        "sizes that apex train would choose",
        "  machine: 2 cores",
        "",
        "training of ALE/Pong-v5 cannot start: see tmpfs",
    ]


def test_a_table_on_a_terminal():
    stream = Terminal()
    print_report(Config(), report(*CHECKS), stream)
    words = " ".join(stream.getvalue().split())
    for check in CHECKS:
        assert check.figures in words
        assert check.remedy in words
    assert "sizes that apex train would choose" not in words


def test_warnings_do_not_keep_a_run_from_starting():
    assert verdict(Config(), report(*CHECKS[:2])) == "training of ALE/Pong-v5 can start; see cores"
    assert verdict(Config(), report(CHECKS[0])) == "training of ALE/Pong-v5 can start"


def test_a_program_reads_what_the_machine_decided():
    sized = size_to_machine(Config(), BOX, VECTORS)
    found = describe_report(Config(), report(*CHECKS, sized=sized))
    assert found["can_start"] is False
    assert found["checks"][2] == CHECKS[2]._asdict()
    assert found["chosen"]["actor.num_actors"] == 16
    assert "learner.batch_size" not in found["chosen"]
    assert describe_report(Config(), report(CHECKS[0]))["chosen"] == {}
