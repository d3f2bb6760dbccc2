"""`apex host`: manages this host, which belongs to a cluster. systemd units call this command; users rarely do."""

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

from apex.cloud.host import journal_upload, key_exchange, stall
from apex.cloud.host.bucket import BucketObjects, run_mirror
from apex.cloud.host.metadata import Metadata
from apex.cloud.host.role import host_command, is_new
from apex.cloud.host.settings import ETC, HOME, HostSettings, read_settings
from apex.cloud.host.shutdown import Client, end_cluster, leave_group
from apex.config.arguments import Parser
from apex.runtime.logs import configure_logging
from apex.runtime.optional_imports import remedy
from apex.transport.messages.fields import printable
from apex.types import PROGRAMS, Role
from apexreplay.errors import FAILED, FINISHED, UsageError, require
from apexreplay.facts import Waiting
from apexreplay.files.atomic_files import replace_file
from apexreplay.process.lifecycle import Stop, Wait, reports_errors, sleep, stop_on_signals
from apexreplay.process.watchdog import take_notifier

LOOK_SECONDS = 5.0  # time between two checks for a spot notice or a missing key
BUCKET_SECONDS = 300.0  # time that a new cluster retries its bucket: AWS needs a minute to apply permissions
MAX_HOURS = "max-hours"  # file in HOME: maximum hours that the cluster may run (units/bin/apex-max-hours)

log = logging.getLogger("apex")


@reports_errors("apex host")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs `apex host` with these arguments; returns its exit status."""
    arguments = make_parser().parse_args(argv)
    configure_logging("host")
    try:
        settings = read_settings(arguments.etc, arguments.home)
        if arguments.command == "role":
            if arguments.role == Role.LEARNER and is_new(settings) and not arguments.print:
                with stop_on_signals(lambda: None) as stop:  # Do not notify systemd yet.
                    if not prepare_run(settings, aws_clients(settings), Metadata(), stop):
                        return FINISHED
            return _become(settings, Role(arguments.role), arguments.print)
        with stop_on_signals(take_notifier()) as stop:
            return _COMMANDS[arguments.command](settings, aws_clients(settings), Metadata(), stop)
    except UsageError:
        raise  # systemd does not restart the unit after status 2.
    except Exception as error:  # AWS, network or disk: the unit's timer will retry; one line without traceback
        log.error("%s: %s: %s", arguments.command, type(error).__name__, error)
        return FAILED


def make_parser() -> Parser:
    """Returns the parser of the options."""
    parser = Parser(
        prog="apex host",
        description="Manages this host, which belongs to a cluster. systemd units call this command.",
    )
    parser.add_argument("--etc", type=Path, default=ETC, metavar="DIR", help="folder of cluster.env and the TOML files")
    parser.add_argument("--home", type=Path, default=HOME, metavar="DIR", help="folder of keys and runs")
    commands = parser.add_subparsers(dest="command", required=True)
    role = commands.add_parser("role", help="run a role on this host; learner: first restore the run from the bucket")
    role.add_argument("role", choices=[str(role) for role in PROGRAMS])
    role.add_argument("--print", action="store_true", help="only print the command")
    commands.add_parser("keys", help="publish this host's keys, download other hosts' keys and max_hours")
    commands.add_parser("upload", help="copy the run to the bucket")
    commands.add_parser("logs", help="copy the journal to CloudWatch")
    commands.add_parser("spot", help="wait until EC2 announces the end of this spot instance, then stop the roles")
    commands.add_parser("stall", help="without a new update, replace the learner's host once, then end the cluster")
    commands.add_parser(
        "end", help="on the learner's host: shut the cluster down; on other hosts: shut only this host down"
    )
    return parser


def aws_clients(settings: HostSettings) -> Client:
    """Returns a function that creates AWS clients. boto3 reads the host's credentials from the metadata service."""
    try:
        import boto3  # optional package
        from botocore.config import Config
    except ImportError as error:
        raise UsageError(f"a host of a cluster needs boto3 ({error})", remedy("aws")) from error
    config = Config(
        connect_timeout=5,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 8},
        max_pool_connections=32,  # for the parallel downloads of a restore
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
    """Exchanges keys until the keys of learner and replay server have arrived; systemd then starts the roles."""
    wait = Wait("host")
    while not stop.poll():
        try:
            ssm, host, address = client("ssm"), metadata.instance_id(), metadata.private_address()
            key_exchange.make_pairs(settings, address)
            entries, now = key_exchange.ask(ssm, settings)
            missing = key_exchange.accept(key_exchange.fresh(entries, now), settings)
            if not missing:
                _read_max_hours(ssm, settings)
            key_exchange.publish(ssm, settings, host, address, now)  # last: AWS may refuse it
            if not missing:
                return FINISHED
            wait.on(Waiting("key_of_role", missing))
        except UsageError:
            raise
        except Exception as error:  # network, metadata service or AWS; accepted keys stay valid
            wait.on(Waiting("aws", printable(str(error))))
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def _read_max_hours(ssm: Any, settings: HostSettings) -> None:
    """Writes the cluster's maximum hours to a file in HOME. They may change while the cluster runs."""
    name = f"{settings.parameters}/{MAX_HOURS}"
    replace_file(settings.home / MAX_HOURS, ssm.get_parameter(Name=name)["Parameter"]["Value"].encode())


def prepare_run(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> bool:
    """Restores this cluster's run if the bucket contains it; returns False if `stop` was requested meanwhile.

    A new run must not start without a writable bucket. Raises UsageError if the bucket is not writable for
    BUCKET_SECONDS or has a run of another cluster with this name.
    """
    reported, until, has_run = "", time.monotonic() + BUCKET_SECONDS, False
    while not stop.poll():
        copy = run_mirror(client("s3"), settings)
        try:
            has_run = copy.begin(settings.begun, metadata.instance_id()) or has_run
            if has_run:
                copy.restore()
        except UsageError:
            raise
        except Exception as error:  # The final upload would fail too.
            if str(error) != reported:
                log.error("cannot read or write %s, which must store the checkpoints; retrying: %s", copy, error)
            reported = str(error)
            # A run in the bucket is not given up: retry until the cluster ends.
            require(
                has_run or time.monotonic() < until,
                f"cannot read or write {copy}, which must store the checkpoints: {error}",
            )
            sleep(LOOK_SECONDS, stop)
            continue
        log.info("uploading checkpoints and curves to %s", copy)
        return True
    return False


def upload(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Uploads new files of the run to the bucket once."""
    copy = run_mirror(client("s3"), settings)
    log.info("uploaded %d objects to %s", copy.upload(metadata.instance_id()), copy)
    return FINISHED


def logs(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Sends the journal to CloudWatch until `stop` is requested; begins after the last line sent before."""
    group, place = f"{settings.parameters}/{settings.role}", settings.home / "logs.cursor"
    is_over = journal_upload.follow(client("logs"), group, metadata.instance_id(), place, stop)
    return FINISHED if is_over else FAILED


def spot(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Waits until EC2 announces the end of this spot instance, then stops its roles, which save or send their data."""
    wait = Wait("host")
    while not stop.poll():
        try:
            notice = metadata.spot_notice()
            wait.over()
        except OSError as error:
            wait.on(Waiting("metadata", printable(str(error))))
            notice = ""
        if notice:
            log.warning("EC2 reclaims this spot instance: %s", notice)
            # Stop the timer too: within a minute it would publish the key again.
            units = [*(f"apex@{role}.service" for role in settings.roles), "apex-keys.timer", "apex-keys.service"]
            status = subprocess.run(["systemctl", "stop", *units], check=False).returncode
            key_exchange.withdraw(client("ssm"), settings, metadata.instance_id())
            return status
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def check_stall(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Replaces this host if it has made no new update for `stall_minutes`; ends the cluster if it was no use.

    It was no use if the new host makes no update either, or if this host still exists after twice the time.
    """
    found, limit = stall.measure(settings), 60 * settings.stall_minutes
    if not limit or found.seconds < limit:
        return FINISHED
    log.error("no checkpoint after update %d for %.0f minutes", found.update, found.seconds / 60)
    if found.seconds < 2 * limit:
        objects = BucketObjects(client("s3"), settings.bucket, settings.cluster)
        if stall.replace_host(found, settings, objects, client("autoscaling"), metadata.instance_id()):
            return FINISHED
    log.error("ending the cluster")
    return subprocess.run(["systemctl", "start", "--no-block", "apex-end.service"], check=False).returncode


def end(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Ends the cluster if this is the learner's host, else only this host. systemd then powers the host off, even after
    an error."""
    host = metadata.instance_id()
    with suppress(Exception):  # Otherwise the key expires after ten minutes.
        key_exchange.withdraw(client("ssm"), settings, host)
    if settings.role == Role.LEARNER:
        done = end_cluster(client, settings, host, run_mirror(client("s3"), settings), stop)
    else:
        done = leave_group(client("autoscaling"), host)
    return FINISHED if done else FAILED


_COMMANDS = {"keys": keys, "upload": upload, "logs": logs, "spot": spot, "stall": check_stall, "end": end}
