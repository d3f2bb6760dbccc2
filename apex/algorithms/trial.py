"""Builds a network and an algorithm of the user as the programs of a run do, to refuse unusable ones before a run."""

import numpy as np
import torch

from apex.algorithms.interface import make_algorithm
from apex.algorithms.parameters import require_finite
from apex.config import Config
from apex.schema import Schema
from apexreplay.errors import UsageError, describe_exception, require

ROWS = 2  # number of observations for which the agent decides


def build(config: Config, schema: Schema, subject: str) -> None:
    """Builds everything that a run asks of the algorithm, and decides once; raises UsageError if that is impossible.

    `subject`: the setting that names the user's code, and its value. Makes no update, because a forked child can make
    none if its parent has computed gradients on a GPU.
    """
    torch.set_num_threads(1)  # More would wait forever for threads that only the parent of a forked child has.
    try:
        algorithm, rng = make_algorithm(config, schema), np.random.default_rng(0)
        online, target = algorithm.make_network(), algorithm.make_network()
        require_finite(online)
        algorithm.make_update(online, target, algorithm.make_optimizer(online), torch.device("cpu"))
        agent = algorithm.make_agent(online, bfloat16=False)
        observation = np.zeros((ROWS, *schema.observation_shape), schema.frame_dtype)
        mask = np.ones((ROWS, schema.num_actions), np.bool_) if schema.masked else None
        decision = agent.decide(observation, mask, algorithm.exploration(ROWS).amounts, rng)
        others = agent.act(observation, mask, 0.0, rng), agent.state_value(observation, mask)
        shapes = [np.shape(values) for values in (decision.action, *others)]
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{subject} raised {describe_exception(error)}", "repair it") from error
    expected = [(ROWS, *schema.action_shape)] * 2 + [(ROWS,)]
    problem = f"{subject}: decide, act and state_value of {ROWS} observations returned values of shape {shapes}"
    require(shapes == expected, problem, remedy=f"return {expected}")
