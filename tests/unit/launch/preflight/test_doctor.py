"""`apex doctor` on this host: its report, its exit status, and that it leaves no files behind."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
from support.users import in_own_tmpfs, needs_root

from apex.config import Config, EnvironmentConfig, ReplayConfig, RunConfig, TransportConfig
from apex.environments.inspection import Inspector
from apex.launch.preflight.doctor import (
    Report,
    check_environment,
    check_keys,
    describe_report,
    examine,
    main,
    print_report,
)
from apex.launch.preflight.report import Check, describe_check
from apex.runs.folder import RunFolder
from apex.runtime.hardware import Machine
from apex.schema import Schema
from apex.sizing import size_to_machine
from apexreplay.errors import FAILED, FINISHED, REFUSED
from apexreplay.store.location import claim_run, store_path

BEFORE_SIZES = ["software", "native loops", "CPU", "cores", "logout", "GPU", "environment"]
SIZES = [
    "first update",
    "threads",
    "actors",
    "capacity",
    "memory",
    "free memory",
    "tmpfs",
    "open files",
    "network",
    "disk",
    "ports",
]
LEFTOVERS = ["killed runs", "dead runs", "orphans", "other runs"]
VECTORS = Schema(frame_shape=(4,), frame_dtype="float32", stack=1, num_actions=2, n_step=3, codec="raw")
SIZED = size_to_machine(Config(), Machine(cores=2, memory_bytes=2**35, gpu=False), VECTORS)
CHECKS = [
    Check("memory", 2, 1, unit="files"),
    Check("cores", 1, want=2, unit="cores", remedy="more of them"),
    Check("tmpfs", 1, 2, unit="bytes", note="in tmpfs", remedy="docker run --shm-size=1g"),
]
SEMI = """
import gymnasium

class Semi(gymnasium.Env):
    def __init__(self):
        raise ValueError("cannot open map: a.txt; 3 other maps exist")
"""


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def run(tmp_path, *arguments, limit=""):
    command = f"{limit}exec {sys.executable} -m apex {' '.join(arguments)}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=tmp_path)


def names(report):
    return [check.name for check in report.checks]


def test_doctor_takes_the_options_of_a_run_and_ends_with_json(tmp_path):
    done = run(tmp_path, "doctor", "--preset", "cartpole", "--actors", "3", "--device", "cpu", "--json")
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    rows = {check["name"]: check for check in found["checks"]}
    assert [*rows] == BEFORE_SIZES + SIZES + LEFTOVERS
    assert found["can_start"] == all(check["verdict"] != "short" for check in rows.values())
    assert done.returncode == (FINISHED if found["can_start"] else FAILED)
    assert rows["actors"]["want"] == 3
    assert found["chosen"]["actor.num_processes"] >= 1
    assert any(line.startswith(("ok ", "short ")) and " tmpfs " in line for line in lines)
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_reports_a_shortage_as_train_refuses_it(tmp_path):
    arguments = ["--preset", "cartpole", "--device", "cpu"]
    doctor = run(tmp_path, "doctor", *arguments, limit="ulimit -n 64; ")
    assert doctor.returncode == FAILED
    rows = [line for line in doctor.stdout.splitlines() if line.startswith("short")]
    assert len(rows) == 1
    train = run(tmp_path, "train", *arguments, limit="ulimit -n 64; ")
    assert train.returncode == REFUSED
    assert rows[0].partition("-> ")[2].strip() in train.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--replay.capactiy", "7"], ["--resume", "nowhere"]])
def test_doctor_refuses_wrong_options_as_train_does(arguments, capsys):
    assert main(arguments) == REFUSED
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("apex doctor: ")


@pytest.mark.parametrize("preset", [[], ["--preset", "cartpole"]])
@pytest.mark.parametrize(
    ("environment", "problem", "remedy"),
    [
        ("NoSuchEnv-v0", "NoSuchEnv-v0", "module:class"),
        ("semi:Semi", "ValueError: cannot open map: a.txt; 3 other maps exist", "apex train --help"),
    ],
)
def test_an_unusable_environment_is_a_row(preset, environment, problem, remedy, tmp_path, monkeypatch, capsys):
    (tmp_path / "semi.py").write_text(SEMI)
    monkeypatch.chdir(tmp_path)
    assert main([*preset, "--env", environment, "--json"]) == FAILED
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [check["name"] for check in found["checks"]] == BEFORE_SIZES + LEFTOVERS
    row = next(check for check in found["checks"] if check["name"] == "environment")
    assert row["verdict"] == "short"
    assert problem in row["note"]
    assert remedy in row["remedy"]
    assert "maps" not in row["remedy"]


@pytest.mark.parametrize("option", ["--network", "--algorithm"])
def test_an_unusable_network_or_algorithm_is_a_row(option, capsys):
    assert main(["--preset", "cartpole", option, "nope:make", "--json"]) == FAILED
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = next(check for check in found["checks"] if check["name"] == "algorithm")
    assert (row["verdict"], "'nope:make'" in row["note"]) == ("short", True)


@needs_root
def test_clean_removes_the_memories_of_killed_runs_and_prints_them(tmp_path):
    assert in_own_tmpfs(clean, tmp_path) == ""


def clean(tmp_path):
    killed, live = store_path(0xC1EA1), store_path(0xC1EA2)
    killed.write_bytes(bytes(3 << 20))
    live.touch()
    with claim_run(0xC1EA1, tmp_path):
        pass
    with claim_run(0xC1EA2, tmp_path), redirect_stdout(io.StringIO()) as output:
        assert main(["--clean"]) == FINISHED
    assert (killed.exists(), live.exists()) == (False, True)
    removed, freed = output.getvalue().splitlines()
    assert all(text in removed for text in (str(killed), str(tmp_path), "3 MiB"))
    assert "3 MiB" in freed


def test_print_config_is_that_of_train(capsys):
    with pytest.raises(SystemExit):
        main(["--preset", "cartpole", "--print-config"])
    assert "CartPole-v1" in capsys.readouterr().out


def test_a_run_to_resume_is_examined_with_its_own_configuration(tmp_path, capsys):
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), run=RunConfig(folder=str(tmp_path), name="old"))
    config = size_to_machine(config, SIZED.machine, VECTORS).config
    RunFolder.create(config, VECTORS)
    main(["--resume", str(tmp_path / "old"), "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not {"actor.num_actors", "learner.batch_size", "replay.max_bytes"} & set(found["chosen"])
    assert main(["--resume", str(tmp_path / "old"), "--seed", "5"]) == REFUSED


def test_sizes_that_cannot_fit_are_short():
    config = Config(environment=EnvironmentConfig(id="CartPole-v1"), replay=ReplayConfig(max_bytes=2**50))
    found = examine(config)
    assert (found.short, found.sized) == (["sizes"], None)
    assert names(found) == [*BEFORE_SIZES, "sizes", *LEFTOVERS]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--head", "--actors", "0"], "--head needs --actors"),
        (["--single-process", "--replay.num-shards", "2"], "replay.num_shards 1"),
    ],
)
def test_what_train_refuses_is_short(arguments, problem, capsys):
    assert main(["--preset", "cartpole", "--device", "cpu", *arguments]) == FAILED
    output = " ".join(capsys.readouterr().out.split())
    assert "short" in output
    assert problem in output


def test_missing_keys_are_short(tmp_path):
    check = check_keys(Config(transport=TransportConfig(keys=str(tmp_path / "none"))))
    assert check.verdict == "short"
    assert str(tmp_path / "none") in check.note
    assert check.remedy


def test_the_environment_is_described():
    check, schema = check_environment(Config(), Inspector())
    assert (check.verdict, schema is not None) == ("ok", True)
    assert all(text in check.note for text in ("ALE/Pong-v5", "4 x 84 x 84 uint8", "6"))


def test_a_missing_rom_is_short(tmp_path, monkeypatch):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    check, schema = check_environment(Config(), Inspector())
    assert (check.verdict, schema) == ("short", None)
    assert "pong" in check.note
    assert "ALE_ROMS_DIR" in check.remedy


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_report_has_each_check_with_its_remedy(stream):
    stream = stream()
    print_report(Config(), Report(CHECKS, None), stream)
    output = stream.getvalue().split()
    rows = [output.index(check.name) for check in CHECKS]
    for check, start, end in zip(CHECKS, rows, [*rows[1:], len(output)], strict=True):
        assert any(check.verdict in word for word in output[max(0, start - 2) : start])
        assert set(describe_check(check).split()) <= set(output[start:end])
        assert ("->" in output[start:end]) == (check.verdict != "ok")
    assert output[-1] == "tmpfs"


def test_a_warning_does_not_prevent_a_start():
    assert Report(CHECKS, None).short == ["tmpfs"]
    assert Report(CHECKS[:2], None).short == []


def test_the_json_has_the_fields_of_each_check_and_the_chosen_settings():
    found = describe_report(Config(), Report(CHECKS, SIZED))
    assert found["can_start"] is False
    assert {name: found["checks"][2][name] for name in ("name", "have", "need", "unit", "verdict", "remedy")} == {
        "name": "tmpfs",
        "have": 1,
        "need": 2,
        "unit": "bytes",
        "verdict": "short",
        "remedy": "docker run --shm-size=1g",
    }
    assert found["chosen"]["actor.num_actors"] == 16
    assert "learner.batch_size" not in found["chosen"]
    assert describe_report(Config(), Report(CHECKS[:1], None))["chosen"] == {}
