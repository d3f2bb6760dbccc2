"""The end of a cluster, as the learner's machine brings it about, and of a machine whose hours are over.

A machine that is turned off is terminated, disk and all; but the learner's is only stopped, and keeps its disk. It is
terminated here, once the bucket has all that the disk has: `apex cluster list` names one that was not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from apex.cloud.host.settings import HostSettings
from apex.runtime.lifecycle import Stop, sleep

TRY_SECONDS = 900.0  # for the last upload, while no other machine of the cluster bills any more
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 5.0, 120.0  # between two tries

log = logging.getLogger("apex")


def end_cluster(
    scaling: Any,
    ec2: Any,
    settings: HostSettings,
    own: str,
    others: Callable[[], Iterable[str]],
    upload: Callable[[], object],
    only_here: Callable[[], list[str]],
    stop: Stop,
) -> bool:
    """The last upload, then the actors to 0, then the `others`' machines, and this one; whether all of it went well.

    What fails keeps nothing else from being done: machines that go on cost money. An upload that fails is tried again,
    when the others are gone, for TRY_SECONDS; without it this machine (`own`) is left to be stopped, with its disk.
    `others` gives instance ids, `only_here` the files that the bucket lacks.
    """

    def terminate() -> None:
        refused = [host for host in others() if not _try(f"the end of {host}", partial(_terminate, ec2, host))]
        if refused:
            raise RuntimeError(f"these go on: {', '.join(refused)}")

    def no_actors() -> None:
        group = settings.actor_group
        scaling.set_desired_capacity(AutoScalingGroupName=group, DesiredCapacity=0, HonorCooldown=False)

    is_kept = _try("the last upload", upload)
    is_done = [_try("actors to 0", no_actors), _try("the end of the other machines", terminate)]
    if not is_kept:
        log.error("only on this machine's disk: %s", _names(only_here))
        is_kept = _try_again("the last upload", upload, stop)
    if not is_kept:
        log.error(
            "only on this machine's disk, and not in s3://%s/%s: %s. It is stopped and not terminated; its disk bills. "
            "When the bucket can be written, start %s again: it uploads them, and ends with its hours",
            settings.bucket, settings.cluster, _names(only_here), own,
        )  # fmt: skip
        return False
    return all([*is_done, _try("the end of this machine", partial(_terminate, ec2, own))])


def _names(files: Callable[[], list[str]]) -> str:
    try:
        return ", ".join(files())
    except OSError as error:  # A disk that cannot be read keeps nothing else from being done.
        return f"what cannot be listed: {error}"


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


def _terminate(ec2: Any, host: str) -> None:
    ec2.terminate_instances(InstanceIds=[host])  # One by one: with one that is gone, a call for all would fail.


def leave_group(scaling: Any, host: str) -> bool:
    """Ends an actor machine so that its group does not start another in its place."""
    return _try(
        "leaving the group",
        lambda: scaling.terminate_instance_in_auto_scaling_group(InstanceId=host, ShouldDecrementDesiredCapacity=True),
    )


def _try(what: str, step: Callable[[], object]) -> bool:
    try:
        step()
    except Exception:  # whatever it is: the next step is to be done all the same
        log.exception("%s failed", what)
        return False
    log.info("%s: done", what)
    return True
