"""The units: systemd and the package accept them, and the host scripts work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from apex.cloud.host import journal_upload
from apex.cloud.host.command import make_parser
from apex.cloud.host.key_exchange import CHANGED, KeyEntry
from apex.cloud.host.role import host_command
from apex.cloud.host.settings import HostSettings
from apex.cloud.host.shutdown import LONGEST_WAIT_SECONDS, TRY_SECONDS
from apex.command_line import parse_config
from apex.config import CheckpointConfig, TransportConfig
from apex.errors import HOPELESS, NEIGHBOUR_GONE, REFUSED, UsageError
from apex.evaluator import main as evaluator
from apex.learning.batch_ring import MOST_LOADERS
from apex.types import PROGRAMS

UNITS = Path(__file__).parents[1] / "units"
SERVICES = sorted(UNITS.glob("*.service"))
HOST = "/opt/apex/venv/bin/apex host"
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def values(path: Path, name: str) -> list[str]:
    """Returns every value of a setting in a unit."""
    lines = path.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def commands() -> list[str]:
    """Returns every command of every unit, without systemd's prefixes."""
    files = [*SERVICES, *UNITS.glob("*.service.d/*.conf")]
    names = ("ExecStart", "ExecStartPre", "ExecStartPost", "ExecStop", "ExecStopPost")
    return [value.lstrip("+-!@:") for path in files for name in names for value in values(path, name)]


def settings(folder: Path, *roles: str) -> HostSettings:
    (folder / "home/keys").mkdir(parents=True, exist_ok=True)
    entry = KeyEntry("learner", "i-1", "0" * 64, "10.77.0.11", datetime.now(UTC))
    (folder / "home/keys/learner.i-1.key").write_text(entry.certificate)
    fixed = {"cluster": "pong", "region": "us-east-1", "bucket": "b", "begun": "2026-01-02T03:04:05Z"}
    return HostSettings(**fixed, roles=roles or ("learner", "replay"), etc=folder / "etc", home=folder / "home")


@systemd
def test_systemd_accepts_the_units_without_a_warning(tmp_path):
    shutil.copytree(UNITS, tmp_path / "units", ignore=shutil.ignore_patterns("bin", "*.conf.bak"))
    for path in (tmp_path / "units").rglob("*"):
        if path.is_file():  # The programs are in the image, where a test checks the same again.
            path.write_text(re.sub(r"/opt/apex/\S+", "/bin/true", path.read_text()))
    names = [str(path) for path in (tmp_path / "units").glob("apex*.*") if path.is_file()]
    assert len(names) == len(SERVICES) + len(list(UNITS.glob("*.timer")))
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path / 'units'}:"}
    command = ["systemd-analyze", "verify", "--man=no", *names]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_package_accepts_every_command_of_the_units():
    ours = [command for command in commands() if command.startswith(HOST)]
    assert len(ours) == 7
    for command in ours:
        for role in PROGRAMS if "%i" in command else ("",):
            make_parser().parse_args(shlex.split(command.removeprefix(HOST).replace("%i", role)))


def test_every_other_command_is_in_the_image():
    scripts = {f"/opt/apex/bin/{path.name}" for path in (UNITS / "bin").iterdir()}
    others = {shlex.split(command)[0] for command in commands() if not command.startswith(HOST)}
    assert others == scripts | {"/opt/apex/venv/bin/python", "/usr/bin/systemctl"}


@pytest.mark.parametrize("role", ["replay", "actor"])
def test_a_role_has_a_command_that_its_program_accepts(role, tmp_path):
    command = host_command(settings(tmp_path, role), role, num_cores=8)
    assert command[command.index("--learner") + 1] == "10.77.0.11"
    found = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True, timeout=100)
    # The program has read its options and fails because there are no keys yet.
    assert f"cannot read {tmp_path}/home/keys/{role}.key_secret" in found.stderr
    assert "usage:" not in found.stderr


PROGRAM = "import sys; from apex.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_evaluator_has_a_command_that_it_accepts(tmp_path, capsys):
    word, *options = host_command(settings(tmp_path, "evaluator"), "evaluator", num_cores=8)
    assert word == "evaluator"
    assert evaluator(options) == REFUSED
    assert "home/keys/evaluator.key_secret" in capsys.readouterr().err


def test_a_replay_server_on_its_own_host_keeps_snapshots_there(tmp_path):
    assert "--snapshots" not in host_command(settings(tmp_path, "learner", "replay"), "replay", num_cores=8)
    assert "--snapshots" in host_command(settings(tmp_path, "replay"), "replay", num_cores=8)


def test_a_host_refuses_the_role_of_another(tmp_path):
    with pytest.raises(UsageError, match=r"learner, replay.*'actor'"):
        host_command(settings(tmp_path), "actor", num_cores=8)


def test_a_role_is_refused_before_the_learners_address_is_known(tmp_path):
    here = settings(tmp_path, "actor")
    (here.keys / "learner.i-1.key").unlink()
    with pytest.raises(UsageError, match=r"apex-keys\.service"):
        host_command(here, "actor", num_cores=8)


def test_the_learner_starts_a_run_of_the_clusters_name_by_its_file(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/learner.toml").write_text('seed = 7\n[environment]\nid = "CartPole-v1"\n')
    word, *options = host_command(settings(tmp_path), "learner", num_cores=8)
    config = parse_config(options, prog="apex learner")
    assert (word, config.seed, config.environment.id, config.run.name) == ("learner", 7, "CartPole-v1", "pong")
    assert config.run.folder == str(tmp_path / "home/runs")
    assert (config.transport.bind, config.transport.keys) == ("0.0.0.0", str(tmp_path / "home/keys"))


def test_the_learner_continues_an_existing_run(tmp_path):
    run = tmp_path / "home/runs/pong"
    run.mkdir(parents=True)
    (run / "manifest.json").touch()
    assert host_command(settings(tmp_path), "learner", num_cores=8) == ["learner", "--run-folder", str(run)]


def test_an_incompletely_created_run_is_created_again(tmp_path):
    run = tmp_path / "home/runs/pong"
    run.mkdir(parents=True)
    assert "--config" in host_command(settings(tmp_path), "learner", num_cores=8)
    assert [path.name.startswith("pong.unfinished-") for path in run.parent.iterdir()] == [True]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ["--processes", "8"]),
        ("[actor]\nnum_processes = 3\nenvs_per_process = 5\n", ["--processes", "3", "--envs", "5"]),
    ],
)
def test_actors_use_the_cores_of_their_own_machine(tmp_path, text, arguments):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/actor.toml").write_text(text)
    assert host_command(settings(tmp_path, "actor"), "actor", num_cores=8)[-len(arguments) :] == arguments


def test_the_kernel_reserves_the_ports_of_the_package():
    transport = TransportConfig()
    names = ("experience", "priorities", "receipts", "parameters", "batches", "control")
    ports = {transport.port(name) for name in names}
    ports |= {transport.port("batches", loader) for loader in range(MOST_LOADERS)}
    (reserved,) = re.findall(
        r"^net.ipv4.ip_local_reserved_ports = (.*)$", (UNITS / "60-apex.sysctl.conf").read_text(), re.M
    )
    ranges = [list(map(int, part.split("-"))) for part in reserved.split(",")]
    assert {port for first, last in ranges for port in range(first, last + 1)} >= ports
    (tensorboard,) = values(UNITS / "apex-tensorboard.service", "ExecStart")
    assert "--port 6006 " in tensorboard


def test_a_role_is_restarted_unless_that_cannot_help():
    path = UNITS / "apex@.service"
    assert values(path, "Type") == ["notify"]
    assert values(path, "WatchdogSec") == ["300"]
    assert values(path, "Restart") == ["always"]
    assert values(UNITS / "apex@learner.service.d/learner.conf", "Restart") == ["on-failure"]
    prevented = {int(word) for word in values(path, "RestartPreventExitStatus")[0].split()}
    assert prevented == {REFUSED, HOPELESS}
    assert NEIGHBOUR_GONE not in prevented


@pytest.mark.parametrize("path", [p for p in SERVICES if p.stem != "apex-max-hours"], ids=lambda p: p.stem)
def test_a_service_can_write_only_to_the_necessary_folders(path):
    assert values(path, "NoNewPrivileges") == values(path, "PrivateTmp") == ["yes"]
    assert values(path, "ProtectSystem") == ["strict"]
    assert set(" ".join(values(path, "ReadWritePaths")).split()) <= {"/var/lib/apex", "/dev/shm"}


def test_the_end_has_more_time_than_the_last_upload():
    (end,), (hours,) = (values(UNITS / f"{name}.service", "TimeoutStartSec") for name in ("apex-end", "apex-max-hours"))
    minutes = [int(text.removesuffix("min")) for text in (end, hours)]
    assert 60 * minutes[0] >= TRY_SECONDS + 2 * LONGEST_WAIT_SECONDS + 300  # and the duration of the last try
    assert minutes[1] > minutes[0]
    # If the learner still runs, it must save before the last upload.
    assert values(UNITS / "apex-end.service", "ExecStartPre") == ["-/usr/bin/systemctl stop apex@learner.service"]


def test_a_lost_learner_host_costs_less_than_five_minutes_of_updates():
    """A checkpoint in the bucket is at most as old as the time between checkpoints, that between uploads, and two
    uploads.
    """
    (pause,), (accuracy,) = (values(UNITS / "apex-upload.timer", key) for key in ("OnUnitInactiveSec", "AccuracySec"))
    pauses = CheckpointConfig().period_seconds + float(pause) + float(accuracy)
    assert 300 - pauses >= 2 * 25  # seconds of an upload


def test_only_units_that_stop_others_run_as_root():
    root = {path.stem for path in SERVICES if not values(path, "User")}
    assert root == {"apex-end", "apex-max-hours", "apex-spot"}


def test_the_log_of_every_unit_is_sent_to_cloudwatch():
    followed = {word.removeprefix("--unit=") for word in journal_upload.command(["%i"]) if word.startswith("--unit=")}
    assert followed == {path.name.replace("apex@", "apex@%i") for path in SERVICES}


def test_enabling_a_role_enables_every_unit_of_its_machine():
    def wants(*paths: str) -> set[str]:
        return {word for path in paths for value in values(UNITS / path, "Wants") for word in value.split()}

    common = wants("apex@.service")
    assert {"apex-keys.service", "apex-keys.timer", "apex-logs.service"} <= common
    assert wants("apex@learner.service.d/learner.conf") == {
        "apex-upload.timer",
        "apex-tensorboard.service",
        "apex-spot.service",
    }
    assert wants("apex@actor.service.d/actor.conf") == {"apex-spot.service"}
    units = {path.name for path in UNITS.iterdir()}
    assert {
        word
        for word in common | wants(*(str(p.relative_to(UNITS)) for p in UNITS.glob("*.d/*")))
        if word.startswith("apex")
    } <= units


def call(tmp_path: Path, script: str, *arguments: str, systemctl: str = "", **environment: str) -> list[str]:
    """Runs a host script with a replacement of systemctl; returns the calls of the latter."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    record = tmp_path / "record"
    record.touch()
    (tools / "systemctl").write_text(f'#!/bin/sh\necho "$*" >>{record}\n{systemctl}\n')
    (tools / "systemctl").chmod(0o755)
    path = {"PATH": f"{tools}:/usr/bin:/bin"}
    subprocess.run([UNITS / "bin" / script, *arguments], env=path | environment, check=True, timeout=100)
    return record.read_text().splitlines()


@pytest.mark.parametrize(
    ("role", "status"),
    [("learner", "0"), ("learner", "2"), ("learner", "3"), ("replay", "2"), ("actor", "2"), ("actor", "3")],
)
def test_the_end_of_the_run_and_a_refused_role_start_the_end(tmp_path, role, status):
    calls = call(tmp_path, "apex-ended", f"apex@{role}.service", EXIT_CODE="exited", EXIT_STATUS=status)
    assert calls[-1] == "start --no-block apex-end.service"


def test_an_actor_that_the_learner_refused_does_not_end_its_host(tmp_path):
    assert call(tmp_path, "apex-ended", "apex@actor.service", EXIT_CODE="exited", EXIT_STATUS="0") == []


@pytest.mark.parametrize(
    ("systemctl", "code", "status"),
    [
        ("echo 4711", "exited", "0"),  # A job on the unit shows that somebody has stopped it, or the machine.
        ("", "exited", "1"),
        ("", "exited", "20"),
        ("", "killed", "ABRT"),
    ],
)
def test_stopping_the_learner_does_not_end_the_cluster(tmp_path, systemctl, code, status):
    calls = call(
        tmp_path, "apex-ended", "apex@learner.service", systemctl=systemctl, EXIT_CODE=code, EXIT_STATUS=status
    )
    assert not any(line.startswith("start") for line in calls)


HOURS_OVER = ["start apex-end.service", "--no-block poweroff"]


def max_hours(tmp_path: Path, newest: str, at_boot: str, begun: str = "2026-01-02T03:04:05Z", **more: str) -> list[str]:
    (tmp_path / "max-hours").write_text(newest)
    return call(
        tmp_path, "apex-max-hours", str(tmp_path / "max-hours"), APEX_MAX_HOURS=at_boot, APEX_BEGUN=begun, **more
    )


def test_a_host_stops_when_the_hours_of_its_cluster_are_over(tmp_path):
    assert max_hours(tmp_path, "", "0.0001") == HOURS_OVER


def test_a_host_stops_even_if_its_end_fails(tmp_path):
    assert max_hours(tmp_path, "", "0.0001", systemctl='[ "$1" != start ]')[-1] == "--no-block poweroff"


def test_raised_or_lowered_hours_apply_to_a_running_host(tmp_path):
    assert max_hours(tmp_path, "1000000", "0.0001") == []
    assert max_hours(tmp_path, "0.0001", "1000000") == HOURS_OVER


def test_hours_count_from_the_start_of_the_cluster(tmp_path):
    assert max_hours(tmp_path, "", "1000000", begun="1826-01-02T03:04:05Z") == HOURS_OVER


@pytest.mark.parametrize("damaged", ["", "0", "x", "-1", "1e9", "9; reboot"])
def test_an_invalid_number_of_hours_does_not_keep_a_host_running(tmp_path, damaged):
    assert max_hours(tmp_path, damaged, "0.0001") == HOURS_OVER


def test_a_role_restarts_if_the_key_of_its_server_has_changed(tmp_path):
    assert call(tmp_path, "apex-rekeyed", str(tmp_path)) == []
    (tmp_path / CHANGED).touch()
    assert call(tmp_path, "apex-rekeyed", str(tmp_path)) == ["--no-block try-restart apex@*.service"]
    assert not (tmp_path / CHANGED).exists()
