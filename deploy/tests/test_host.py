"""The programs of a cluster's host against an emulated AWS: keys, logs, spot notice, end."""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from cloud_beyond import metadata_handler
from conftest import aws_client
from emulator import REGION

from apex.cloud.host import command as host_command
from apex.cloud.host import journal_upload, key_exchange
from apex.cloud.host import shutdown as host_shutdown
from apex.cloud.host.metadata import Metadata
from apex.cloud.host.settings import HostSettings, read_settings
from apex.cloud.host.shutdown import end_cluster
from apex.transport.curve.key_store import Keys, public_digits
from apexreplay.errors import FAILED, FINISHED, UsageError
from apexreplay.process.lifecycle import Stop
from apexreplay.transport.curve.key_store import create_pair

BEGUN = "2026-01-02T03:04:05Z"
ADDRESS = "10.77.0.9"
ALL = {"learner": 1, "evaluator": 1, "actor": 3}  # hosts by role; the replay server shares the learner's host
ENV = f"""\
APEX_CLUSTER=pong
APEX_ROLES=learner,replay
APEX_REGION={REGION}
APEX_BUCKET=weights
APEX_BEGUN={BEGUN}
APEX_MAX_HOURS=12
APEX_STALL_MINUTES=60
"""


def launch() -> dict[str, str]:
    """Creates the groups of a cluster, tagged like Terraform's; returns a host of each group."""
    ec2, scaling = aws_client("ec2"), aws_client("autoscaling")
    image, subnet = ec2.register_image(Name="apex")["ImageId"], ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    for role, size in ALL.items():
        name, tags = f"apex-pong-{role}", {"Project": "apex-zeromq", "Cluster": "pong", "Role": role}
        data = {"ImageId": image, "InstanceType": "c7i.2xlarge"}
        ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
        scaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            MinSize=0,
            MaxSize=2 * size,
            DesiredCapacity=size,
            VPCZoneIdentifier=subnet,
            LaunchTemplate={"LaunchTemplateName": name, "Version": "$Latest"},
            Tags=[{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in tags.items()],
        )
    return {role: hosts_of(role)[0] for role in ALL}


def hosts_of(role: str) -> list[str]:
    groups = aws_client("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=[f"apex-pong-{role}"])
    return [item["InstanceId"] for item in groups["AutoScalingGroups"][0]["Instances"]]


def machine(folder: Path, *roles: str, name: str = "", begun: str = BEGUN) -> HostSettings:
    home = folder / (name or roles[0])
    home.mkdir()
    fixed = {"cluster": "pong", "region": REGION, "bucket": "weights", "stall_minutes": 60}
    return HostSettings(**fixed, roles=roles, begun=begun, home=home)


def boot(ssm, settings: HostSettings, host: str):
    key_exchange.make_pairs(settings, ADDRESS)
    _, now = key_exchange.ask(ssm, settings)
    key_exchange.publish(ssm, settings, host, ADDRESS, now)
    return now


def look(ssm, settings: HostSettings, now) -> str:
    entries, _ = key_exchange.ask(ssm, settings)
    return key_exchange.accept(key_exchange.fresh(entries, now), settings)


def listed(settings: HostSettings, role: str) -> set[str]:
    names = Keys(settings.keys, settings.role).accepted(role).values()
    return {name.removeprefix(f"{role}.").removesuffix(".key") for name in names}


@pytest.mark.parametrize(
    ("name", "value"),
    [("APEX_BUCKET", ""), ("APEX_ROLES", "king"), ("APEX_CLUSTER", "../x"), ("APEX_STALL_MINUTES", "-1")],
)
def test_invalid_settings_are_refused(tmp_path, name, value):
    (tmp_path / "cluster.env").write_text(re.sub(f"{name}=.*\n", f"{name}={value}\n" if value else "", ENV))
    with pytest.raises(UsageError, match=name):
        read_settings(tmp_path)


def test_keys_are_created_once_and_only_public_ones_leave_a_machine(aws, tmp_path):
    ssm, settings = aws("ssm"), machine(tmp_path, "learner", "replay")
    boot(ssm, settings, "i-1")
    found = ssm.get_parameters_by_path(Path="/apex/", Recursive=True)["Parameters"]
    assert [item["Name"] for item in found] == ["/apex/pong/keys/learner/i-1", "/apex/pong/keys/replay/i-1"]
    assert len(list(settings.keys.glob("*.key_secret"))) == 3
    for item, role in zip(found, settings.roles, strict=True):
        assert item["Value"] == f"{public_digits(settings.keys, role)} {ADDRESS}"
    before = (settings.keys / "learner.key_secret").read_text()
    key_exchange.make_pairs(settings, ADDRESS)
    assert (settings.keys / "learner.key_secret").read_text() == before
    assert settings.keys.stat().st_mode & 0o777 == 0o700


def test_late_actors_are_admitted_and_departed_ones_are_not(aws, tmp_path):
    ssm, replay = aws("ssm"), machine(tmp_path, "replay")
    first, second = (machine(tmp_path, "actor", name=name) for name in ("i-1", "i-2"))
    now = boot(ssm, first, "i-1")
    assert look(ssm, first, now) == "learner and replay"
    boot(ssm, machine(tmp_path, "learner"), "i-l")
    assert look(ssm, first, now) == "replay"
    boot(ssm, replay, "i-r")
    assert look(ssm, first, now) == ""

    def actors(seconds: float = 0.0) -> set[str]:
        look(ssm, replay, now + timedelta(seconds=seconds))
        return listed(replay, "actor")

    assert actors() == {"i-1"}
    boot(ssm, second, "i-2")
    assert actors() == {"i-1", "i-2"}
    unchanged = [path.stat().st_ctime_ns for path in replay.keys.iterdir()]
    actors()
    assert [path.stat().st_ctime_ns for path in replay.keys.iterdir()] == unchanged
    key_exchange.withdraw(ssm, second, "i-2")
    assert actors() == {"i-1"}
    assert actors(key_exchange.STALE_SECONDS + 2) == set()
    # The cluster has one learner, which stays accepted however long it is silent.
    assert listed(replay, "learner") == {"i-l"}
    for value in ("00", "x" * 64, "0" * 64, f"{'0' * 64} here", f"{'0' * 64} 10.0.0.1\n{'1' * 64} 10.0.0.2"):
        ssm.put_parameter(Name="/apex/pong/keys/actor/i-evil", Value=value, Type="String", Overwrite=True)
        assert actors() == {"i-1"}, value


def test_the_newest_learner_replaces_another_and_restarts_programs(aws, tmp_path):
    """This includes the learner of an earlier cluster of this name, whose keys Terraform does not manage."""
    ssm, actor = aws("ssm"), machine(tmp_path, "actor")
    boot(ssm, machine(tmp_path, "replay"), "i-r")
    boot(ssm, machine(tmp_path, "learner"), "i-old")
    now = boot(ssm, actor, "i-a")
    (entries, _), mark = key_exchange.ask(ssm, actor), actor.keys / key_exchange.CHANGED
    for _ in range(2):
        assert key_exchange.accept(entries, actor) == ""
        assert not mark.exists()
    new = key_exchange.KeyEntry("learner", "i-new", "0" * 64, "10.77.0.8", now + timedelta(seconds=60))
    assert key_exchange.accept(key_exchange.fresh([new, *entries], now), actor) == ""
    assert listed(actor, "learner") == {"i-new"}
    assert key_exchange.learner_address(actor) == "10.77.0.8"
    assert mark.exists()


def test_a_waiting_machine_reads_often_and_publishes_once(aws, tmp_path, monkeypatch):
    """The store accepts three writes per second in an account, and a hundred machines may wait for one key."""
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.0)
    boot(aws("ssm"), machine(tmp_path, "learner"), "i-l")
    settings, looks = machine(tmp_path, "actor"), []

    def client(service: str):
        looks.append(service)
        if len(looks) == 4:
            boot(aws("ssm"), machine(tmp_path, "replay"), "i-r")
        return aws(service)

    with metadata_service() as metadata:
        for hours in ("24", "48"):  # The timer starts it again, and it reads raised hours.
            aws("ssm").put_parameter(Name="/apex/pong/max-hours", Value=hours, Type="String", Overwrite=True)
            assert host_command.keys(settings, client, metadata, Stop()) == FINISHED
            assert (settings.home / "max-hours").read_text() == hours
    assert len(looks) == 5
    Keys(settings.keys, "actor")
    assert num_published(aws("ssm")) == 1


def num_published(ssm) -> int:
    return ssm.get_parameter(Name="/apex/pong/keys/actor/i-1")["Parameter"]["Version"]


def test_a_key_is_published_again_before_it_expires_or_if_it_changes(aws, tmp_path):
    ssm, settings = aws("ssm"), machine(tmp_path, "actor")
    now = boot(ssm, settings, "i-1")
    again = key_exchange.PUBLISH_SECONDS

    def publish(seconds: float, address: str = ADDRESS) -> int:
        key_exchange.publish(ssm, settings, "i-1", address, now + timedelta(seconds=seconds))
        return num_published(ssm)

    assert [publish(seconds) for seconds in (0, again - 1, again)] == [1, 1, 2]
    for path in settings.keys.glob("actor.key*"):
        path.unlink()
    create_pair(settings.keys, "actor")
    assert publish(again) == 3
    assert publish(again, "10.77.0.8") == 4
    (settings.keys / key_exchange.PUBLISHED).write_text("torn")
    assert publish(0, "10.77.0.8") == 5
    assert 2 * again <= key_exchange.STALE_SECONDS


def line(number: int, message: object = "hello") -> str:
    entry = {"MESSAGE": message, "_SYSTEMD_UNIT": "apex@actor.service", "__CURSOR": f"c{number}"}
    return json.dumps(entry | {"__REALTIME_TIMESTAMP": str(number * 1_000)})


def test_the_journal_arrives_in_cloudwatch_by_time(aws):
    logs = aws("logs")
    logs.create_log_group(logGroupName="/apex/pong/actor")
    for _ in range(2):  # A restarted machine finds its stream.
        journal_upload.make_stream(logs, "/apex/pong/actor", "i-1")
    now = int(time.time() * 1_000)  # CloudWatch refuses old lines.
    null = line(now).replace('"hello"', "null")
    lines = (line(now + 1), line(now + 1, "again"), line(now, list(b"bytes\xff")), "{", null)
    for batch in journal_upload.batches(filter(None, map(journal_upload.parse, lines))):
        journal_upload.put(logs, "/apex/pong/actor", "i-1", batch)
    found = logs.get_log_events(logGroupName="/apex/pong/actor", logStreamName="i-1", startFromHead=True)["events"]
    assert [event["message"] for event in found] == [
        "apex@actor: bytes\ufffd",
        "apex@actor: hello",
        "apex@actor: again",
    ]


def test_a_call_respects_the_limits_of_cloudwatch():
    day = 24 * 3_600_000
    groups = list(journal_upload.batches([journal_upload.parse(line(n)) for n in (day, day + 1, 2 * day)]))
    assert [len(group) for group in groups] == [2, 1]
    big = journal_upload.parse(line(1, "x" * 1_000_000))
    groups = list(journal_upload.batches([big] * 10 + [journal_upload.parse(line(n)) for n in range(2_500)]))
    assert [len(group) for group in groups] == [4, 4, 1_000, 1_000, 502]
    assert all(sum(len(e.text) + journal_upload.OVERHEAD_BYTES for e in group) < 1_048_576 for group in groups)


@contextmanager
def metadata_service(notice: str = "", own: str = "i-1"):
    """Serves the metadata of an instance on loopback."""
    known = {"instance-id": own, "local-ipv4": ADDRESS} | ({"spot/instance-action": notice} if notice else {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), metadata_handler(lambda address: known)) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield Metadata(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("notice", ["", '{"action": "terminate"}'])
def test_a_machine_reads_its_name_and_its_spot_notice(notice):
    with metadata_service(notice) as metadata:
        assert (metadata.instance_id(), metadata.private_address()) == ("i-1", ADDRESS)
        assert metadata.spot_notice() == notice


def sizes(aws) -> dict[str, int]:
    groups = aws("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    return {group["AutoScalingGroupName"].removeprefix("apex-pong-"): group["DesiredCapacity"] for group in groups}


def state(aws, host: str) -> str:
    return aws("ec2").describe_instances(InstanceIds=[host])["Reservations"][0]["Instances"][0]["State"]["Name"]


class Copy:
    """Replaces the copy of the run in the bucket: its uploads fail this number of times."""

    def __init__(self, aws, failures: int = 0) -> None:
        self._aws, self._failures = aws, failures
        self.seen: list[dict[str, int]] = []  # sizes of the groups at each upload

    def upload(self, host: str) -> int:
        self.seen.append(sizes(self._aws))
        if len(self.seen) <= self._failures:
            raise OSError("no network")
        return 1

    def only_here(self) -> list[str]:
        return ["a.safetensors"]

    def __str__(self) -> str:
        return "s3://weights/pong"


NONE = dict.fromkeys(ALL, 0)


@pytest.mark.parametrize(
    ("roles", "failures"),
    [
        (("learner", "replay"), 0),
        (("learner", "replay"), 2),  # The last upload is repeated after other hosts have ended.
        (("learner",), 0),  # The replay server has its own host, whose group is missing: the end continues.
    ],
)
def test_the_end_uploads_and_sets_all_groups_to_zero(aws, tmp_path, monkeypatch, roles, failures):
    monkeypatch.setattr(host_shutdown, "FIRST_WAIT_SECONDS", 0.01)
    own, copy = launch()["learner"], Copy(aws, failures)
    assert end_cluster(aws, machine(tmp_path, *roles), own, copy, Stop()) == (len(roles) == 2)
    assert copy.seen == [ALL] + failures * [{**NONE, "learner": 1}]
    assert sizes(aws) == NONE
    assert state(aws, own) == "terminated"


def test_a_host_keeps_its_disk_if_the_last_upload_fails(aws, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(host_shutdown, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(host_shutdown, "TRY_SECONDS", 0.05)
    own = launch()["learner"]
    assert not end_cluster(aws, machine(tmp_path, "learner", "replay"), own, Copy(aws, failures=99), Stop())
    assert sizes(aws) == NONE
    # Its group would terminate it with its disk.
    assert (hosts_of("learner"), state(aws, own)) == ([], "running")
    assert "a.safetensors" in caplog.messages[-1]


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_a_host_that_leaves_its_group_is_not_replaced(aws, tmp_path, role):
    leaver, settings = launch()[role], machine(tmp_path, role)
    with metadata_service(own=leaver) as metadata:
        assert host_command.end(settings, aws, metadata, Stop()) == FINISHED
    assert sizes(aws) == {**ALL, role: ALL[role] - 1}
    assert leaver not in hosts_of(role)


def replace_program(monkeypatch, folder: Path, name: str, script: str) -> Path:
    """Creates a replacement of the program; returns the file to which it writes its arguments."""
    record, program = folder / f"{name}.record", folder / name
    program.write_text(f'#!/bin/sh\necho "$*" >>{record}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return record


@pytest.mark.parametrize("roles", [("actor",), ("learner", "replay")])
def test_a_spot_notice_stops_the_roles_and_removes_the_keys(aws, tmp_path, monkeypatch, roles):
    settings = machine(tmp_path, *roles)
    boot(aws("ssm"), settings, "i-1")
    record = replace_program(monkeypatch, tmp_path, "systemctl", "")
    with metadata_service('{"action": "terminate"}') as metadata:
        assert host_command.spot(settings, aws, metadata, Stop()) == FINISHED
    units = " ".join(f"apex@{role}.service" for role in roles)
    assert record.read_text() == f"stop {units} apex-keys.timer apex-keys.service\n"
    assert aws("ssm").get_parameters_by_path(Path="/apex/pong/", Recursive=True)["Parameters"] == []


@pytest.fixture
def send(aws, tmp_path, monkeypatch):
    """Returns a function that sends what a replacement of journalctl prints, and returns status and arguments."""
    aws("logs").create_log_group(logGroupName="/apex/pong/actor")
    settings, stop = machine(tmp_path, "actor"), Stop()
    stop.request()  # What the journal has at the end is sent all the same.

    def send(script: str) -> tuple[int, str]:
        record = replace_program(monkeypatch, tmp_path, "journalctl", script)
        with metadata_service() as metadata:
            status = host_command.logs(settings, aws, metadata, stop)
        return status, record.read_text().splitlines()[-1]

    return send


def test_the_journal_continues_after_the_last_sent_line(send):
    now = int(time.time() * 1_000)
    script = f"echo '{line(now)}'; echo '{line(now + 1)}'"
    (first, arguments), (second, later) = send(script), send(script)
    assert (first, second) == (FINISHED, FINISHED)
    assert "--after-cursor" not in arguments
    assert f"--after-cursor=c{now + 1}" in later


def test_only_a_cursor_that_journalctl_refuses_is_forgotten(send, tmp_path):
    assert send("exit 1")[0] == FINISHED  # No unit has written yet.
    cursor = tmp_path / "actor/logs.cursor"
    cursor.write_text("c1")
    assert send("kill -TERM $$")[0] == FINISHED  # The stop of the unit ends it.
    assert cursor.read_text() == "c1"
    assert send("exit 1")[0] == FAILED
    assert send("exit 1")[0] == FINISHED


@pytest.mark.parametrize("damage", ["cluster.env", "actor.toml"])
def test_a_refused_configuration_is_status_2_which_ends_the_unit(tmp_path, capsys, damage):
    (tmp_path / "cluster.env").write_text(ENV.replace("=learner,replay", "=actor", 1))
    (tmp_path / "actor.toml").write_text("")
    key_exchange.make_pairs(machine(tmp_path, "learner"), ADDRESS)  # the key and address of a learner
    (tmp_path / "learner/keys").rename(tmp_path / "keys")
    (tmp_path / damage).write_text("nonsense = 1\n")
    assert host_command.main(["--etc", str(tmp_path), "--home", str(tmp_path), "role", "actor", "--print"]) == 2
    assert capsys.readouterr().err.startswith("apex host: ")
