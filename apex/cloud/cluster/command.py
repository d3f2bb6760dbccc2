"""`apex cluster`: lists the clusters created with deploy/terraform, shows their logs, and resizes them."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from apex.cloud.cluster.aws import Aws, open_aws
from apex.cloud.cluster.inventory import Cluster, find_clusters, problems, require_cluster
from apex.cloud.cluster.logs import GROUPS, Tail, duration
from apex.config.arguments import Parser, reader_may_leave
from apex.types import PROGRAMS
from apexreplay.errors import FINISHED, require
from apexreplay.process.lifecycle import reports_errors, sleep, stop_on_signals

FOLLOW_SECONDS = 3.0  # time between two reads of a log; CloudWatch limits the rate of reads


@reports_errors("apex cluster")
def main(
    argv: Sequence[str] | None = None,
    *,
    open_aws: Callable[[str | None], Aws] = open_aws,
    follow_seconds: float = FOLLOW_SECONDS,
) -> int:
    """Runs `apex cluster` with these arguments; returns its exit status."""
    arguments = _parser().parse_args(argv)
    arguments.follow_seconds = follow_seconds
    _COMMANDS[arguments.command](arguments, open_aws(arguments.region))
    return FINISHED


def _parser() -> Parser:
    parser = Parser(
        prog="apex cluster",
        description="Lists and resizes clusters on EC2 and shows their logs. Remove clusters with terraform destroy.",
    )
    where = Parser(add_help=False)
    region = "AWS region, such as us-east-1 (default: the one configured for the AWS tools)"
    where.add_argument("--region", metavar="REGION", help=region)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, about: str) -> Parser:
        return commands.add_parser(name, help=about, description=about, parents=[where])

    add("list", "list the clusters of a region with their hosts and problems")
    command = add("tail", "show the logs of a cluster's hosts in order of time")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--role", metavar="ROLE", choices=GROUPS, help=f"show only one log: {', '.join(GROUPS)}")
    command.add_argument(
        "--since", default="10m", metavar="AGE", help="age of the oldest lines: 90s, 10m, 2h, 1d (default 10m)"
    )
    command.add_argument("--follow", action="store_true", help="show new lines until Ctrl-C")
    command = add("resize", "set the number of actor hosts of a cluster")
    command.add_argument("name", metavar="NAME")
    actors = "number of actor hosts, 0 to actor_hosts in terraform.tfvars"
    command.add_argument("--actors", type=int, required=True, metavar="N", help=actors)
    return parser


def _list(arguments: argparse.Namespace, aws: Aws) -> None:
    with reader_may_leave():
        print(show(find_clusters(aws), datetime.now(UTC), aws.region))


def show(clusters: Mapping[str, Cluster], now: datetime, region: str) -> str:
    """Returns a table with the hosts in service / desired of each cluster, then addresses of curves, then problems."""
    if not clusters:
        return f"no cluster in {region}. For another region use --region"
    rows: list[tuple[str, ...]] = [("name", *PROGRAMS, "up since")]
    for name, cluster in clusters.items():
        sizes = {role: f"{group.in_service}/{group.desired}" for role, group in cluster.groups.items()}
        since = cluster.hosts[0].since if cluster.hosts else now
        hours = max(0.0, (now - since).total_seconds() / 3600)  # AWS's clock may be ahead.
        age = f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC ({hours:.1f} h)"
        rows.append((name, *(sizes.get(role, "-") for role in PROGRAMS), age if cluster.hosts else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, cluster in clusters.items():
        learners = [host for host in cluster.hosts if host.role == "learner" and host.public]
        lines += [f"{name}: curves at http://{host.public}:6006" for host in learners]
        lines += [f"{name}: {sentence}" for sentence in problems(cluster)]
    return "\n".join(lines)


def _tail(arguments: argparse.Namespace, aws: Aws) -> None:
    roles, since = [arguments.role] if arguments.role else PROGRAMS, datetime.now(UTC) - duration(arguments.since)
    tail = Tail(aws, require_cluster(aws, arguments.name).name, roles, since)
    with reader_may_leave(), stop_on_signals() as stop:
        while not stop.poll():
            for line in tail.read():
                print(line)
                if stop.poll():
                    break
            sys.stdout.flush()
            if not arguments.follow:
                break
            sleep(arguments.follow_seconds, stop)


def _resize(arguments: argparse.Namespace, aws: Aws) -> None:
    """Sets the number of actor hosts. If N > 0, also sets other groups from 0, their size after a run, back to 1."""
    groups, size = require_cluster(aws, arguments.name).groups, arguments.actors
    require("actor" in groups, f"{arguments.name} has no group of actor hosts: terraform apply has not finished")
    group = groups["actor"]
    require(size >= 0, f"--actors must be >= 0, got {size}")
    require(
        size <= group.most,
        f"--actors must be <= {group.most}, got {size}: set actor_hosts = {size} in terraform.tfvars, run "
        "terraform apply, then repeat this command",
    )
    sizes = {role: 1 for role, other in groups.items() if size and not other.desired} | {"actor": size}
    for role in sizes:
        names = {"AutoScalingGroupName": groups[role].name, "DesiredCapacity": sizes[role]}
        aws.call("autoscaling", "set_desired_capacity", **names)
    print(f"{arguments.name}: desired actor hosts {size} (before: {group.desired}); {group.in_service} in service")


_COMMANDS = {"list": _list, "tail": _tail, "resize": _resize}
