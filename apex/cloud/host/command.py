"""`apex host`: what a host of a cluster does for itself. Its systemd units call it; people need it seldom."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from apex.cloud.host import journal_upload, key_exchange
from apex.cloud.host.bucket import RunBucket
from apex.cloud.host.metadata import Metadata
from apex.cloud.host.role import host_command, is_new
from apex.cloud.host.settings import ETC, HOME, HostSettings, read_settings
from apex.cloud.host.shutdown import Client, end_cluster, leave_group
from apex.config.arguments import Parser
from apex.errors import ConfigError, require
from apex.runtime.atomic_files import replace_file
from apex.runtime.lifecycle import (
    FAILED,
    FINISHED,
    Stop,
    Wait,
    configure_logging,
    reports_errors,
    sleep,
    stop_on_signals,
)
from apex.runtime.optional_imports import remedy
from apex.runtime.watchdog import take_notifier
from apex.types import PROGRAMS, Role

LOOK_SECONDS = 5.0  # between two looks for a spot notice or a missing key
BUCKET_SECONDS = 300.0  # for which a bucket may refuse a new cluster: permissions take a minute to be known everywhere
SENT = "sent.json"  # in HOME: what the bucket has
MAX_HOURS = "max-hours"  # in HOME: how many hours the cluster may run (units/bin/apex-max-hours)

log = logging.getLogger("apex")


@reports_errors("apex host")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root."""
    arguments = make_parser().parse_args(argv)
    configure_logging("host")
    try:
        settings = read_settings(arguments.etc, arguments.home)
        if arguments.command == "role":
            if arguments.role == Role.LEARNER and is_new(settings) and not arguments.print:
                with stop_on_signals(lambda: None) as stop:  # The unit is not up yet.
                    if not prepare_run(settings, aws_clients(settings), Metadata(), stop):
                        return FINISHED
            return _become(settings, Role(arguments.role), arguments.print)
        with stop_on_signals(take_notifier()) as stop:
            return _COMMANDS[arguments.command](settings, aws_clients(settings), Metadata(), stop)
    except ConfigError:
        raise  # The unit is not started again after status 2.
    except (
        Exception
    ) as error:  # AWS, the network, the disk: the unit's timer comes again, and its journal stays readable
        log.error("%s: %s: %s", arguments.command, type(error).__name__, error)
        return FAILED


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="apex host", description="What a host of a cluster does for itself.")
    parser.add_argument("--etc", type=Path, default=ETC, metavar="DIR", help="folder of cluster.env and the TOML files")
    parser.add_argument("--home", type=Path, default=HOME, metavar="DIR", help="folder of keys and runs")
    commands = parser.add_subparsers(dest="command", required=True)
    role = commands.add_parser("role", help="become the command of a role; a learner first restores its run")
    role.add_argument("role", choices=[str(role) for role in PROGRAMS])
    role.add_argument("--print", action="store_true", help="only print it")
    commands.add_parser("keys", help="make this host's keys, publish them, accept those of others, read max_hours")
    commands.add_parser("upload", help="copy the run to the bucket")
    commands.add_parser("logs", help="copy the journal to CloudWatch")
    commands.add_parser("spot", help="wait for a spot notice, then stop the roles")
    commands.add_parser("end", help="end the cluster (on the learner's host), or this host (on any other)")
    return parser


def aws_clients(settings: HostSettings) -> Client:
    """Makes clients; credentials are the host's own, which boto3 asks the metadata service for."""
    try:
        import boto3  # an extra: training on one machine needs none of it
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(f"a host of a cluster needs boto3 ({error}): {remedy('aws')}") from error
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 8},
        max_pool_connections=32,  # a restore downloads in parallel
    )
    return lambda service: boto3.client(service, region_name=settings.region, config=config)


def _become(settings: HostSettings, role: Role, only_print: bool) -> int:
    command = host_command(settings, role, len(os.sched_getaffinity(0)))
    log.info("apex %s", shlex.join(command))
    if only_print:
        print(shlex.join(["apex", *command]))
        return FINISHED
    os.execv(sys.executable, [sys.executable, "-P", "-m", "apex", *command])


def keys(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once, and again until the keys of learner and replay server are there: without them no role starts."""
    wait = Wait("host")
    while not stop.requested:
        try:
            ssm, host, address = client("ssm"), metadata.instance_id(), metadata.private_address()
            key_exchange.make_pairs(settings, address)
            entries, now = key_exchange.ask(ssm, settings)
            key_exchange.publish(ssm, settings, host, address, now)
            missing = key_exchange.accept(key_exchange.fresh(entries, now), settings)
            if not missing:
                _read_max_hours(ssm, settings)
                return FINISHED
            wait.on(f"the key of the {missing} in the parameter store")
        except ConfigError:
            raise
        except Exception as error:  # The network, the metadata service, AWS: the lists stay as they are meanwhile.
            wait.on(f"AWS: {error}")
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def _read_max_hours(ssm: Any, settings: HostSettings) -> None:
    """Notes the cluster's hours, which may be raised while it runs."""
    name = f"{settings.parameters}/{MAX_HOURS}"
    replace_file(settings.home / MAX_HOURS, ssm.get_parameter(Name=name)["Parameter"]["Value"].encode())


def prepare_run(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> bool:
    """Restores this cluster's run from the bucket, if it has one; returns False if asked to stop meanwhile.

    A run whose weights cannot be kept does not begin: raises ConfigError where the bucket cannot be written for
    BUCKET_SECONDS, or has another cluster's run of this name.
    """
    said, until = "", time.monotonic() + BUCKET_SECONDS
    while not stop.requested:
        copy = _copy(settings, client)
        try:
            if copy.begin(settings.begun, metadata.instance_id()):
                copy.restore()
        except ConfigError:
            raise
        except Exception as error:  # What keeps it from writing now would also do so at the end.
            if str(error) != said:
                log.error("cannot write to %s, which is to keep the weights; trying again: %s", copy, error)
            said = str(error)
            require(time.monotonic() < until, f"cannot write to {copy}, which is to keep the weights: {error}")
            sleep(LOOK_SECONDS, stop)
            continue
        log.info("checkpoints and curves go to %s", copy)
        return True
    return False


def upload(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once."""
    copy = _copy(settings, client)
    log.info("%d objects to %s", copy.upload(metadata.instance_id()), copy)
    return FINISHED


def _copy(settings: HostSettings, client: Client) -> RunBucket:
    return RunBucket(client("s3"), settings.bucket, settings.run, settings.home / SENT)


def logs(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Until it is asked to stop. It continues after what it sent last."""
    group, place = f"{settings.parameters}/{settings.role}", settings.home / "logs.cursor"
    journal_upload.follow(client("logs"), group, metadata.instance_id(), settings.roles, place, stop)
    return FINISHED if stop.requested else FAILED


def spot(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Until EC2 takes this spot instance back: then actors flush and leave, and a learner saves and uploads."""
    wait = Wait("host")
    while not stop.requested:
        try:
            notice = metadata.spot_notice()
            wait.over()
        except OSError as error:
            wait.on(f"the metadata service: {error}")
            notice = ""
        if notice:
            log.warning("EC2 takes this spot instance back: %s", notice)
            # The timer too: within a minute it would publish the key that is withdrawn here.
            units = [*(f"apex@{role}.service" for role in settings.roles), "apex-keys.timer", "apex-keys.service"]
            status = subprocess.run(["systemctl", "stop", *units], check=False).returncode
            key_exchange.withdraw(client("ssm"), settings, metadata.instance_id())
            return status
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def end(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once. The unit powers the host off, whatever comes of it."""
    host = metadata.instance_id()
    with suppress(Exception):  # A key that stays is accepted no more after ten minutes.
        key_exchange.withdraw(client("ssm"), settings, host)
    if settings.role == Role.LEARNER:
        done = end_cluster(client, settings, host, _copy(settings, client), stop)
    else:
        done = leave_group(client("autoscaling"), host)
    return FINISHED if done else FAILED


_COMMANDS = {"keys": keys, "upload": upload, "logs": logs, "spot": spot, "end": end}


if __name__ == "__main__":
    sys.exit(main())
