"""`apex cluster list`: the clusters created with deploy/terraform, their hosts and their problems."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from apex.cloud.cluster.aws import Aws, open_aws
from apex.cloud.cluster.inventory import Cluster, find_clusters, problems
from apex.config.arguments import Parser, reader_may_leave
from apex.types import PROGRAMS
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import reports_errors


@reports_errors("apex cluster")
def main(argv: Sequence[str] | None = None, *, open_aws: Callable[[str | None], Aws] = open_aws) -> int:
    """Runs `apex cluster` with these arguments; returns its exit status."""
    aws = open_aws(_parser().parse_args(argv).region)
    with reader_may_leave():
        print(show(find_clusters(aws), datetime.now(UTC), aws.region))
    return FINISHED


def _parser() -> Parser:
    about = "Lists the clusters of a region on EC2 with their hosts and problems. Remove them with terraform destroy."
    parser = Parser(prog="apex cluster", description=about)
    command = parser.add_subparsers(dest="command", required=True, metavar="COMMAND").add_parser(
        "list", help="list the clusters of a region with their hosts and problems", description=about
    )
    region = "AWS region, such as us-east-1 (default: the one configured for the AWS tools)"
    command.add_argument("--region", metavar="REGION", help=region)
    return parser


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
