"""What a machine of a cluster does for itself, against an emulated AWS: keys, bucket, logs, spot notice, the end."""

from __future__ import annotations

import http.server
import itertools
import json
import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from moto import mock_aws

from apex.cloud.host import bucket as host_bucket
from apex.cloud.host import command as host_command
from apex.cloud.host import journal_upload, key_exchange
from apex.cloud.host import shutdown as host_shutdown
from apex.cloud.host.metadata import Metadata
from apex.cloud.host.settings import HostSettings, read_settings
from apex.cloud.host.shutdown import end_cluster, leave_group
from apex.errors import ConfigError
from apex.runtime.lifecycle import FAILED, FINISHED, Stop
from apex.transport.curve.key_store import Keys, create_pair, lists_for, public_digits
from apex.types import PROGRAMS

REGION = "us-east-1"
ENV = """\
# written at first boot
APEX_CLUSTER=pong
APEX_ROLE=actor
APEX_REGION=us-east-1
APEX_BUCKET=weights
APEX_LEARNER=10.77.0.11
APEX_REPLAY=10.77.0.10
APEX_MAX_HOURS=12
APEX_ACTOR_GROUP=apex-pong-actors
"""


@pytest.fixture
def aws(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "emulated")
    with mock_aws():
        yield lambda service: boto3.client(service, region_name=REGION)


def machine(folder: Path, role: str, name: str = "") -> HostSettings:
    home = folder / (name or role)
    home.mkdir()
    return HostSettings(
        cluster="pong",
        role=role,
        region=REGION,
        bucket="weights",
        actor_group="apex-pong-actors",
        learner="10.77.0.11",
        replay="10.77.0.10",
        home=home,
    )


def boot(ssm, settings: HostSettings, host: str):
    key_exchange.make_pair(settings.keys, settings.role)
    _, now = key_exchange.ask(ssm, settings)
    key_exchange.tell(ssm, settings, host, now)
    return now


def look(ssm, settings: HostSettings, now) -> str:
    told, _ = key_exchange.ask(ssm, settings)
    return key_exchange.believe(key_exchange.fresh(told, now), settings)


def listed(settings: HostSettings, role: str) -> set[str]:
    names = Keys(settings.keys, settings.role).accepted(role).values()
    return {name.removeprefix(f"{role}.").removesuffix(".key") for name in names}


def test_settings_are_read_as_the_first_boot_writes_them(tmp_path):
    (tmp_path / "cluster.env").write_text(ENV)
    settings = read_settings(tmp_path, tmp_path)
    assert (settings.cluster, settings.role, settings.learner) == ("pong", "actor", "10.77.0.11")
    assert settings.run == tmp_path / "runs/pong"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("APEX_BUCKET=weights\n", "", "APEX_BUCKET"),
        ("=actor", "=king", "APEX_ROLE"),
        ("=pong", "=../x", "APEX_CLUSTER"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, old, new, message):
    (tmp_path / "cluster.env").write_text(ENV.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path)


def test_every_machine_gets_the_keys_that_its_programs_want(aws, tmp_path):
    ssm = aws("ssm")
    machines = {role: machine(tmp_path, role) for role in PROGRAMS}
    for role, settings in machines.items():
        now = boot(ssm, settings, f"i-{role}")
    for role, settings in machines.items():
        assert look(ssm, settings, now) == ""
        Keys(settings.keys, role)  # The package's own check of the folder.
        for other in set(lists_for(role)) - {"observer"}:
            assert listed(settings, other) == {f"i-{other}"}
    learner = machines["learner"].keys
    Keys(learner, "observer")  # For `apex status` there.
    assert Keys(machines["actor"].keys, "actor").server_key("control") in Keys(learner, "observer").accepted("learner")


def test_only_public_halves_leave_a_machine(aws, tmp_path):
    ssm, settings = aws("ssm"), machine(tmp_path, "learner")
    boot(ssm, settings, "i-1")
    (found,) = ssm.get_parameters_by_path(Path="/apex/", Recursive=True)["Parameters"]
    assert found["Name"] == "/apex/pong/keys/learner/i-1"
    assert len(list(settings.keys.glob("*.key_secret"))) == 2
    assert found["Value"] == public_digits(settings.keys, "learner")


def test_keys_are_made_once(tmp_path):
    key_exchange.make_pair(tmp_path / "keys", "actor")
    before = (tmp_path / "keys/actor.key_secret").read_text()
    key_exchange.make_pair(tmp_path / "keys", "actor")
    assert (tmp_path / "keys/actor.key_secret").read_text() == before
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_who_is_early_waits_for_the_keys_that_all_pin(aws, tmp_path):
    ssm, actor = aws("ssm"), machine(tmp_path, "actor")
    now = boot(ssm, actor, "i-a")
    assert look(ssm, actor, now) == "learner and replay"
    boot(ssm, machine(tmp_path, "learner"), "i-l")
    assert look(ssm, actor, now) == "replay"
    boot(ssm, machine(tmp_path, "replay"), "i-r")
    assert look(ssm, actor, now) == ""


def test_late_actors_are_let_in_and_those_that_are_gone_are_not(aws, tmp_path):
    ssm, replay = aws("ssm"), machine(tmp_path, "replay")
    now = boot(ssm, replay, "i-r")
    boot(ssm, machine(tmp_path, "learner"), "i-l")
    boot(ssm, machine(tmp_path, "actor", "a1"), "i-a1")
    look(ssm, replay, now)
    assert listed(replay, "actor") == {"i-a1"}
    second = machine(tmp_path, "actor", "a2")
    boot(ssm, second, "i-a2")
    look(ssm, replay, now)
    assert listed(replay, "actor") == {"i-a1", "i-a2"}
    key_exchange.leave(ssm, second, "i-a2")
    look(ssm, replay, now)
    assert listed(replay, "actor") == {"i-a1"}
    look(ssm, replay, now + timedelta(seconds=key_exchange.STALE_SECONDS + 2))
    assert listed(replay, "actor") == set()
    assert listed(replay, "learner") == {"i-l"}  # There is one, however long it is silent.


def test_a_learner_that_was_replaced_is_believed_alone(aws, tmp_path):
    ssm, actor = aws("ssm"), machine(tmp_path, "actor")
    boot(ssm, machine(tmp_path, "replay"), "i-r")
    boot(ssm, machine(tmp_path, "learner", "old"), "i-old")
    now = boot(ssm, actor, "i-a")
    found, _ = key_exchange.ask(ssm, actor)
    late = key_exchange.KeyEntry("learner", "i-new", "0" * 64, now + timedelta(seconds=60))
    assert key_exchange.believe(key_exchange.fresh([late, *found], now), actor) == ""
    assert listed(actor, "learner") == {"i-new"}


def test_a_program_that_began_with_another_learners_key_is_to_begin_anew(aws, tmp_path):
    """As that of an earlier cluster of the same name: Terraform knows nothing of what hosts have told."""
    ssm, actor = aws("ssm"), machine(tmp_path, "actor")
    boot(ssm, machine(tmp_path, "replay"), "i-r")
    boot(ssm, machine(tmp_path, "learner", "old"), "i-old")
    now = boot(ssm, actor, "i-a")
    (told, _), mark = key_exchange.ask(ssm, actor), actor.keys / key_exchange.CHANGED
    for _ in range(2):
        key_exchange.believe(told, actor)
        assert not mark.exists()
    key_exchange.believe([key_exchange.KeyEntry("learner", "i-new", "0" * 64, now)], actor)
    assert mark.exists()


@pytest.mark.parametrize("value", ["00", "x" * 64, "0" * 64 + "\n" + "1" * 64])
def test_what_is_no_key_becomes_no_line_of_a_list(aws, tmp_path, value):
    ssm, replay = aws("ssm"), machine(tmp_path, "replay")
    now = boot(ssm, replay, "i-r")
    boot(ssm, machine(tmp_path, "learner"), "i-l")
    ssm.put_parameter(Name="/apex/pong/keys/actor/i-evil", Value=value, Type="String")
    look(ssm, replay, now)
    assert listed(replay, "actor") == set()


def test_a_list_that_says_the_same_is_not_written_again(aws, tmp_path):
    ssm, replay = aws("ssm"), machine(tmp_path, "replay")
    now = boot(ssm, replay, "i-r")
    boot(ssm, machine(tmp_path, "learner"), "i-l")
    look(ssm, replay, now)
    before = [path.stat().st_ctime_ns for path in replay.keys.iterdir()]
    look(ssm, replay, now)
    assert [path.stat().st_ctime_ns for path in replay.keys.iterdir()] == before


def test_a_machine_that_waits_asks_often_and_tells_once(aws, tmp_path, monkeypatch):
    """The store takes three writes a second of an account, and a hundred machines may wait for one."""
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.0)
    boot(aws("ssm"), machine(tmp_path, "learner"), "i-l")
    settings, looks = machine(tmp_path, "actor"), []

    def client(service: str):
        looks.append(service)
        if len(looks) == 4:
            boot(aws("ssm"), machine(tmp_path, "replay"), "i-r")
        return aws(service)

    with metadata_service(None) as metadata:
        for _ in range(2):  # Then the timer comes round.
            assert host_command.keys(settings, client, metadata, Stop()) == FINISHED
    assert len(looks) == 5
    assert version(aws("ssm"), "/apex/pong/keys/actor/i-1") == 1


def version(ssm, name: str) -> int:
    return ssm.get_parameter(Name=name)["Parameter"]["Version"]


def test_a_key_is_told_again_before_it_is_stale_and_when_it_is_another(aws, tmp_path):
    ssm, settings = aws("ssm"), machine(tmp_path, "actor")
    now = boot(ssm, settings, "i-1")
    for seconds, expected in ((0, 1), (key_exchange.TELL_SECONDS - 1, 1), (key_exchange.TELL_SECONDS, 2)):
        key_exchange.tell(ssm, settings, "i-1", now + timedelta(seconds=seconds))
        assert version(ssm, "/apex/pong/keys/actor/i-1") == expected
    for path in settings.keys.glob("actor.key*"):
        path.unlink()
    create_pair(settings.keys, "actor")
    key_exchange.tell(ssm, settings, "i-1", now + timedelta(seconds=key_exchange.TELL_SECONDS))
    assert version(ssm, "/apex/pong/keys/actor/i-1") == 3
    (settings.keys / key_exchange.TOLD).write_text("torn")
    key_exchange.tell(ssm, settings, "i-1", now)
    assert version(ssm, "/apex/pong/keys/actor/i-1") == 4
    assert key_exchange.STALE_SECONDS >= 2 * key_exchange.TELL_SECONDS


def make_run(folder: Path) -> Path:
    run = folder / "runs/pong"
    for name in ("manifest.json", "checkpoints/000000001/manifest.json", "checkpoints/000000001/a.safetensors"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    for name in (
        "checkpoints/replay/segments",
        "logs/learner.log",
        "checkpoints/.partial/x",
        "tensorboard/pong/events",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    return run


def objects(s3) -> set[str]:
    return {item["Key"] for item in s3.list_objects_v2(Bucket="weights").get("Contents", [])}


def test_checkpoints_and_curves_go_to_the_bucket_and_stay_there(aws, tmp_path):
    s3, run = aws("s3"), make_run(tmp_path)
    s3.create_bucket(Bucket="weights")
    sent = tmp_path / "sent.json"
    assert host_bucket.upload(s3, "weights", run, sent) == 4
    names = {"manifest.json", "checkpoints/000000001/manifest.json", "checkpoints/000000001/a.safetensors"}
    assert objects(s3) == {f"pong/{name}" for name in names | {"tensorboard/pong/events"}}
    assert host_bucket.upload(s3, "weights", run, sent) == 0
    (run / "checkpoints/000000001/a.safetensors").unlink()
    (run / "tensorboard/pong/events").write_text("more")
    assert host_bucket.upload(s3, "weights", run, sent) == 1
    assert "pong/checkpoints/000000001/a.safetensors" in objects(s3)


def test_a_checkpoints_manifest_goes_last(tmp_path):
    run, tape = make_run(tmp_path), []

    class Bucket:
        def upload_file(self, path: str, bucket: str, key: str) -> None:
            tape.append(key)

    host_bucket.upload(Bucket(), "weights", run, tmp_path / "sent.json")
    assert tape[:2] == ["pong/checkpoints/000000001/a.safetensors", "pong/checkpoints/000000001/manifest.json"]


def test_curves_that_have_grown_are_appended_to_the_file_that_is_open(aws, tmp_path):
    s3, run = aws("s3"), tmp_path / "runs/pong"
    s3.create_bucket(Bucket="weights")
    s3.put_object(Bucket="weights", Key="pong/tensorboard/pong/events", Body=b"one")
    assert host_bucket.fetch_curves(s3, "weights", run) == 3
    with (run / "tensorboard/pong/events").open("rb") as reader:
        assert reader.read() == b"one"
        s3.put_object(Bucket="weights", Key="pong/tensorboard/pong/events", Body=b"one, two")
        assert host_bucket.fetch_curves(s3, "weights", run) == 5
        assert reader.read() == b", two"
    assert host_bucket.fetch_curves(s3, "weights", run) == 0


def test_nothing_in_the_bucket_leads_out_of_the_run(aws, tmp_path):
    s3, run = aws("s3"), tmp_path / "runs/pong"
    s3.create_bucket(Bucket="weights")
    s3.put_object(Bucket="weights", Key="pong/tensorboard/../../../evil", Body=b"x")
    host_bucket.fetch_curves(s3, "weights", run)
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "runs/evil").exists()


def line(number: int, message: object = "hello") -> str:
    entry = {"MESSAGE": message, "_SYSTEMD_UNIT": "apex@actor.service", "__CURSOR": f"c{number}"}
    return json.dumps(entry | {"__REALTIME_TIMESTAMP": str(number * 1_000)})


def test_the_journal_arrives_in_cloudwatch_by_time(aws):
    logs = aws("logs")
    logs.create_log_group(logGroupName="/apex/pong/actor")
    for _ in range(2):  # A machine that was restarted finds its stream.
        journal_upload.make_stream(logs, "/apex/pong/actor", "i-1")
    now = int(time.time() * 1_000)  # CloudWatch takes nothing that is old.
    entries = [
        journal_upload.parse(line(now + 1)),
        journal_upload.parse(line(now, list(b"bytes\xff"))),
        journal_upload.parse("{"),
    ]
    for batch in journal_upload.batches(entries):
        journal_upload.put(logs, "/apex/pong/actor", "i-1", batch)
    found = logs.get_log_events(logGroupName="/apex/pong/actor", logStreamName="i-1", startFromHead=True)["events"]
    assert [event["message"] for event in found] == ["apex@actor: bytes\ufffd", "apex@actor: hello"]


def test_a_call_spans_less_than_a_day():
    day = 24 * 3_600_000
    groups = journal_upload.batches([journal_upload.parse(line(n)) for n in (day, day + 1, 2 * day)])
    assert [len(group) for group in groups] == [2, 1]


def test_a_call_takes_no_more_than_cloudwatch_does():
    big = journal_upload.parse(line(1, "x" * 1_000_000))
    groups = list(journal_upload.batches([big] * 10 + [None] + [journal_upload.parse(line(n)) for n in range(2_500)]))
    assert [len(group) for group in groups] == [4, 4, 2, 1_000, 1_000, 500]
    assert all(sum(len(e.text) + journal_upload.OVERHEAD_BYTES for e in group) < 1_048_576 for group in groups)


@contextmanager
def metadata_service(notice: str | None, own: str = "i-1"):
    """Version 2 only: who brings no token is refused."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, status: int, text: str = "") -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            good = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self.answer(200 if good else 400, "a token")

        def do_GET(self) -> None:
            known = {"/latest/meta-data/instance-id": own, "/latest/meta-data/spot/instance-action": notice}
            if self.headers["X-aws-ec2-metadata-token"] != "a token":
                return self.answer(401)
            found = known.get(self.path)
            return self.answer(404) if found is None else self.answer(200, found)

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Metadata(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_a_machine_learns_its_name_and_that_nobody_wants_it_back():
    with metadata_service(None) as metadata:
        assert metadata.instance_id() == "i-1"
        assert metadata.spot_notice() == ""


def test_a_machine_learns_that_the_market_takes_it_back():
    with metadata_service('{"action": "terminate"}') as metadata:
        assert json.loads(metadata.spot_notice())["action"] == "terminate"


def make_group(aws, size: int):
    ec2, scaling = aws("ec2"), aws("autoscaling")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    zone = {"AvailabilityZones": ["us-east-1a"]}
    template = ec2.create_launch_template(
        LaunchTemplateName="actor", LaunchTemplateData={"ImageId": image, "InstanceType": "c7i.large"}
    )["LaunchTemplate"]["LaunchTemplateId"]
    scaling.create_auto_scaling_group(
        AutoScalingGroupName="apex-pong-actors", MinSize=0, MaxSize=9, DesiredCapacity=size,
        LaunchTemplate={"LaunchTemplateId": template}, **zone,
    )  # fmt: skip
    others = ec2.run_instances(ImageId=image, MinCount=3, MaxCount=3)["Instances"]
    return ec2, scaling, [instance["InstanceId"] for instance in others]


def group(scaling) -> dict:
    return scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]


def state(ec2, host: str) -> str:
    return ec2.describe_instances(InstanceIds=[host])["Reservations"][0]["Instances"][0]["State"]["Name"]


def the_end(scaling, ec2, folder: Path, own: str, others: list[str], upload) -> bool:
    settings = machine(folder, "learner")
    return end_cluster(scaling, ec2, settings, own, lambda: others, upload, lambda: ["a.safetensors"], Stop())


def test_the_end_uploads_scales_to_zero_and_ends_all_machines(aws, tmp_path):
    ec2, scaling, (own, *others) = make_group(aws, 3)
    tape = []
    assert the_end(scaling, ec2, tmp_path, own, others, lambda: tape.append("upload"))
    assert tape == ["upload"]
    assert group(scaling)["DesiredCapacity"] == 0
    assert [state(ec2, host) for host in (own, *others)] == ["terminated"] * 3


def test_an_end_of_which_a_part_fails_does_the_rest(aws, tmp_path):
    ec2, scaling, (own, *others) = make_group(aws, 3)
    assert not the_end(scaling, ec2, tmp_path, own, ["i-0123456789abcdef0", *others], lambda: None)
    assert group(scaling)["DesiredCapacity"] == 0
    assert [state(ec2, host) for host in (own, *others)] == ["terminated"] * 3


def test_the_last_upload_is_tried_again_when_nobody_else_bills_any_more(aws, tmp_path, monkeypatch):
    monkeypatch.setattr(host_shutdown, "FIRST_WAIT_SECONDS", 0.01)
    ec2, scaling, (own, *others) = make_group(aws, 3)
    seen = []

    def upload() -> None:
        seen.append({state(ec2, host) for host in others})
        if len(seen) < 3:
            raise OSError("no network")

    assert the_end(scaling, ec2, tmp_path, own, others, upload)
    assert seen == [{"running"}, {"terminated"}, {"terminated"}]
    assert state(ec2, own) == "terminated"


def test_a_machine_whose_last_upload_fails_for_good_keeps_its_disk_and_says_so(aws, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(host_shutdown, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(host_shutdown, "TRY_SECONDS", 0.05)
    ec2, scaling, (own, *others) = make_group(aws, 3)

    def upload() -> None:
        raise OSError("no network")

    assert not the_end(scaling, ec2, tmp_path, own, others, upload)
    assert group(scaling)["DesiredCapacity"] == 0
    assert [state(ec2, host) for host in (own, *others)] == ["running", "terminated", "terminated"]
    assert "not in s3://weights/pong: a.safetensors. It is stopped" in caplog.messages[-1]


def test_an_actors_machine_that_leaves_is_not_replaced(aws):
    _, scaling, _ = make_group(aws, 3)
    leaver = group(scaling)["Instances"][0]["InstanceId"]
    assert leave_group(scaling, leaver)
    assert group(scaling)["DesiredCapacity"] == 2
    assert leaver not in {instance["InstanceId"] for instance in group(scaling)["Instances"]}


def give(monkeypatch, folder: Path, name: str, script: str) -> Path:
    """A program of that name, in the place of the real one; returns the file in which it notes its arguments."""
    tape, program = folder / f"{name}.tape", folder / name
    program.write_text(f'#!/bin/sh\necho "$*" >>{tape}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tape


def test_the_unit_of_the_keys_ends_when_a_role_can_start(aws, tmp_path):
    boot(aws("ssm"), machine(tmp_path, "learner"), "i-l")
    boot(aws("ssm"), machine(tmp_path, "replay"), "i-r")
    settings = machine(tmp_path, "actor")
    with metadata_service(None) as metadata:
        assert host_command.keys(settings, aws, metadata, Stop()) == FINISHED
    Keys(settings.keys, "actor")


def test_on_the_markets_notice_the_actors_stop_and_the_key_is_taken_back(aws, tmp_path, monkeypatch):
    settings = machine(tmp_path, "actor")
    boot(aws("ssm"), settings, "i-1")
    tape = give(monkeypatch, tmp_path, "systemctl", "")
    with metadata_service('{"action": "terminate"}') as metadata:
        assert host_command.spot(settings, aws, metadata, Stop()) == FINISHED
    assert tape.read_text() == "stop apex@actor.service apex-keys.timer apex-keys.service\n"
    assert aws("ssm").get_parameters_by_path(Path="/apex/pong/", Recursive=True)["Parameters"] == []


def test_the_journal_goes_on_after_what_was_sent_last(aws, tmp_path, monkeypatch):
    aws("logs").create_log_group(logGroupName="/apex/pong/actor")
    settings, now = machine(tmp_path, "actor"), int(time.time() * 1_000)
    tape = give(monkeypatch, tmp_path, "journalctl", f"echo '{line(now)}'; echo '{line(now + 1)}'")
    with metadata_service(None) as metadata:
        for _ in range(2):  # It ends here because the journal does; the unit starts it again.
            assert host_command.logs(settings, aws, metadata, Stop()) == FAILED
    first, second = tape.read_text().splitlines()
    assert "--after-cursor" not in first
    assert "--unit=apex@actor.service" in first.split()
    assert "*" not in first, "journalctl takes a pattern for what is in the journal when it starts"
    assert f"--after-cursor=c{now + 1}" in second


def test_lines_that_come_together_are_told_together():
    first, second = line(1), line(2)
    reader, writer = os.pipe()
    with open(reader, "rb") as journal, open(writer, "wb", buffering=0) as sender:
        entries = host_command._entries(journal, Stop())
        sender.write(f"{first}\n{second}\n{first[:9]}".encode())
        assert [next(entries), next(entries)] == [journal_upload.parse(first), journal_upload.parse(second)]
        sender.write(f"{first[9:]}\n".encode())
        assert next(entries) == journal_upload.parse(first)


def test_a_journal_that_never_rests_is_sent_all_the_same(monkeypatch):
    monkeypatch.setattr(host_command, "FLUSH_SECONDS", 0.0)
    with open(os.devnull, "rb") as journal:
        assert list(itertools.islice(host_command._entries(journal, Stop()), 1)) == [None]


def test_the_learners_machine_ends_replay_and_evaluator_by_their_keys(aws, tmp_path):
    ec2, scaling, (own, replay, evaluator) = make_group(aws, 2)
    aws("s3").create_bucket(Bucket="weights")
    boot(aws("ssm"), machine(tmp_path, "replay"), replay)
    boot(aws("ssm"), machine(tmp_path, "evaluator"), evaluator)
    settings = machine(tmp_path, "learner")
    key_exchange.make_pair(settings.keys, "learner")
    run = make_run(settings.home)
    with metadata_service(None, own) as metadata:
        assert host_command.end(settings, aws, metadata, Stop()) == FINISHED
    assert group(scaling)["DesiredCapacity"] == 0
    assert [state(ec2, name) for name in (own, replay, evaluator)] == ["terminated"] * 3
    assert len(objects(aws("s3"))) == 4
    assert run.exists()


def claim(aws, settings: HostSettings, own: str = "i-1") -> bool:
    with metadata_service(None, own) as metadata:
        return host_command.claim(settings, aws, metadata, Stop())


def test_a_run_begins_once_the_bucket_can_be_written(aws, tmp_path):
    settings = machine(tmp_path, "learner")
    aws("s3").create_bucket(Bucket="weights")
    assert claim(aws, settings)
    assert objects(aws("s3")) == {"pong/begun.json"}
    assert claim(aws, settings)  # The learner's program began, and was started again before it had made its run.


def test_no_run_begins_where_its_weights_would_mix_with_anothers(aws, tmp_path):
    aws("s3").create_bucket(Bucket="weights")
    settings = machine(tmp_path, "learner")
    assert claim(aws, settings, "i-earlier")
    assert claim(aws, settings)  # That one was refused by its settings, say, and has made no run.
    host_bucket.upload(aws("s3"), "weights", make_run(settings.home), settings.home / "sent.json")
    with pytest.raises(ConfigError, match=r"s3://weights/pong has an earlier run: give this cluster another name"):
        claim(aws, settings)


def test_a_busy_bucket_does_not_say_that_there_is_no_earlier_run(aws, tmp_path):
    s3, written = aws("s3"), []

    def busy(**_):
        status = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}
        raise s3.exceptions.ClientError(status, "HeadObject")

    stand_in = SimpleNamespace(exceptions=s3.exceptions, head_object=busy, put_object=lambda **put: written.append(put))
    with pytest.raises(s3.exceptions.ClientError, match="SlowDown"):
        host_bucket.begin(stand_in, "weights", "pong", "i-1")
    assert written == []


def test_no_run_begins_whose_weights_have_nowhere_to_go(aws, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(host_command, "BUCKET_SECONDS", 0.1)
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"cannot write to s3://weights/pong.*NoSuchBucket"):
        claim(aws, machine(tmp_path, "learner"))
    said = [record for record in caplog.records if record.name == "apex"]  # AWS's own package tells things too.
    assert len(said) == 1, "said at once, and once"


def test_a_bucket_that_is_not_open_yet_is_asked_again(aws, tmp_path, monkeypatch):
    monkeypatch.setattr(host_command, "LOOK_SECONDS", 0.1)
    made = []

    def client(service: str):
        made.append(service)
        if len(made) == 3:
            aws("s3").create_bucket(Bucket="weights")
        return aws(service)

    assert claim(client, machine(tmp_path, "learner"))
    assert len(made) == 3


def test_only_a_learner_that_begins_a_run_asks_for_its_place(tmp_path, monkeypatch):
    (tmp_path / "cluster.env").write_text(ENV.replace("=actor", "=learner", 1))
    tape = []
    monkeypatch.setattr(host_command, "aws_clients", lambda settings: None)
    monkeypatch.setattr(host_command, "claim", lambda *_: bool(tape.append("claim")))
    monkeypatch.setattr(host_command, "_become", lambda settings, role, only_print: tape.append(role))
    command = ["--etc", str(tmp_path), "--home", str(tmp_path), "role"]
    assert host_command.main([*command, "learner"]) == FINISHED  # It was told to stop while it waited.
    host_command.main([*command, "replay"])
    make_run(tmp_path)
    host_command.main([*command, "learner"])
    assert tape == ["claim", "replay", "learner"]


def test_what_is_only_on_the_disk_is_named(aws, tmp_path):
    s3, run, sent = aws("s3"), make_run(tmp_path), tmp_path / "sent.json"
    s3.create_bucket(Bucket="weights")
    assert len(host_bucket.only_here(run, sent)) == 4
    host_bucket.upload(s3, "weights", run, sent)
    (run / "tensorboard/pong/events").write_text("more")
    assert host_bucket.only_here(run, sent) == ["tensorboard/pong/events"]


@pytest.mark.parametrize("damage", ["cluster.env", "actor.toml"])
def test_a_refused_configuration_is_status_2_so_that_the_unit_is_not_started_again(tmp_path, capsys, damage):
    (tmp_path / "cluster.env").write_text(ENV)
    (tmp_path / "actor.toml").write_text("")
    (tmp_path / damage).write_text("nonsense = 1\n")
    assert host_command.main(["--etc", str(tmp_path), "--home", str(tmp_path), "role", "actor", "--print"]) == 2
    assert capsys.readouterr().err.startswith("apex host: ")
