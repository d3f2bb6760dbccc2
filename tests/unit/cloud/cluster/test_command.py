"""`apex cluster` against a fake AWS that records calls. deploy/tests has whole clusters on an emulated AWS."""

import re
import signal
from datetime import UTC, datetime, timedelta

import pytest

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.command import main, show
from apex.cloud.cluster.inventory import AutoScalingGroup, Cluster, ClusterHost, find_clusters, problems
from apex.cloud.cluster.logs import Tail, duration
from apex.errors import AwsError

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
START = NOW - timedelta(hours=2)
DENIED = AwsError("AWS denies ec2:DescribeInstances", "UnauthorizedOperation")


class FakeAws(Aws):
    """Answers each operation from `answers`, else with nothing. Calls callables and raises exceptions."""

    def __init__(self, **answers):
        super().__init__("us-east-1", lambda service: pytest.fail(f"reached for {service}"))
        self.answers = {"describe_scaling_activities": {"Activities": []}, **answers}
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
    values = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    return [{"Key": key, "Value": value} for key, value in values.items()]


def make_host(role="learner", **changes):
    return ClusterHost(f"i-{role}", role, "running", START, public="")._replace(**changes)


def make_group(role="actor", **changes):
    most = 6 if role == "actor" else 1
    size = 3 if role == "actor" else 1
    return AutoScalingGroup(f"apex-pong-{role}", size, most, size, "", "")._replace(**changes)


def make_cluster(group=make_group(), hosts=None):  # noqa: B008  # immutable
    hosts = [make_host("learner"), make_host("evaluator"), *[make_host("actor")] * 3] if hosts is None else hosts
    return Cluster("pong", hosts, {"learner": make_group("learner"), "actor": group})


def instance(role="learner", state="running", **changes):
    return {"InstanceId": f"i-{role}", "State": {"Name": state}, "LaunchTime": START, "Tags": tags(role), **changes}


def reservations(*instances):
    return [{"Instances": [item]} for item in instances]


def group_item(role="actor", desired=3, num_in_service=3, **changes):
    one = {"LifecycleState": "InService", "HealthStatus": "Healthy"}
    return {
        "AutoScalingGroupName": f"apex-pong-{role}",
        "DesiredCapacity": desired,
        "MaxSize": 6,
        "Instances": [one] * num_in_service,
        "Tags": tags(role),
        **changes,
    }


# list


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        (make_cluster(), []),
        (make_cluster(hosts=[make_host(state="running"), make_host("actor", state="stopping")]),
         ["i-actor is stopping"]),
        (make_cluster(hosts=[make_host(state="stopped")]), ["i-learner is stopped: its disk"]),
        (make_cluster(make_group(status="Delete in progress")), ["Delete in progress"]),
        (make_cluster(make_group(desired=0, in_service=0)), ["size 0"]),
        (make_cluster(make_group(in_service=1, trouble="no Spot capacity")), ["1 of 3 actor .*: no Spot capacity"]),
        (Cluster("pong", [], {"actor": make_group(desired=0)}), ["terraform destroy"]),
    ],
)  # fmt: skip
def test_each_problem_names_its_subject(cluster, names):
    found = problems(cluster)
    assert len(found) == len(names)
    assert all(re.search(name, problem) for name, problem in zip(names, found, strict=True))


def test_clusters_are_found_by_hosts_groups_and_networks():
    aws = FakeAws(
        describe_instances=reservations(
            instance(LaunchTime=NOW), instance("replay", "terminated"), instance("evaluator", PublicIpAddress="1.2.3.4")
        ),
        describe_auto_scaling_groups=[group_item(num_in_service=2)],
        describe_scaling_activities={"Activities": [{"StatusCode": "Failed", "StatusMessage": "no Spot capacity"}]},
        describe_vpcs=[{"Tags": tags("network", "half")}],
    )
    clusters = find_clusters(aws)
    assert list(clusters) == ["half", "pong"]
    assert clusters["half"] == Cluster("half", [], {})
    pong = clusters["pong"]
    assert [(host.role, host.public) for host in pong.hosts] == [("evaluator", "1.2.3.4"), ("learner", "")]
    assert pong.groups == {"actor": make_group(in_service=2, trouble="no Spot capacity")}
    assert len(problems(pong)) == 1


def test_the_table_has_a_row_per_cluster_and_a_line_per_problem():
    learner = make_host("learner", public="198.51.100.1")
    clusters = {"pong": make_cluster(hosts=[learner]), "half": Cluster("half", [], {})}
    *rows, problem = show(clusters, NOW, "us-east-1").splitlines()
    assert rows == [
        "name  learner  replay  actor  evaluator  up since",
        "pong  1/1      -       3/3    -          2026-01-02 01:04 UTC (2.0 h)",
        "half  -        -       -      -          -",
        "pong: curves at http://198.51.100.1:6006",
    ]
    assert problem.startswith("half: ")


def test_list_prints_the_table(capsys):
    aws = FakeAws(describe_instances=reservations(instance()), describe_auto_scaling_groups=[group_item()])
    assert main(["list"], open_aws=lambda region: aws) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["pong", "-", "-", "3/3"]


def test_a_region_without_clusters_is_named(capsys):
    assert main(["list"], open_aws=lambda region: FakeAws()) == 0
    assert "us-east-1" in capsys.readouterr().out


# tail


class Logs(FakeAws):
    """Log groups by role, as lists of (milliseconds, text)."""

    def __init__(self, **groups):
        super().__init__(filter_log_events=self._events, describe_vpcs=[{"Tags": tags()}])
        self.groups = groups
        self.asked = []

    def _events(self, logGroupName, startTime):  # noqa: N803  # boto3's names
        role = logGroupName.rpartition("/")[2]
        self.asked.append((role, startTime))
        if role not in self.groups:
            return AwsError("no such group", "ResourceNotFoundException")
        return [
            {"timestamp": at, "logStreamName": "i-1", "eventId": f"{at} {text}", "message": text}
            for at, text in self.groups[role]
            if startTime <= at
        ]


def at(milliseconds):
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def texts(tail):
    return [line.text for line in tail.read()]


def test_lines_of_all_roles_are_ordered_by_time():
    logs = Logs(learner=[(3000, "c"), (1000, "a")], replay=[(2000, "b")])
    assert texts(Tail(logs, "pong", ["learner", "replay", "actor"], at(0))) == ["a", "b", "c"]


def test_late_lines_are_shown_once():
    logs = Logs(learner=[(100_000, "first")])
    tail = Tail(logs, "pong", ["learner"], at(0))
    assert texts(tail) == ["first"]
    logs.groups["learner"] += [(70_000, "late"), (101_000, "second")]
    assert texts(tail) == ["late", "second"]
    assert texts(tail) == []
    assert logs.asked[-1] == ("learner", 71_000)


def test_control_characters_of_a_log_are_removed(capsys):
    logs = Logs(actor=[(4 * 10**12, "a\x1b[2Jb\n")])
    assert main(["tail", "pong"], open_aws=lambda region: logs) == 0
    assert capsys.readouterr().out == "2096-10-02 07:06:40Z actor     i-1                 a [2Jb\n"


def test_following_a_log_ends_with_ctrl_c(capsys):
    class Growing(Logs):
        def _events(self, **arguments):
            if len(self.asked) == 8:  # a third look at four roles
                signal.raise_signal(signal.SIGINT)
            self.groups["learner"].append((4 * 10**12 + len(self.asked), "more"))
            return super()._events(**arguments)

    logs = Growing(learner=[])
    assert main(["tail", "pong", "--follow"], open_aws=lambda region: logs, follow_seconds=0.0) == 130
    # One line when the learner's log is first read, four more by the second time, and one after Ctrl-C.
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 + 1
    assert len(logs.asked) == 12


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400)])
def test_an_age_is_read_with_its_unit(text, seconds):
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tail", "pong", "--since", "10"], ["--since", "'10'"]),
        (["tail", "pnog"], ["'pnog'", "us-east-1", "pong"]),
        (["resize", "pong", "--actors", "3"], ["pong"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, named, capsys):
    assert main(arguments, open_aws=lambda region: Logs()) == 2
    message = capsys.readouterr().err
    assert all(name in message for name in named)


def test_a_refusal_of_aws_ends_the_command_with_status_1(capsys):
    assert main(["list"], open_aws=lambda region: FakeAws(describe_instances=DENIED)) == 1
    assert capsys.readouterr().err == f"apex cluster: {DENIED}\n"


# resize


def resize(size, *groups):
    aws = FakeAws(describe_auto_scaling_groups=groups)
    return main(["resize", "pong", "--actors", str(size)], open_aws=lambda region: aws), aws.tape


def test_resize_sets_the_desired_size(capsys):
    assert resize(5, group_item()) == (0, [("set_desired_capacity", "apex-pong-actor", "5")])
    assert capsys.readouterr().out == "pong: desired actor hosts 5 (before: 3); 3 in service\n"


def test_resize_starts_the_hosts_of_an_ended_run_again(capsys):
    ended = [group_item(role, desired=0, num_in_service=0) for role in ("learner", "evaluator", "actor")]
    assert resize(2, *ended)[1] == [
        ("set_desired_capacity", "apex-pong-learner", "1"),
        ("set_desired_capacity", "apex-pong-evaluator", "1"),
        ("set_desired_capacity", "apex-pong-actor", "2"),
    ]
    assert resize(0, *ended)[1] == [("set_desired_capacity", "apex-pong-actor", "0")]


@pytest.mark.parametrize(("size", "named"), [(7, "actor_hosts = 7"), (-1, "--actors")])
def test_resize_refuses_sizes_that_the_group_does_not_allow(size, named, capsys):
    assert resize(size, group_item()) == (2, [])
    assert named in capsys.readouterr().err
