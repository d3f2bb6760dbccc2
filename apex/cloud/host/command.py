"""`apex host`: what a machine of a cluster does for itself. Its systemd units call it; people need it seldom."""

from __future__ import annotations

import logging
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from apex.cloud.host import bucket, journal_upload, key_exchange
from apex.cloud.host.metadata import Metadata
from apex.cloud.host.role import host_command, is_new
from apex.cloud.host.settings import ETC, HOME, HostSettings, read_settings
from apex.cloud.host.shutdown import end_cluster, leave_group
from apex.config.arguments import Parser
from apex.errors import ConfigError, require
from apex.runtime.lifecycle import (
    FAILED,
    FINISHED,
    POLL_SECONDS,
    Stop,
    Wait,
    configure_logging,
    reports_errors,
    sleep,
    stop_on_signals,
)
from apex.runtime.optional_imports import remedy
from apex.runtime.watchdog import take_notifier
from apex.types import PROGRAMS

LOOK_SECONDS = 5.0  # between two looks, at the market's notice and for keys that are missing
# What ends with a spot machine. The keys' too: within a minute they would tell the key again that is taken back.
ACTOR_UNITS = ("apex@actor.service", "apex-keys.timer", "apex-keys.service")
BUCKET_SECONDS = 300.0  # for which a bucket may refuse a new cluster: rights take a minute to be known everywhere
FLUSH_SECONDS = 5.0  # a line of the journal waits no longer for others

Client = Callable[[str], Any]  # an AWS service's name -> its client

log = logging.getLogger("apex")


@reports_errors("apex host")
def main(argv: Sequence[str] | None = None) -> int:
    """The composition root."""
    arguments = make_parser().parse_args(argv)
    configure_logging("host")
    try:
        settings = read_settings(arguments.etc, arguments.home)
        if arguments.word == "role":
            if arguments.role == "learner" and is_new(settings) and not arguments.print:
                with stop_on_signals(lambda: None) as stop:  # The unit is not up yet.
                    if not claim(settings, aws_clients(settings), Metadata(), stop):
                        return FINISHED
            return _become(settings, arguments.role, arguments.print)
        with stop_on_signals(take_notifier()) as stop:
            return _WORDS[arguments.word](settings, aws_clients(settings), Metadata(), stop)
    except ConfigError:
        raise  # The unit is not started again after status 2.
    except (
        Exception
    ) as error:  # AWS, the network, the disk: the unit's timer comes again, and its journal stays readable
        log.error("%s: %s: %s", arguments.word, type(error).__name__, error)
        return FAILED


def make_parser() -> Parser:
    """What may be typed."""
    parser = Parser(prog="apex host", description="What a machine of a cluster does for itself.")
    parser.add_argument("--etc", type=Path, default=ETC, metavar="DIR", help="where cluster.env and the TOML files are")
    parser.add_argument("--home", type=Path, default=HOME, metavar="DIR", help="where keys and runs are")
    words = parser.add_subparsers(dest="word", required=True)
    role = words.add_parser("role", help="becomes the command of a role")
    role.add_argument("role", choices=[str(role) for role in PROGRAMS])
    role.add_argument("--print", action="store_true", help="only shows it")
    words.add_parser("keys", help="makes the own pair, tells its public half, believes those of the others")
    words.add_parser("upload", help="copies the run to the bucket")
    words.add_parser("fetch", help="copies the curves from the bucket")
    words.add_parser("logs", help="copies the journal to CloudWatch")
    words.add_parser("spot", help="waits for the market's notice, then stops the actors")
    words.add_parser("end", help="ends the cluster (the learner's machine) or leaves it (an actor's)")
    return parser


def aws_clients(settings: HostSettings) -> Client:
    """Makes clients; credentials are the machine's own, which boto3 asks the metadata service for."""
    try:
        import boto3  # an extra: who trains on one machine needs none of it
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(f"a machine of a cluster needs boto3 ({error}): {remedy('aws')}") from error
    config = Config(connect_timeout=5, read_timeout=60, retries={"mode": "standard", "total_max_attempts": 8})
    return lambda service: boto3.client(service, region_name=settings.region, config=config)


def _become(settings: HostSettings, role: str, only_print: bool) -> int:
    command = host_command(settings, role, len(os.sched_getaffinity(0)))
    log.info("apex %s", shlex.join(command))
    if only_print:
        print(shlex.join(["apex", *command]))
        return FINISHED
    os.execv(sys.executable, [sys.executable, "-P", "-m", "apex", *command])


def keys(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once round, and again until the keys of learner and replay server are there: without them no role starts."""
    key_exchange.make_pair(settings.keys, settings.role)
    wait = Wait("host")
    while not stop.requested:
        try:
            ssm = client("ssm")
            told, now = key_exchange.ask(ssm, settings)
            key_exchange.tell(ssm, settings, metadata.instance_id(), now)
            missing = key_exchange.believe(key_exchange.fresh(told, now), settings)
            if not missing:
                return FINISHED
            wait.on(f"the key of the {missing} in the parameter store")
        except ConfigError:
            raise
        except Exception as error:  # The network, the metadata service, AWS: the lists stay as they are meanwhile.
            wait.on(f"AWS: {error}")
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def claim(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> bool:
    """Before a run begins: nobody trains for hours whose weights have nowhere to go. False: it was told to stop.

    Raises ConfigError where the bucket cannot be written, or has an earlier run of this name.
    """
    place, said, until = f"s3://{settings.bucket}/{settings.cluster}", "", time.monotonic() + BUCKET_SECONDS
    while not stop.requested:
        try:
            is_free = bucket.begin(client("s3"), settings.bucket, settings.cluster, metadata.instance_id())
        except Exception as error:  # Whatever keeps it from writing would keep it from it at the end.
            if str(error) != said:
                log.error("cannot write to %s, where the weights are to go; tries on: %s", place, error)
            said = str(error)
            require(time.monotonic() < until, f"cannot write to {place}, where the weights are to go: {error}")
            sleep(LOOK_SECONDS, stop)
            continue
        require(is_free, f"{place} has an earlier run: give this cluster another name, or move what is there elsewhere")
        log.info("the weights go to %s", place)
        return True
    return False


def upload(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once."""
    num_files = _upload(settings, client)
    log.info("%d files to s3://%s/%s", num_files, settings.bucket, settings.cluster)
    return FINISHED


def _upload(settings: HostSettings, client: Client) -> int:
    return bucket.upload(client("s3"), settings.bucket, settings.run, settings.home / bucket.SENT)


def fetch(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once."""
    num_bytes = bucket.fetch_curves(client("s3"), settings.bucket, settings.run)
    log.info("%d bytes from s3://%s/%s", num_bytes, settings.bucket, settings.cluster)
    return FINISHED


def logs(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Until it is told to stop. It goes on after what it has sent last."""
    api, stream = client("logs"), metadata.instance_id()
    group = f"{settings.parameters}/{settings.role}"
    journal_upload.make_stream(api, group, stream)
    place = settings.home / "logs.cursor"
    after = [f"--after-cursor={place.read_text()}"] if place.exists() else []
    with subprocess.Popen([*journal_upload.command(settings.role), *after], stdout=subprocess.PIPE) as journal:
        try:
            assert journal.stdout is not None
            for batch in journal_upload.batches(_entries(journal.stdout, stop)):
                journal_upload.put(api, group, stream, batch)
                place.write_text(batch[-1].cursor)
        finally:
            journal.terminate()
    return FINISHED if stop.requested else FAILED


def _entries(journal: IO[bytes], stop: Stop) -> Iterator[journal_upload.Entry | None]:
    """Entries as they come, and None now and then: those before it wait no longer."""
    rest, flush_at = b"", time.monotonic() + FLUSH_SECONDS
    while not stop.requested:
        if time.monotonic() >= flush_at:
            flush_at = time.monotonic() + FLUSH_SECONDS
            yield None
        if not select.select([journal], [], [], POLL_SECONDS)[0]:
            continue
        data = os.read(journal.fileno(), 65_536)  # readline would read ahead, which select does not see.
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if (entry := journal_upload.parse(line.decode(errors="replace"))) is not None:
                yield entry


def spot(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Until the market takes this machine back: then its actors flush and leave."""
    wait = Wait("host")
    while not stop.requested:
        try:
            notice = metadata.spot_notice()
            wait.over()
        except OSError as error:
            wait.on(f"the metadata service: {error}")
            notice = ""
        if notice:
            log.warning("the market takes this machine back: %s", notice)
            status = subprocess.run(["systemctl", "stop", *ACTOR_UNITS], check=False).returncode
            key_exchange.leave(client("ssm"), settings, metadata.instance_id())
            return status
        sleep(LOOK_SECONDS, stop)
    return FINISHED


def end(settings: HostSettings, client: Client, metadata: Metadata, stop: Stop) -> int:
    """Once. The unit turns the machine off, whatever comes of it."""
    if settings.role == "learner":
        own, ssm = metadata.instance_id(), client("ssm")

        def others() -> list[str]:
            told = key_exchange.fresh(*key_exchange.ask(ssm, settings))
            return [item.host for item in told if item.role != "actor"]

        done = end_cluster(
            client("autoscaling"),
            client("ec2"),
            settings,
            own,
            others,
            partial(_upload, settings, client),
            partial(bucket.only_here, settings.run, settings.home / bucket.SENT),
            stop,
        )
    elif settings.role == "actor":
        done = leave_group(client("autoscaling"), metadata.instance_id())
    else:
        done = True
    return FINISHED if done else FAILED


_WORDS = {"keys": keys, "upload": upload, "fetch": fetch, "logs": logs, "spot": spot, "end": end}


if __name__ == "__main__":
    sys.exit(main())
