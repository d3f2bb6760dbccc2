"""`apex cluster`: what it says of clusters, and what it does to them, by an AWS that keeps a tape.

deploy/tests has the same on an emulated AWS, whole clusters at a time.
"""

import json
import signal
from datetime import UTC, datetime, timedelta

import pytest

from apex.cloud.cluster.audit import Auditor
from apex.cloud.cluster.aws import Aws, AwsError, NotReachedError
from apex.cloud.cluster.command import main
from apex.cloud.cluster.inventory import (
    AutoScalingGroup,
    Cluster,
    ClusterHost,
    Disk,
    cost,
    find_bucket,
    find_clusters,
    problems,
)
from apex.cloud.cluster.logs import WINDOW, Tail, duration
from apex.cloud.cluster.prices import read_prices
from apex.cloud.cluster.resize import resize
from apex.cloud.cluster.table import show
from apex.cloud.cluster.teardown import LOOK_SECONDS, PATIENCE_SECONDS, Teardown, look
from apex.errors import ConfigError

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
START = NOW - timedelta(hours=2)
NOTHING = AwsError("there is none", "NoSuchEntity")
DENIED = AwsError("you may not: it needs the permission ec2:TerminateInstances", "UnauthorizedOperation", denied=True)


class FakeAws(Aws):
    """Answers by operation: what is not in `answers` is not there. A callable is called, an exception raised."""

    def __init__(self, **answers):
        super().__init__("us-east-1", lambda service: pytest.fail(f"reached for {service}"))
        self.answers = {"get_role": NOTHING, "get_instance_profile": NOTHING, "describe_budget": NOTHING, **answers}
        self.answers.setdefault("describe_addresses", {"Addresses": []})
        self.answers.setdefault("get_caller_identity", {"Account": "1"})
        self.answers.setdefault("describe_scaling_activities", {"Activities": []})
        self.tape = []

    def _answer(self, operation, arguments, default):
        answer = self.answers.get(operation, default)
        if callable(answer):
            answer = answer(**arguments)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, service, operation, **arguments):
        if not operation.startswith(("describe_", "get_", "list_")):
            self.tape.append((operation, *map(str, arguments.values())))
        return self._answer(operation, arguments, {})

    def pages(self, service, operation, key, **arguments):
        yield from self._answer(operation, arguments, [])


def tags(role="learner", cluster="pong"):
    words = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    return [{"Key": key, "Value": value} for key, value in words.items()]


def make_host(role="learner", **changes):
    host = ClusterHost(f"i-{role}", role, "c7i.xlarge", "running", START, spot=False, private="10.0.0.1", public="")
    return host._replace(**changes)


def make_group(**changes):
    return AutoScalingGroup("apex-pong-actors", 3, 0, 6, 3, "", "")._replace(**changes)


def make_cluster(group=make_group(), without="", **changes):  # noqa: B008  # immutable
    hosts = [make_host(role) for role in ("learner", "replay", "evaluator") if role != without]
    return Cluster("pong", hosts, [], group)._replace(**changes)


def instance(role="learner", state="running", **changes):
    return {
        "InstanceId": f"i-{role}",
        "InstanceType": "c7i.xlarge",
        "State": {"Name": state},
        "LaunchTime": START,
        "Tags": tags(role),
        **changes,
    }


def reservations(*instances):
    return [{"Instances": [item]} for item in instances]


def group_item(desired=3, num_in_service=3, **changes):
    one = {"LifecycleState": "InService", "HealthStatus": "Healthy"}
    return {
        "AutoScalingGroupName": "apex-pong-actors",
        "DesiredCapacity": desired,
        "MinSize": 0,
        "MaxSize": 6,
        "Instances": [one] * num_in_service,
        "Tags": tags("actor"),
        **changes,
    }


# list


@pytest.mark.parametrize(
    ("cluster", "sentences"),
    [
        (make_cluster(), []),
        (make_cluster(without="replay"), ["no replay"]),
        (
            make_cluster(hosts=[*make_cluster().hosts, make_host(id="i-2")]),
            ["2 learner hosts, and there should be one"],
        ),
        (
            make_cluster(hosts=[*make_cluster(without="replay").hosts, make_host("replay", state="stopped")]),
            ["replay i-replay is stopped"],
        ),
        (make_cluster(group=None), ["no group of actors"]),
        (make_cluster(make_group(status="Delete in progress")), ["the group of actors: Delete in progress"]),
        (make_cluster(make_group(desired=0, in_service=0)), ["the group of actors is at 0: nobody explores"]),
        (
            make_cluster(make_group(in_service=1, trouble="no Spot capacity")),
            ["1 of 3 actor hosts in service: no Spot capacity"],
        ),
        (
            make_cluster(make_group(desired=0), hosts=[]),
            ["nothing runs: it is over, or half made. terraform destroy, or apex cluster kill pong"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(cluster, sentences):
    assert problems(cluster) == sentences


def test_clusters_are_found_by_their_hosts_their_groups_or_their_networks():
    aws = FakeAws(
        describe_instances=reservations(
            instance(), instance("replay", "terminated"), instance("evaluator", InstanceLifecycle="spot")
        ),
        describe_instance_status=[
            {"InstanceId": "i-learner", "InstanceStatus": {"Status": "impaired"}, "SystemStatus": {"Status": "ok"}}
        ],
        describe_auto_scaling_groups=[group_item(num_in_service=2)],
        describe_scaling_activities={"Activities": [{"StatusCode": "Failed", "StatusMessage": "no Spot capacity"}]},
        describe_vpcs=[{"Tags": tags("network", "half")}],
        describe_volumes=[{"Size": 30, "CreateTime": START, "Tags": tags()}],
    )
    clusters = find_clusters(aws)
    assert list(clusters) == ["half", "pong"]
    assert clusters["half"] == Cluster("half", [], [], None)
    pong = clusters["pong"]
    assert [(host.role, host.state, host.spot) for host in pong.hosts] == [
        ("evaluator", "running", True),
        ("learner", "impaired", False),
    ]
    assert pong.group == make_group(in_service=2, trouble="no Spot capacity")
    assert pong.disks == [Disk(30, START)]
    assert problems(pong) == [
        "no replay",
        "learner i-learner is impaired",
        "2 of 3 actor hosts in service: no Spot capacity",
    ]


def test_a_cost_is_of_what_runs_and_of_every_disk():
    prices = read_prices()._replace(instance_hour={"a": 10.0}, spot_share=0.5, address_hour=1.0, disk_gb_month=730.0)
    hosts = [
        make_host(type="a"),
        make_host(type="a", spot=True, public="198.51.100.1"),
        make_host(type="a", state="stopped"),
        make_host(type="unheard-of"),
    ]
    bill = cost(make_cluster(hosts=hosts, disks=[Disk(100, START)]), prices, NOW)
    assert (bill.hour, bill.so_far, bill.unpriced) == (116.0, 232.0, ["unheard-of"])


def test_the_default_cluster_has_a_price():
    prices = read_prices()
    assert {"r7i.2xlarge", "g6.2xlarge", "c7i.xlarge", "c7i.2xlarge"} <= set(prices.instance_hour)
    assert 0 < prices.spot_share < 1


def test_the_table_has_a_line_for_each_cluster_and_one_for_each_thing_to_know():
    evaluator = make_host("evaluator", type="moon.large", public="198.51.100.1")
    clusters = {
        "pong": make_cluster(hosts=[*make_cluster(without="evaluator").hosts, evaluator]),
        "half": Cluster("half", [], [], None),
    }
    head, pong, half, *rest = show(clusters, read_prices(), NOW, "us-east-1").splitlines()
    assert head.split("  ")[0] == "name"
    assert "3 of 3, at most 6" in pong
    assert "2026-01-02 01:04 UTC (2.0 h)" in pong
    assert half.split() == ["half", "-", "-", "-", "-", "-", "0.00", "0.00"]
    assert rest[:3] == [
        "pong: curves at http://198.51.100.1:6006",
        "pong: no price of moon.large: it costs more than is shown",
        "half: nothing runs: it is over, or half made. terraform destroy, or apex cluster kill half",
    ]
    assert rest[-2] == "about 0.36 USD an hour in us-east-1; so far: by the hosts that are there now"
    assert rest[-1].startswith("(list prices of us-east-1, mid 2025, spot reckoned with 40%")


def test_list_prints_one_object_for_programs(capsys):
    aws = FakeAws(describe_instances=reservations(instance()), describe_auto_scaling_groups=[group_item()])
    assert main(["list", "--json"], open_aws=lambda region: aws) == 0
    (cluster,) = json.loads(capsys.readouterr().out)["clusters"]
    assert (cluster["name"], cluster["actors"]["desired"], cluster["problems"]) == (
        "pong",
        3,
        ["no replay", "no evaluator"],
    )


def test_nothing_there_is_said_with_the_region(capsys):
    assert main(["list"], open_aws=lambda region: FakeAws()) == 0
    assert capsys.readouterr().out == "no cluster in us-east-1. Another region: --region\n"


# tail


class Logs(FakeAws):
    """Log groups by their last word, as lists of (milliseconds, text)."""

    def __init__(self, **groups):
        super().__init__(filter_log_events=self._events, describe_vpcs=[{"Tags": tags()}])
        self.groups = groups
        self.asked = []

    def _events(self, logGroupName, startTime, endTime=None):  # noqa: N803  # boto3's names
        role = logGroupName.rpartition("/")[2]
        self.asked.append((role, startTime, endTime))
        if role not in self.groups:
            return AwsError("no such group", "ResourceNotFoundException")
        end = endTime if endTime is not None else 10**15
        return [
            {"timestamp": at, "logStreamName": "i-1", "eventId": f"{at} {text}", "message": text}
            for at, text in self.groups[role]
            if startTime <= at <= end
        ]


def at(milliseconds):
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def texts(tail, milliseconds):
    return [line.text for line in tail.look(at(milliseconds))]


def test_lines_come_by_time_whatever_their_role_and_a_log_that_is_not_there_has_none():
    logs = Logs(learner=[(3000, "c"), (1000, "a")], replay=[(2000, "b")])
    assert texts(Tail(logs, "pong", ["learner", "replay", "actor"], at(0)), 5000) == ["a", "b", "c"]


def test_a_line_that_comes_late_is_shown_once_and_none_twice():
    logs = Logs(learner=[(100_000, "first")])
    tail = Tail(logs, "pong", ["learner"], at(0))
    assert texts(tail, 100_000) == ["first"]
    logs.groups["learner"] += [(70_000, "late"), (101_000, "second")]
    assert texts(tail, 102_000) == ["late", "second"]
    assert texts(tail, 103_000) == []
    assert texts(tail, 103_000 + 5 * WINDOW) == []
    assert logs.asked[-2:] == [("learner", 71_000, None)] * 2


def test_a_long_time_is_read_in_windows_that_leave_nothing_out_and_show_nothing_twice():
    lines = [(i * WINDOW // 4, str(i)) for i in range(13)]
    logs = Logs(learner=lines)
    assert texts(Tail(logs, "pong", ["learner"], at(0)), 3 * WINDOW) == [text for _, text in lines]
    assert [asked[1:] for asked in logs.asked] == [
        (0, WINDOW - 1),
        (WINDOW, 2 * WINDOW - 1),
        (2 * WINDOW, None),
    ]


def test_a_log_may_not_steer_the_terminal(capsys):
    logs = Logs(actor=[(4 * 10**12, "a\x1b[2Jb\n")])
    assert main(["tail", "pong"], open_aws=lambda region: logs) == 0
    assert capsys.readouterr().out == "2096-10-02 07:06:40Z actor     i-1                 a [2Jb\n"


def test_following_a_log_goes_on_until_ctrl_c(capsys, monkeypatch):
    class Growing(Logs):
        def _events(self, **arguments):
            if len(self.asked) == 8:  # a third look at four roles
                signal.raise_signal(signal.SIGINT)
            self.groups["learner"].append((4 * 10**12 + len(self.asked), "more"))
            return super()._events(**arguments)

    monkeypatch.setattr("apex.cloud.cluster.command.FOLLOW_SECONDS", 0.0)
    logs = Growing(learner=[])
    assert main(["tail", "pong", "--follow"], open_aws=lambda region: logs) == 0
    # One line when the learner's log is first read, four more by the second time, and one after Ctrl-C.
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 1
    assert len(logs.asked) == 12


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400)])
def test_an_age_has_a_unit(text, seconds):
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tail", "pong", "--since", "10"], "--since must be a number with s, m, h or d, as in 10m; got '10'"),
        (["tail", "pong", "--role", "trainer"], "--role must be one of learner, replay, actor, evaluator, refused"),
        (["tail", "pnog"], "there is no cluster 'pnog' in us-east-1; there are pong. Another region: --region"),
        (["tail", "../pong"], "a cluster's name is of a-z, 0-9 and -"),
        (["resize", "pong", "--actors", "3"], "pong has no group of actors"),
    ],
)
def test_refuses_what_it_does_not_understand(words, sentence, capsys):
    assert main(words, open_aws=lambda region: Logs()) == 2
    assert sentence in capsys.readouterr().err


def test_what_aws_refuses_is_a_sentence_and_a_status(capsys):
    assert main(["list"], open_aws=lambda region: FakeAws(describe_instances=DENIED)) == 1
    assert capsys.readouterr().err == f"apex cluster: {DENIED}\n"


# resize


def test_resize_sets_what_is_wanted_once():
    aws = FakeAws()
    assert resize(aws, make_cluster(), 5) == "pong: 5 actor hosts wanted, 3 before"
    assert resize(aws, make_cluster(), 3) == "pong: 3 actor hosts wanted, as before; 3 in service"
    assert aws.tape == [("set_desired_capacity", "apex-pong-actors", "5", "False")]


@pytest.mark.parametrize(
    ("group", "num_hosts", "sentence"),
    [
        (make_group(), 7, "set actor_hosts = 7 in terraform.tfvars and run terraform apply"),
        (make_group(), -1, "--actors must be at least 0, got -1"),
        (make_group(status="Delete in progress"), 2, "cannot be set: Delete in progress"),
    ],
)
def test_resize_refuses_what_the_group_may_not_have(group, num_hosts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        resize(FakeAws(), make_cluster(group), num_hosts)


# kill


class Ending(FakeAws):
    """An instance that takes `rounds` to end, and holds a network; `protected`: it may not be ended."""

    def __init__(self, rounds=1, protected=False, **answers):
        super().__init__(**answers)
        self.rounds = rounds
        self.networks = [{"VpcId": "vpc-1", "Tags": tags("network")}]
        self.answers |= {
            "describe_instances": lambda **_: reservations(instance()) if self.rounds > 0 else [],
            "terminate_instances": DENIED if protected else self._terminate,
            "describe_vpcs": lambda **_: self.networks,
            "delete_vpc": self._delete_vpc,
            "describe_instance_attribute": {"UserData": {"Value": "QVBFWF9CVUNLRVQ9d2VpZ2h0cwo="}},
        }

    def _terminate(self, **arguments):
        self.rounds -= 1
        return {}

    def _delete_vpc(self, **arguments):
        self.networks = []
        return {}


def killer(aws, said=None, seconds=None):
    clock = iter(range(10**6))
    return Teardown(
        aws,
        "pong",
        (said if said is not None else []).append,
        sleep=(seconds if seconds is not None else []).append,
        clock=lambda: float(next(clock)),
    )


def test_nothing_but_hosts_is_removed_before_they_have_ended():
    aws, said = Ending(rounds=3), []
    assert killer(aws, said).run() == []
    assert aws.tape == [("terminate_instances", "['i-learner']")] * 3 + [("delete_vpc", "vpc-1")]
    assert said == ["removes instance i-learner", "waits for 1 instance", "removes network vpc-1"]


def test_what_may_not_be_removed_is_told_after_a_second_try_with_the_rest_that_stays():
    aws, seconds = Ending(protected=True), []
    left = [str(item) for item in killer(aws, seconds=seconds).run()]
    assert left == [f"instance i-learner: {DENIED}", "network vpc-1"]
    assert seconds == [LOOK_SECONDS]


def test_nobody_waits_for_what_is_held_by_something_that_may_not_be_removed():
    held = AwsError("it has dependencies", "DependencyViolation")
    aws, seconds = Ending(rounds=0, delete_volume=DENIED, describe_volumes=[{"VolumeId": "vol-1"}]), []
    aws.answers["delete_vpc"] = held
    left = [str(item) for item in killer(aws, seconds=seconds).run()]
    assert left == [f"volume vol-1: {DENIED}", "network vpc-1: it has dependencies"]
    assert seconds == [LOOK_SECONDS]


def test_it_gives_up_when_nothing_gets_any_less():
    aws, seconds = Ending(rounds=10**9), []
    left = killer(aws, seconds=seconds).run()
    assert [item.kind for item in left] == ["instance", "network"]
    assert len(seconds) == pytest.approx(PATIENCE_SECONDS, abs=3)  # The clock of this test ticks once a look.


def test_what_holds_another_thing_goes_in_a_later_round():
    held = AwsError("it has dependencies", "DependencyViolation")
    aws = Ending(rounds=0)
    refusals = iter([held, held])

    def delete(**arguments):
        refusal = next(refusals, None)
        return refusal if refusal else Ending._delete_vpc(aws)

    aws.answers["delete_vpc"] = delete
    assert killer(aws).run() == []
    assert len(aws.tape) == 3


def test_kill_asks_for_the_name_and_then_says_where_the_weights_are(capsys):
    aws = Ending()
    assert main(["kill", "pong"], open_aws=lambda region: aws, ask=lambda question: "pnog") == 2
    assert aws.tape == []
    assert "'pnog' is not pong: nothing was removed" in capsys.readouterr().err
    assert main(["kill", "pong"], open_aws=lambda region: aws, ask=lambda question: "pong") == 0
    out = capsys.readouterr().out
    assert "pong in us-east-1 has 1 instance, 1 network" in out
    assert "the weights stay: s3://weights/pong/" in out
    assert "terraform -chdir=deploy/terraform destroy" in out
    assert main(["kill", "pong", "--yes"], open_aws=lambda region: aws) == 0
    assert capsys.readouterr().out == "nothing of pong is in us-east-1; there is no cluster\n"


def test_kill_ends_with_a_status_and_the_names_of_what_is_left(capsys, monkeypatch):
    monkeypatch.setattr("apex.cloud.cluster.teardown.LOOK_SECONDS", 0.0)
    assert main(["kill", "pong", "--yes"], open_aws=lambda region: Ending(protected=True)) == 1
    out, err = capsys.readouterr()
    assert f"could not remove the instance i-learner: {DENIED}" in err
    assert "pong is not gone" in out


def test_a_kind_that_cannot_be_looked_for_is_not_taken_for_gone(capsys, monkeypatch):
    monkeypatch.setattr("apex.cloud.cluster.teardown.LOOK_SECONDS", 0.0)
    aws = FakeAws(describe_volumes=AwsError("you may not", "UnauthorizedOperation", denied=True))
    assert main(["kill", "pong", "--yes"], open_aws=lambda region: aws) == 1
    assert "could not remove the volume: you may not" in capsys.readouterr().err


def test_a_role_of_that_name_which_is_not_tagged_is_somebody_elses():
    roles = {"apex-pong-learner": tags(), "apex-pong-actor": tags("actor", "pong-actor"), "apex-pong-replay": []}

    def get_role(RoleName):  # noqa: N803  # boto3's name
        return {"Role": {"Tags": roles[RoleName]}} if RoleName in roles else NOTHING

    aws = FakeAws(
        get_role=get_role,
        delete_role=lambda RoleName: roles.pop(RoleName),  # noqa: N803
        list_role_policies={"PolicyNames": ["learner"]},
        list_attached_role_policies={"AttachedPolicies": []},
    )
    assert killer(aws).run() == []
    assert aws.tape == [("delete_role_policy", "apex-pong-learner", "learner"), ("delete_role", "apex-pong-learner")]


def test_a_bucket_is_what_the_learner_was_told():
    assert find_bucket(Ending(), make_cluster()) == "weights"
    assert find_bucket(Ending(), make_cluster(without="learner")) == ""


# audit


def test_what_bills_is_told_from_what_is_kept(capsys):
    aws = FakeAws(
        describe_instances=reservations(instance(), instance("replay", "stopped"), instance("actor", "terminated")),
        describe_volumes=[{"VolumeId": "vol-1", "Size": 100, "State": "available", "Tags": tags()}],
        describe_auto_scaling_groups=[group_item()],
        describe_addresses={"Addresses": [{"PublicIp": "198.51.100.1", "Tags": tags()}]},
        describe_nat_gateways=[
            {"NatGatewayId": "nat-1", "State": "available"},
            {"NatGatewayId": "nat-2", "State": "deleted"},
        ],
        describe_vpc_endpoints=[
            {"VpcEndpointId": "vpce-1", "VpcEndpointType": "Gateway", "State": "available", "ServiceName": "s3"},
            {"VpcEndpointId": "vpce-2", "VpcEndpointType": "Interface", "State": "available", "ServiceName": "ssm"},
        ],
        describe_log_groups=[{"logGroupName": "/apex/pong/learner", "storedBytes": 3 * 2**30}],
        describe_images=[
            {
                "ImageId": "ami-1",
                "Name": "apex-cpu-1",
                "BlockDeviceMappings": [{"Ebs": {"SnapshotId": "snap-1", "VolumeSize": 12}}, {"VirtualName": "x"}],
            }
        ],
        describe_snapshots=[{"SnapshotId": "snap-1", "VolumeSize": 12}, {"SnapshotId": "snap-2", "VolumeSize": 20}],
        get_resources=[{"ResourceARN": "arn:aws:s3:::weights"}],
        list_object_versions=[{"Key": "pong/best/weights", "Size": 2**30}, {"Key": "pong/a", "Size": 2**29}],
    )
    assert main(["audit"], open_aws=lambda region: aws) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-3] == [
        "group apex-pong-actors of pong: starts instances until there are 3",
        "instance i-learner of pong: c7i.xlarge, running",
        "instance i-replay of pong: c7i.xlarge, stopped",
        "volume vol-1 of pong: 100 GB, available",
        "address 198.51.100.1 of pong",
        "NAT gateway nat-1: available",
        "endpoint vpce-2: ssm",
        "log group /apex/pong/learner of pong: 3.0 GB",
        "snapshot snap-2: at most 20 GB, of no image",
        "image ami-1: apex-cpu-1, at most 12 GB of snapshots, kept on purpose",
        "weights s3://weights/pong/: 1.5 GB with old versions, kept on purpose",
    ]
    # A month: 730 x (0.1785 + 0.005 + 0.045 + 0.01) + 100 x 0.08 + 3 x 0.03 + 20 x 0.05
    assert lines[-3] == "9 things in us-east-1 would bill: about 0.25 USD an hour, 183.19 USD a month"
    assert lines[-2] == "kept on purpose: about 0.00 USD an hour, 0.63 USD a month"


def test_what_could_not_be_looked_at_is_not_taken_for_clean():
    audit = Auditor(FakeAws(describe_volumes=DENIED), read_prices(), "pong").run()
    assert audit.findings == []
    assert audit.blind == [f"volumes were not looked at: {DENIED}"]
    assert not audit.is_clean


@pytest.mark.parametrize("word", ["list", "audit", "kill"])
def test_whoever_aws_does_not_know_is_told_once(word, capsys):
    stranger = NotReachedError("no credentials", denied=True)
    aws = FakeAws(describe_instances=stranger, describe_auto_scaling_groups=stranger, describe_volumes=stranger)
    assert main([word, *(["pong"] if word == "kill" else [])], open_aws=lambda region: aws) == 1
    assert capsys.readouterr() == ("", "apex cluster: no credentials\n")


def test_an_end_goes_on_when_the_network_is_back():
    away = NotReachedError("ec2 describe_volumes: Could not connect")
    answers = iter([[], away, []])
    aws, seconds = FakeAws(describe_volumes=lambda **_: next(answers)), []
    assert look(aws, "pong") == []
    assert killer(aws, seconds=seconds).run() == []
    assert seconds == [LOOK_SECONDS]


def test_an_audit_of_nothing_is_clean(capsys):
    assert main(["audit", "pong"], open_aws=lambda region: FakeAws()) == 0
    assert capsys.readouterr().out.startswith("nothing of pong in us-east-1 bills\n")
