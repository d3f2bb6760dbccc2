"""`apex cluster`: looks after the clusters that deploy/terraform brings up, from anywhere, by their tags."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from apex.cloud.cluster.audit import Auditor
from apex.cloud.cluster.audit import show as show_audit
from apex.cloud.cluster.aws import Aws, AwsError, named, open_aws
from apex.cloud.cluster.inventory import find_bucket, find_clusters, require_cluster
from apex.cloud.cluster.logs import GROUPS, Tail, duration, groups_for
from apex.cloud.cluster.prices import read_prices
from apex.cloud.cluster.resize import resize
from apex.cloud.cluster.table import as_json, show
from apex.cloud.cluster.teardown import Teardown, look, summary
from apex.config.command_line import reader_may_leave
from apex.errors import ConfigError
from apex.runtime.lifecycle import FAILED, FINISHED, complain, reports_errors, sleep, stop_on_signals

FOLLOW_SECONDS = 3.0  # between two looks at a log; CloudWatch allows few


@reports_errors("apex cluster")
def main(
    argv: Sequence[str] | None = None,
    *,
    open_aws: Callable[[str | None], Aws] = open_aws,
    ask: Callable[[str], str] = input,
) -> int:
    """The composition root. Status 1: something failed, could not be removed, or would bill; 2: refused."""
    arguments = _parser().parse_args(argv)
    if getattr(arguments, "name", None) is not None:
        named(arguments.name)
    return _WORDS[arguments.word](arguments, open_aws(arguments.region), ask)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="apex cluster", description="Looks after clusters on EC2, by their tags.")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--region", metavar="REGION", help="such as us-east-1; by default the one of AWS's own tools")
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")

    def word(name: str, about: str) -> argparse.ArgumentParser:
        return words.add_parser(name, help=about, description=about, parents=[where])

    command = word("list", "all clusters of a region side by side: hosts, actors, cost, and what is wrong")
    command.add_argument("--json", action="store_true", help="one object, for programs")
    command = word("tail", "what the hosts of a cluster log, by time")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--role", metavar="ROLE", help=f"only one of {', '.join(GROUPS)}")
    command.add_argument("--since", default="10m", metavar="AGE", help="how far back: 90s, 10m, 2h, 1d (default 10m)")
    command.add_argument("--follow", action="store_true", help="goes on until Ctrl-C")
    command = word("resize", "sets how many actor hosts a cluster has")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--actors", type=int, required=True, metavar="N", help="actor hosts, 0 to actor_hosts")
    command = word("kill", "ends a cluster and removes all of it but the weights, half made or whole")
    command.add_argument("name", metavar="NAME")
    command.add_argument("--yes", action="store_true", help="does not ask")
    command = word("audit", "what would still bill; status 0 when it is nothing but what is kept on purpose")
    command.add_argument("name", metavar="NAME", nargs="?", help="one cluster; by default all, and what none owns")
    command.add_argument("--bucket", action="append", default=[], help="one without the tag Project=apex-zeromq, too")
    return parser


def _list(arguments: argparse.Namespace, aws: Aws, ask: Callable[[str], str]) -> int:
    clusters, prices, now = find_clusters(aws), read_prices(), datetime.now(UTC)
    with reader_may_leave():
        if arguments.json:
            print(json.dumps(as_json(clusters, prices, now, aws.region)))
        else:
            print(show(clusters, prices, now, aws.region))
    return FINISHED


def _tail(arguments: argparse.Namespace, aws: Aws, ask: Callable[[str], str]) -> int:
    roles, age = groups_for(arguments.role), duration(arguments.since)
    tail = Tail(aws, require_cluster(aws, arguments.name).name, roles, datetime.now(UTC) - age)
    with reader_may_leave(), stop_on_signals() as stop:
        while not stop.requested:
            for line in tail.look(datetime.now(UTC)):
                print(line)
                if stop.requested:
                    break
            sys.stdout.flush()
            if not arguments.follow:
                break
            sleep(FOLLOW_SECONDS, stop)
    return FINISHED


def _resize(arguments: argparse.Namespace, aws: Aws, ask: Callable[[str], str]) -> int:
    print(resize(aws, require_cluster(aws, arguments.name), arguments.actors))
    return FINISHED


def _kill(arguments: argparse.Namespace, aws: Aws, ask: Callable[[str], str]) -> int:
    name = arguments.name
    found = look(aws, name)
    there = [item for item in found if item.error is None]
    if not found:
        others = ", ".join(find_clusters(aws)) or "no cluster"
        print(f"nothing of {name} is in {aws.region}; there is {others}")
        return FINISHED
    if there and not arguments.yes:
        print(f"{name} in {aws.region} has {summary(there)}. All of it is removed; the weights in the bucket stay.")
        _confirm(name, ask)
    weights = _weights(aws, name)
    left = Teardown(aws, name, complain).run()  # Whoever reads along may leave: that ends nothing.
    for item in left:
        complain(f"apex cluster: could not remove the {item}")
    with reader_may_leave():
        if weights:
            print(f"the weights stay: {weights}")
        print(
            f"if Terraform brought {name} up, its state still names what is gone. To empty it, in {name}'s workspace:"
        )
        print("  terraform -chdir=deploy/terraform destroy")
        print(f"{name} is {'not gone: the same command again goes on' if left else 'gone'}")
    return FAILED if left else FINISHED


def _confirm(name: str, ask: Callable[[str], str]) -> None:
    try:
        typed = ask(f"Type {name} to go on: ")
    except EOFError:
        raise ConfigError(f"nobody typed the name; apex cluster kill {name} --yes does not ask") from None
    if typed.strip() != name:
        raise ConfigError(f"{typed.strip()!r} is not {name}: nothing was removed")


def _weights(aws: Aws, name: str) -> str:
    """Where they are, if a host can tell; while it is being killed, that is no reason to stop."""
    try:
        cluster = find_clusters(aws).get(name)
        bucket = find_bucket(aws, cluster) if cluster else ""
    except AwsError:
        return ""
    return f"s3://{bucket}/{name}/" if bucket else ""


def _audit(arguments: argparse.Namespace, aws: Aws, ask: Callable[[str], str]) -> int:
    prices = read_prices()
    audit = Auditor(aws, prices, arguments.name, arguments.bucket).run()
    where = f"of {arguments.name} in {aws.region}" if arguments.name else f"in {aws.region}"
    with reader_may_leave():
        print(show_audit(audit, prices, where))
    return FINISHED if audit.is_clean else FAILED


_WORDS = {"list": _list, "tail": _tail, "resize": _resize, "kill": _kill, "audit": _audit}


if __name__ == "__main__":
    sys.exit(main())
