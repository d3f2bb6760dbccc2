"""Describes the environment of a run in a child process, so that its code can neither block nor outlive the launcher.

The child is forked: it trusts the same modules as its parent, and needs no second start of Python.
"""

import faulthandler
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from apex.config import Config, EnvironmentConfig
from apex.environments.factory import atari_game, describe
from apex.errors import ChildDiedError, StoppedError, UsageError
from apex.runtime.children import call_in_child
from apex.runtime.lifecycle import Stop
from apex.types import Schema


class Inspector:
    """Describes environments, each once. Serves one start of a run: until the next, a user may change the code."""

    def __init__(self, stop: Stop | None = None) -> None:
        self._stop = stop or Stop()
        self._found: dict[str, dict[str, Any]] = {}

    def schema(self, config: Config, report: Callable[[str], None] = lambda change: None) -> Schema:
        """Returns `factory.describe` of the environment; raises UsageError also after `run.stuck_seconds`.

        Raises StoppedError if a stop is requested meanwhile.
        """
        environment, n_step = config.environment, config.actor.n_step
        if atari_game(environment.id) is not None:  # ALE starts neither threads nor processes for this.
            return describe(environment, n_step, report)
        key = json.dumps([environment.id, environment.args, environment.image_size, environment.frame_stack])
        if key not in self._found:
            self._found[key] = self._ask_child(environment, config.run.stuck_seconds)
        for change in self._found[key]["changes"]:
            report(change)
        return replace(Schema.from_dict(self._found[key]["schema"]), n_step=n_step)

    def _ask_child(self, config: EnvironmentConfig, seconds: float) -> dict[str, Any]:
        name = f"environment {config.id}"
        try:
            found = call_in_child(name, partial(_describe, config), self._stop, stuck_seconds=seconds)
        except ChildDiedError as error:
            problem = f"environment.id {config.id!r} cannot be created and reset: {error}"
            raise UsageError(problem, "repair it; if it is only slow, increase --run.stuck-seconds") from error
        if not found:
            raise StoppedError(f"stopped before the environment {config.id!r} was created")
        return found


def _describe(config: EnvironmentConfig, stop: Stop) -> dict[str, Any]:
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # shows where an environment hangs
    changes: list[str] = []
    return {"schema": describe(config, 1, changes.append).to_dict(), "changes": changes}
