"""`apex cluster` against a fake AWS. deploy/tests has whole clusters on an emulated AWS."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from apex.cloud.cluster.aws import Aws
from apex.cloud.cluster.command import main, show
from apex.cloud.cluster.inventory import AutoScalingGroup, Cluster, ClusterHost, find_clusters, problems
from apex.errors import AwsError

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
START = NOW - timedelta(hours=2)
DENIED = AwsError("AWS denies ec2:DescribeInstances")


class FakeAws(Aws):
    """Answers each operation from `answers`, else with nothing. Raises exceptions."""

    def __init__(self, **answers):
        super().__init__("us-east-1", lambda service: pytest.fail(f"reached for {service}"))
        self.answers = answers

    def pages(self, service, operation, key, **arguments):
        answer = self.answers.get(operation, [])
        if isinstance(answer, Exception):
            raise answer
        yield from answer


def tags(role="learner", cluster="pong"):
    values = {"Project": "apex-zeromq", "Cluster": cluster, "Role": role}
    return [{"Key": key, "Value": value} for key, value in values.items()]


def make_host(role="learner", **changes):
    return ClusterHost(f"i-{role}", role, "running", START, public="")._replace(**changes)


def make_group(role="actor", **changes):
    size = 3 if role == "actor" else 1
    return AutoScalingGroup(size, size, "", "")._replace(**changes)


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
        describe_scaling_activities=[{"StatusCode": "Failed", "StatusMessage": "no Spot capacity"}],
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


def test_a_refusal_of_aws_ends_the_command_with_status_1(capsys):
    assert main(["list"], open_aws=lambda region: FakeAws(describe_instances=DENIED)) == 1
    assert capsys.readouterr().err == f"apex cluster: {DENIED}\n"
