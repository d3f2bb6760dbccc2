"""Tries the user's code before a run: in child processes, so that it can neither block nor outlive the launcher.

A child is forked: it trusts the same modules as its parent, and needs no second start of Python.
"""

import faulthandler
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np

from apex.config import Config, EnvironmentConfig
from apex.config.algorithm_choice import choose_algorithm, with_sequences
from apex.environments.answers import BadAnswerError
from apex.environments.factory import atari_game, describe
from apex.environments.interface import VectorEnvironment
from apex.errors import StoppedError
from apex.schema import Schema
from apexreplay.errors import ChildDiedError, UsageError
from apexreplay.item_kinds import Array
from apexreplay.process.children import call_in_child
from apexreplay.process.lifecycle import Stop

MAX_STEPS = 1_000  # maximum steps for which an environment is tried
MIN_STEPS, MAX_ACTIONS = 10, 256  # Every fault is refused in so many steps, or in one for each discrete action.
BREAKPOINT = "PYTHONBREAKPOINT"  # "0": `breakpoint()` does nothing; a trial has no terminal
PLAY_SECONDS = 1.0  # No step of a trial begins later. One step is always played.

log = logging.getLogger("apex")


class Inspector:
    """Tries each environment once. Serves one start of a run: until the next, a user may change the code."""

    def __init__(self, stop: Stop | None = None) -> None:
        self._stop = stop or Stop()
        self._found: dict[str, dict[str, Any]] = {}

    def schema(self, config: Config, report: Callable[[str], None] = lambda change: None) -> Schema:
        """Returns `factory.describe` of the environment, which is also stepped, unless it is an Atari game.

        With a recurrent algorithm, adds its sequences.
        Raises UsageError if a step fails, and also after `run.stuck_seconds`; StoppedError if a stop is requested.
        """
        environment, n_step = config.environment, config.actor.n_step
        if atari_game(environment.id) is not None:  # ALE starts neither threads nor processes for this.
            return with_sequences(config, describe(environment, n_step, report))
        seen = attrgetter("id", "args", "image_size", "image_crop", "grayscale", "frame_stack")
        key = json.dumps(seen(environment))
        if key not in self._found:
            subject = f"environment.id {environment.id!r}"
            self._found[key] = self._ask_child(subject, partial(_describe, environment), config)
        for change in self._found[key]["changes"]:
            report(change)
        return with_sequences(config, replace(Schema.from_dict(self._found[key]["schema"]), n_step=n_step))

    def try_algorithm(self, config: Config, schema: Schema) -> None:
        """Builds a network and an algorithm of the user; raises UsageError if the programs of a run could not use them.

        Those of this package are not built: importing torch would delay each start.
        """
        algorithm, network = choose_algorithm(config, schema), config.network.factory
        if network or ":" in algorithm:
            subject = f"algorithm {algorithm!r}" if ":" in algorithm else f"network.factory {network!r}"
            self._ask_child(subject, partial(_build, config, schema, subject), config)

    def _ask_child(self, subject: str, function: Callable[[Stop], dict[str, Any]], config: Config) -> dict[str, Any]:
        try:
            found = call_in_child(subject, function, self._stop, stuck_seconds=config.run.stuck_seconds)
        except ChildDiedError as error:
            raise UsageError(str(error), "repair it; if it is only slow, increase --run.stuck-seconds") from error
        if not found:
            raise StoppedError(f"stopped before {subject} had been tried")
        return found


def _describe(config: EnvironmentConfig, stop: Stop) -> dict[str, Any]:
    os.environ[BREAKPOINT] = "0"
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # shows where an environment hangs
    log.setLevel(logging.ERROR)  # The programs of the run log the same warnings.
    changes: list[str] = []
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # It may print a line at each of many steps.
        return {"schema": describe(config, 1, changes.append, _play).to_dict(), "changes": changes}


def _play(games: VectorEnvironment, schema: Schema) -> None:
    """Plays actions of every kind, for `PLAY_SECONDS` and MAX_STEPS at most; raises UsageError if a step fails.

    A later fault may be a rare one, which a run tolerates (`FaultBudget`): it ends the trial. A value outside of its
    space is always refused.
    """
    until, first_steps = time.monotonic() + PLAY_SECONDS, max(MIN_STEPS, min(schema.num_actions, MAX_ACTIONS))
    for number, action in enumerate(islice(_choose_actions(games, schema), MAX_STEPS)):
        try:
            games.step(action)
        except UsageError as error:
            cause = error.__cause__
            if number < first_steps or (isinstance(cause, BadAnswerError) and cause.remedy):
                raise
            return
        if time.monotonic() >= until:
            return


def _choose_actions(games: VectorEnvironment, schema: Schema) -> Iterator[Array]:
    """Yields the lowest and the highest continuous action, then random ones and their nearest corners.

    Or yields every discrete action equally often, in random order.
    """
    rng, action = np.random.default_rng(0), np.ones((1, schema.action_size), np.float32)
    if schema.action_size:
        yield -action
        while True:
            yield np.sign(action)
            action = rng.uniform(-1, 1, action.shape).astype(np.float32)
            yield action
    times_played = np.zeros(schema.num_actions)
    while True:
        order = times_played + rng.random(schema.num_actions)
        if games.action_mask is not None:
            order[~games.action_mask[0]] = np.inf
        action = order.argmin(0, keepdims=True)
        times_played[action] += 1
        yield action


def _build(config: Config, schema: Schema, subject: str, stop: Stop) -> dict[str, Any]:
    os.environ[BREAKPOINT] = "0"
    from apex.algorithms.trial import build  # Imported here because the launcher does not need torch.

    build(config, schema, subject)
    return {"built": True}
