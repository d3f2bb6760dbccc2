"""How the learner's host ends its cluster, and how any other host ends itself.

A host that powers off is terminated, disk and all; but the learner's is only stopped, and keeps its disk. It is
terminated here, once the bucket has all that the disk has: `apex cluster list` names one that was not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from apex.cloud.host.bucket import RunBucket
from apex.cloud.host.settings import HostSettings
from apex.runtime.lifecycle import Stop, sleep
from apex.types import PROGRAMS, Role

TRY_SECONDS = 900.0  # for the last upload, while no other host of the cluster bills any more
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 120.0  # between two tries

Client = Callable[[str], Any]  # an AWS service's name -> its client

log = logging.getLogger("apex")


def end_cluster(client: Client, settings: HostSettings, own: str, copy: RunBucket, stop: Stop) -> bool:
    """Uploads the run, sets all other groups to 0, and terminates this host (`own`); returns whether all succeeded.

    A failure does not keep the rest from being done: hosts that go on cost money. A failed upload is repeated for
    TRY_SECONDS, when the other hosts are gone. If it never succeeds, this host leaves its group, so that it is stopped
    and keeps its disk.
    """
    scaling, ec2 = client("autoscaling"), client("ec2")

    def set_to_zero(role: Role) -> None:
        scaling.set_desired_capacity(AutoScalingGroupName=settings.group(role), DesiredCapacity=0, HonorCooldown=False)

    upload = partial(copy.upload, own, whole=True)
    is_kept = _try("the last upload", upload)
    others = [role for role in PROGRAMS if role not in settings.roles]
    done = [_try(f"{role} hosts to 0", partial(set_to_zero, role)) for role in others]
    if not is_kept:
        log.error("only on this host's disk: %s", _names(copy))
        is_kept = _try_again("the last upload", upload, stop)
    if not is_kept:
        _try("leaving the group", partial(_detach, scaling, settings.group(settings.role), own))
        log.error(
            "only on this host's disk, and not in %s: %s. The host is stopped, not terminated; its disk bills. When "
            "the bucket can be written, start %s again: it uploads them, and ends with its hours",
            copy, _names(copy), own,
        )  # fmt: skip
        return False
    done += [_try("the own group to 0", partial(set_to_zero, settings.role))]
    return all([*done, _try("the end of this host", lambda: ec2.terminate_instances(InstanceIds=[own]))])


def leave_group(scaling: Any, host: str) -> bool:
    """Terminates a host so that its group does not start another in its place; returns whether that succeeded."""
    return _try(
        "leaving the group",
        lambda: scaling.terminate_instance_in_auto_scaling_group(InstanceId=host, ShouldDecrementDesiredCapacity=True),
    )


def _detach(scaling: Any, group: str, host: str) -> None:
    scaling.detach_instances(InstanceIds=[host], AutoScalingGroupName=group, ShouldDecrementDesiredCapacity=True)


def _names(copy: RunBucket) -> str:
    try:
        return ", ".join(copy.only_here())
    except OSError as error:  # An unreadable disk does not keep anything else from being done.
        return f"files that cannot be listed: {error}"


def _try_again(what: str, step: Callable[[], object], stop: Stop) -> bool:
    until, wait = time.monotonic() + TRY_SECONDS, FIRST_WAIT_SECONDS
    while time.monotonic() + wait < until:
        sleep(wait, stop)
        if stop.requested:
            break
        if _try(what, step):
            return True
        wait = min(2 * wait, LONGEST_WAIT_SECONDS)
    return False


def _try(what: str, step: Callable[[], object]) -> bool:
    try:
        step()
    except Exception:  # whatever it is: the next step must be done too
        log.exception("%s failed", what)
        return False
    log.info("%s: done", what)
    return True
