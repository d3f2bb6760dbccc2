"""The end of a cluster, as the learner's machine brings it about, and of a machine whose hours are over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from apex.host_settings import HostSettings

log = logging.getLogger("apex")


def end_cluster(ssm: Any, scaling: Any, settings: HostSettings, upload: Callable[[], object]) -> bool:
    """The last upload, then the actors to 0, then the word to the other machines; whether all of it went well.

    What fails keeps nothing else from being done: machines that go on cost money.
    """
    steps: list[tuple[str, Callable[[], object]]] = [
        ("the last upload", upload),
        (
            "actors to 0",
            lambda: scaling.set_desired_capacity(
                AutoScalingGroupName=settings.actor_group, DesiredCapacity=0, HonorCooldown=False
            ),
        ),
        (
            "the word to the other machines",
            lambda: ssm.put_parameter(
                Name=f"{settings.parameters}/ended", Value="the run is over", Type="String", Overwrite=True
            ),
        ),
    ]
    return all([_try(what, step) for what, step in steps])


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
