"""Ends a cluster from its learner's host, or ends any other single host.

EC2 terminates a host that powers off and deletes its disk, but only stops the learner's host and keeps its disk. This
module terminates the learner's host once the bucket has all its files. `apex cluster list` shows a learner's host that
could not be terminated.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from apex.cloud.host.settings import HostSettings
from apex.runs.mirror.mirror import Mirror
from apex.types import PROGRAMS, Role
from apexreplay.process.lifecycle import Stop, sleep

TRY_SECONDS = 900.0  # time to repeat a failed last upload, after the other hosts have ended
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 120.0  # time between two attempts

Client = Callable[[str], Any]  # an AWS service's name -> its client

log = logging.getLogger("apex")


def end_cluster(client: Client, settings: HostSettings, own: str, copy: Mirror, stop: Stop) -> bool:
    """Uploads the run, ends all other hosts, and terminates this host (`own`); returns whether all steps succeeded.

    All steps run even if one fails, because running hosts cost money. A failed upload is repeated for TRY_SECONDS after
    the other hosts have ended. If it still fails, this host leaves its auto-scaling group, so that EC2 stops it and
    keeps its disk.
    """
    scaling, ec2 = client("autoscaling"), client("ec2")

    def set_to_zero(role: Role) -> None:
        scaling.set_desired_capacity(AutoScalingGroupName=settings.group(role), DesiredCapacity=0, HonorCooldown=False)

    upload = partial(copy.upload, own)
    is_kept = _try("the last upload", upload)
    others = [role for role in PROGRAMS if role not in settings.roles]
    zero = "setting the desired capacity of the {} group to 0"
    done = [_try(zero.format(role), partial(set_to_zero, role)) for role in others]
    if not is_kept:
        log.error("these files are only on this host's disk: %s", _names(copy))
        is_kept = _try_again("the last upload", upload, stop)
    if not is_kept:
        _try("leaving the auto-scaling group", partial(_detach, scaling, settings.group(settings.role), own))
        log.error(
            "%s lacks these files, which are only on this host's disk: %s. The host is stopped, not terminated, and "
            "its disk costs money. When the bucket is writable again, start %s: it uploads the files and then ends",
            copy, _names(copy), own,
        )  # fmt: skip
        return False
    what = "setting the desired capacity of this host's auto-scaling group to 0"
    done += [_try(what, partial(set_to_zero, settings.role))]
    return all([*done, _try("terminating this host", lambda: ec2.terminate_instances(InstanceIds=[own]))])


def leave_group(scaling: Any, host: str) -> bool:
    """Terminates a host without replacement: its group's desired capacity decreases by 1. Returns whether it worked."""
    return _try(
        "terminating this host",
        lambda: scaling.terminate_instance_in_auto_scaling_group(InstanceId=host, ShouldDecrementDesiredCapacity=True),
    )


def _detach(scaling: Any, group: str, host: str) -> None:
    scaling.detach_instances(InstanceIds=[host], AutoScalingGroupName=group, ShouldDecrementDesiredCapacity=True)


def _names(copy: Mirror) -> str:
    try:
        return ", ".join(copy.only_here())
    except OSError as error:  # The other steps must run even if the disk is unreadable.
        return f"files that cannot be listed: {error}"


def _try_again(what: str, step: Callable[[], object], stop: Stop) -> bool:
    until, wait = time.monotonic() + TRY_SECONDS, FIRST_WAIT_SECONDS
    while time.monotonic() + wait < until:
        sleep(wait, stop)
        if stop.poll():
            break
        if _try(what, step):
            return True
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)
    return False


def _try(what: str, step: Callable[[], object]) -> bool:
    try:
        step()
    except Exception:  # The next steps must run after any error.
        log.exception("%s failed", what)
        return False
    log.info("%s: done", what)
    return True
