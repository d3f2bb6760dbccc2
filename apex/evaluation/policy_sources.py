"""The newest policy of a run that may still go on: from its folder, or from the learner's own socket."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import nn

from apex.config import EnvironmentConfig
from apex.dqn.networks import load_parameters, make_network
from apex.environments.factory import describe
from apex.errors import require
from apex.runs.checkpoints.checkpoint import CheckpointError
from apex.runs.checkpoints.paths import newest_update
from apex.runs.checkpoints.policy_file import BEST, PolicyInfo, read_policy
from apex.transport.hello import Welcome
from apex.types import Parameters, Schema

log = logging.getLogger("apex")


class NewestPolicy(NamedTuple):
    """Who plays, and what."""

    version: int  # updates
    network: nn.Module
    environment: EnvironmentConfig
    schema: Schema


class Policies(Protocol):
    """Where they come from."""

    def newest(self, timeout: float) -> NewestPolicy | None:
        """One that is newer than all that were returned, or None after at most `timeout` seconds without any."""


class PoliciesOfFolder:
    """What a run leaves on its disk: its newest checkpoint, or its best policy where that is newer."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the run's checkpoints."""
        self._folder = folder
        self._version = -1  # that was returned
        self._tried = -1  # the newest checkpoint that was looked into, whole or not
        self._stamp: int | None = None  # of the best policy that was looked into

    def newest(self, timeout: float) -> NewestPolicy | None:
        """See Policies. What is damaged, or is just being removed, is told and passed over."""
        paths = []
        number = newest_update(self._folder)
        if number is not None and number > max(self._tried, self._version):
            self._tried = number
            paths.append(self._folder / f"{number:09d}")
        best = self._folder / BEST
        stamp = best.stat().st_mtime_ns if best.exists() else None
        if stamp is not None and stamp != self._stamp:
            self._stamp = stamp
            paths.append(best)
        found = [policy for policy in map(self._load, paths) if policy is not None and policy.version > self._version]
        if not found:
            time.sleep(timeout)
            return None
        newest = max(found, key=lambda policy: policy.version)
        self._version = newest.version
        return newest

    def _load(self, path: Path) -> NewestPolicy | None:
        try:
            info, network = read_policy(path)
        except (CheckpointError, OSError) as error:
            log.warning("%s; it is passed over", error)
            return None
        require_fit(path, info)
        return NewestPolicy(info.num_updates, network, info.environment, info.schema)


class Subscription(Protocol):
    """The parameters' socket."""

    def receive(self, timeout: float) -> Parameters | None:
        """The newest parameters since the last call, or None after `timeout` seconds without any."""


class PoliciesOfLearner:
    """What a learner publishes."""

    def __init__(self, welcome: Welcome, subscription: Subscription) -> None:
        self._welcome = welcome
        self._network = make_network(welcome.config.network, welcome.schema, seed=0).eval()
        self._subscription = subscription

    def newest(self, timeout: float) -> NewestPolicy | None:
        """See Policies."""
        parameters = self._subscription.receive(timeout)
        if parameters is None:
            return None
        load_parameters(self._network, parameters.values)
        return NewestPolicy(parameters.version, self._network, self._welcome.config.environment, self._welcome.schema)


def require_fit(path: Path, info: PolicyInfo) -> None:
    """Raises ConfigError where the environment of that name here is another one than a policy was trained in."""
    schema = describe(info.environment, info.schema.n_step)
    require(
        _interface(schema) == _interface(info.schema),
        f"{info.environment.id} is another environment here than the one that {path} was trained in: "
        f"{_interface(schema)}, not {_interface(info.schema)}",
    )


def _interface(schema: Schema) -> str:
    shape = ", ".join(map(str, schema.observation_shape))
    return f"{schema.frame_dtype}[{shape}] and {schema.num_actions} actions"
