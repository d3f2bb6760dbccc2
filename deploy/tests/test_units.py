"""The units: systemd and the package accept them, and the host scripts work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

import pytest

from apex.cloud.host.command import make_parser
from apex.cloud.host.journal_upload import JOURNAL
from apex.cloud.host.key_exchange import CHANGED, KeyEntry
from apex.cloud.host.role import host_command
from apex.cloud.host.settings import HostSettings
from apex.cloud.host.shutdown import LONGEST_WAIT_SECONDS, TRY_SECONDS
from apex.command_line import parse_config
from apex.config import CheckpointConfig, TransportConfig
from apex.config.addresses import MOST_SAMPLERS
from apex.types import PROGRAMS
from apexreplay.errors import HOPELESS, REFUSED, UsageError

UNITS = Path(__file__).parents[1] / "units"
SERVICES = sorted(UNITS.glob("*.service"))
HOST, BEGUN = "/opt/apex/venv/bin/apex host", "2026-01-02T03:04:05Z"


def values(path: Path, name: str) -> list[str]:
    """Returns every value of a setting in a unit."""
    return re.findall(rf"^{name}=(.*)$", path.read_text(), re.MULTILINE)


def commands() -> list[str]:
    """Returns every command of every unit, without systemd's prefixes."""
    files = [*SERVICES, *UNITS.glob("*.service.d/*.conf")]
    names = ("ExecStart", "ExecStartPre", "ExecStartPost", "ExecStop", "ExecStopPost")
    return [value.lstrip("+-!@:") for path in files for name in names for value in values(path, name)]


def settings(folder: Path, *roles: str) -> HostSettings:
    (folder / "home/keys").mkdir(parents=True, exist_ok=True)
    entry = KeyEntry("learner", "i-1", "0" * 64, "10.77.0.11", datetime.now(UTC))
    (folder / "home/keys/learner.i-1.key").write_text(entry.certificate)
    fixed = {"cluster": "pong", "region": "us-east-1", "bucket": "b", "begun": BEGUN, "stall_minutes": 60}
    return HostSettings(**fixed, roles=roles or ("learner", "replay"), etc=folder / "etc", home=folder / "home")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
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
    assert len(ours) == 8
    for command in ours:
        for role in PROGRAMS if "%i" in command else ("",):
            make_parser().parse_args(shlex.split(command.removeprefix(HOST).replace("%i", role)))
    # Every other command is in the image.
    scripts = {f"/opt/apex/bin/{path.name}" for path in (UNITS / "bin").iterdir()}
    others = {shlex.split(command)[0] for command in commands() if not command.startswith(HOST)}
    assert others == scripts | {"/opt/apex/venv/bin/python", "/usr/bin/systemctl"}


def test_a_replay_server_on_its_own_host_keeps_snapshots_there(tmp_path):
    assert "--snapshots" not in host_command(settings(tmp_path, "learner", "replay"), "replay", num_cores=8)
    assert "--snapshots" in host_command(settings(tmp_path, "replay"), "replay", num_cores=8)


def test_a_role_of_another_host_or_without_a_learner_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"learner, replay.*'actor'"):
        host_command(settings(tmp_path), "actor", num_cores=8)
    actor = settings(tmp_path, "actor")
    (actor.keys / "learner.i-1.key").unlink()
    with pytest.raises(UsageError, match=r"apex-keys\.service"):
        host_command(actor, "actor", num_cores=8)


def test_the_learner_creates_its_run_once(tmp_path):
    run = tmp_path / "home/runs/pong"
    run.mkdir(parents=True)  # A run that was created incompletely is created again.
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/learner.toml").write_text('seed = 7\n[environment]\nid = "CartPole-v1"\n')
    word, *options = host_command(settings(tmp_path), "learner", num_cores=8)
    config = parse_config(options, prog="apex learner")
    assert (word, config.seed, config.environment.id, config.run.name) == ("learner", 7, "CartPole-v1", "pong")
    assert config.run.folder == str(run.parent)
    assert (config.transport.bind, config.transport.keys) == ("0.0.0.0", str(tmp_path / "home/keys"))
    assert [path.name.startswith("pong.unfinished-") for path in run.parent.iterdir()] == [True]
    run.mkdir()
    (run / "manifest.json").touch()
    assert host_command(settings(tmp_path), "learner", num_cores=8) == ["learner", "--run-folder", str(run)]


def test_the_learner_trusts_the_module_that_its_own_settings_name(tmp_path, monkeypatch):
    monkeypatch.setattr("apex.runtime.trust._allowed", set())
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/learner.toml").write_text('environment.id = "mine.levels:Maze"\n')
    assert host_command(settings(tmp_path), "learner", num_cores=8)[-2:] == ["--allow", "mine.levels"]


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
    ports |= {transport.port("batches", sampler) for sampler in range(MOST_SAMPLERS)}
    (reserved,) = values(UNITS / "60-apex.sysctl.conf", "net.ipv4.ip_local_reserved_ports ")
    ranges = [list(map(int, part.split("-"))) for part in reserved.split(",")]
    assert {port for first, last in ranges for port in range(first, last + 1)} >= ports


def test_a_role_is_restarted_unless_that_cannot_help():
    prevented = {int(word) for word in values(UNITS / "apex@.service", "RestartPreventExitStatus")[0].split()}
    assert prevented == {REFUSED, HOPELESS}
    assert values(UNITS / "apex@.service", "Restart") == ["always"]


def test_services_can_write_only_to_the_necessary_folders():
    for path in SERVICES:
        if path.stem not in ("apex-idle@", "apex-max-hours"):
            assert values(path, "NoNewPrivileges") == values(path, "PrivateTmp") == ["yes"], path.stem
            assert values(path, "ProtectSystem") == ["strict"], path.stem
            assert set(" ".join(values(path, "ReadWritePaths")).split()) <= {"/var/lib/apex", "/dev/shm"}, path.stem
    # Units that stop others run as root.
    root = {path.stem for path in SERVICES if not values(path, "User")}
    assert root == {"apex-end", "apex-idle@", "apex-max-hours", "apex-spot", "apex-stall"}


def test_the_end_has_more_time_than_the_last_upload():
    (end,), (hours,) = (values(UNITS / f"{name}.service", "TimeoutStartSec") for name in ("apex-end", "apex-max-hours"))
    minutes = [int(text.removesuffix("min")) for text in (end, hours)]
    assert 60 * minutes[0] >= TRY_SECONDS + 2 * LONGEST_WAIT_SECONDS + 300  # and the duration of the last try
    assert minutes[1] > minutes[0]


def test_a_lost_learner_host_costs_less_than_five_minutes_of_updates():
    """A checkpoint in the bucket is at most as old as the times between checkpoints and uploads, and two uploads."""
    (pause,), (accuracy,) = (values(UNITS / "apex-upload.timer", key) for key in ("OnUnitInactiveSec", "AccuracySec"))
    pauses = CheckpointConfig().period_seconds + float(pause) + float(accuracy)
    assert 300 - pauses >= 2 * 25  # seconds of an upload


def test_the_log_of_every_unit_is_sent_to_cloudwatch():
    (pattern,) = [word.removeprefix("--unit=") for word in JOURNAL if word.startswith("--unit=")]
    assert [path.name for path in SERVICES if not fnmatch(path.name, pattern)] == []


def test_every_unit_is_started_by_a_role_a_timer_or_a_script():
    paths = [*UNITS.glob("apex@*.service"), *UNITS.glob("apex@*.d/*.conf")]
    wanted = {name for path in paths for value in values(path, "Wants") for name in value.split()}
    # A script starts the end, the image enables the timer of the hours, and `ray up` the unit of idle hosts.
    started = wanted | {"apex-end.service", "apex-idle@.service", "apex-max-hours.timer"}
    timers = {path.stem for path in UNITS.glob("*.timer")}
    ours = {path.name for path in UNITS.glob("apex-*") if path.is_file()}
    assert {name for name in started if name.startswith("apex")} | {f"{name}.service" for name in timers} == ours


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
    ("role", "code", "status", "systemctl", "ends"),
    [
        *(("learner", "exited", status, "", True) for status in ("0", "2", "3")),
        *((role, "exited", "2", "", True) for role in ("replay", "actor")),
        ("actor", "exited", "3", "", True),
        ("actor", "exited", "0", "", False),  # The learner has refused it.
        ("learner", "exited", "0", "echo 4711", False),  # A job on the unit: somebody has stopped it, or the machine.
        *(("learner", "exited", status, "", False) for status in ("1", "20")),
        ("learner", "killed", "ABRT", "", False),
    ],
)
def test_the_end_of_the_run_or_a_refused_role_starts_the_end(tmp_path, role, code, status, systemctl, ends):
    unit, environment = f"apex@{role}.service", {"EXIT_CODE": code, "EXIT_STATUS": status}
    calls = call(tmp_path, "apex-ended", unit, systemctl=systemctl, **environment)
    assert [line for line in calls if line.startswith("start")] == ends * ["start --no-block apex-end.service"]


HOURS_OVER = ["start apex-end.service", "--no-block poweroff"]


@pytest.mark.parametrize(
    ("newest", "at_boot", "begun", "systemctl", "expected"),
    [
        ("1000000", "0.0001", BEGUN, "", []),
        ("0.0001", "1000000", BEGUN, "", HOURS_OVER),
        ("", "1000000", "1826-01-02T03:04:05Z", "", HOURS_OVER),  # Hours count from the start of the cluster.
        ("", "0.0001", BEGUN, '[ "$1" != start ]', HOURS_OVER),  # The host stops even if its end fails.
        *((damaged, "0.0001", BEGUN, "", HOURS_OVER) for damaged in ("", "0", "x", "-1", "1e9", "9; reboot")),
    ],
)
def test_a_host_stops_when_its_newest_hours_are_over(tmp_path, newest, at_boot, begun, systemctl, expected):
    path = tmp_path / "max-hours"
    path.write_text(newest)
    environment = {"APEX_MAX_HOURS": at_boot, "APEX_BEGUN": begun}
    assert call(tmp_path, "apex-max-hours", str(path), systemctl=systemctl, **environment) == expected


def test_a_role_restarts_if_the_key_of_its_server_has_changed(tmp_path):
    assert call(tmp_path, "apex-rekeyed", str(tmp_path)) == []
    (tmp_path / CHANGED).touch()
    assert call(tmp_path, "apex-rekeyed", str(tmp_path)) == ["--no-block try-restart apex@*.service"]
    assert not (tmp_path / CHANGED).exists()
