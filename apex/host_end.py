"""The end of a cluster, as the learner's machine brings it about, and of a machine whose hours are over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from apex.host_settings import HostSettings

log = logging.getLogger("apex")


def end_cluster(
    scaling: Any, ec2: Any, settings: HostSettings, upload: Callable[[], object], others: Callable[[], Iterable[str]]
) -> bool:
    """The last upload, then the actors to 0, then the `others`' machines; whether all of it went well.

    What fails keeps nothing else from being done: machines that go on cost money. `others` gives instance ids.
    """

    def terminate() -> None:
        refused = [host for host in others() if not _try(f"the end of {host}", partial(_terminate, ec2, host))]
        if refused:
            raise RuntimeError(f"these go on: {', '.join(refused)}")

    steps: list[tuple[str, Callable[[], object]]] = [
        ("the last upload", upload),
        (
            "actors to 0",
            lambda: scaling.set_desired_capacity(
                AutoScalingGroupName=settings.actor_group, DesiredCapacity=0, HonorCooldown=False
            ),
        ),
        ("the end of the other machines", terminate),
    ]
    return all([_try(what, step) for what, step in steps])


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
