"""Tries the policy from which a new run starts, and the parts that it does not train, before anything starts."""

from functools import partial
from typing import Any

import msgspec

from apex.config import Config
from apex.facts import WarmStart
from apex.schema import Schema
from apexreplay.process.children import call_in_child
from apexreplay.process.lifecycle import Stop


def find_warm_start(config: Config, schema: Schema, stop: Stop) -> WarmStart | None:
    """Returns what a new run copies from the policy; None without one, or if a stop was requested.

    Raises UsageError if the policy is missing or damaged, if none of its tensors fits, or if the network has no
    parameters in a part of `learner.freeze`.
    """
    setting = "init_from" if config.learner.init_from else "freeze"
    if not getattr(config.learner, setting):
        return None
    stuck_seconds = config.run.stuck_seconds
    found = call_in_child(f"learner.{setting}", partial(_try, config, schema), stop, stuck_seconds=stuck_seconds)
    return msgspec.convert(found, WarmStart) if found else None


def _try(config: Config, schema: Schema, stop: Stop) -> dict[str, Any]:
    # Imported here because the launcher does not need torch.
    from apex.algorithms.interface import make_algorithm
    from apex.algorithms.parameters import freeze
    from apex.learning.warm_start import start_warm

    network = make_algorithm(config, schema).make_network()
    if config.learner.freeze:
        freeze(network, config.learner.freeze)
    if not config.learner.init_from:
        return {}
    found: dict[str, Any] = msgspec.to_builtins(start_warm(network, config.learner.init_from))
    return found
