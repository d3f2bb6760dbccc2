"""Describes a policy for `apex export`: code that loads the file, and text for the model card."""

from __future__ import annotations

from apex.algorithms.exported import Exported
from apex.config import Config
from apex.dpg.networks import LEAST_DEVIATION, MOST_DEVIATIONS, ActorCritic
from apex.types import Schema

# The exported code does not import this package. The tests run it unchanged.
HEAD = """\
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

w = load_file("model.safetensors")

"""
OWN = """\
from types import SimpleNamespace
from {module} import {name}

schema = SimpleNamespace(**{schema})
policy = {name}(schema).policy.eval()
policy.load_state_dict({{n.removeprefix("policy."): w[n] for n in w if n.startswith("policy.")}})

def act(x):  # {dtype} {shape} -> float32 [batch, {size}] in -1 ... 1
{normalize}    return policy(x)
"""
POLICY = """\
def linear(name, x):
    return F.linear(x, w[f"policy.{{name}}.weight"], w[f"policy.{{name}}.bias"])

def act(x):  # {dtype} {shape} -> float32 [batch, {size}] in -1 ... 1
{normalize}    x = F.relu(linear("hidden2", torch.{activation}(linear("hidden1", x))))
    return torch.tanh(linear("output", x))
"""
NORMALIZE = f"""\
    mean, variance = w["normalizer.mean"], w["normalizer.variance"]
    x = ((x - mean) / variance.sqrt().clamp(min={LEAST_DEVIATION:g})).clamp(-{MOST_DEVIATIONS:g}, {MOST_DEVIATIONS:g})
"""


def export(config: Config, schema: Schema, network: ActorCritic) -> Exported:
    """Returns the policy and critics with their description for `apex export`."""
    factory, is_normalized, size = config.network.factory, config.dpg.normalize_observations, schema.action_size
    module, _, name = factory.partition(":")
    facts = {
        "shape": f"[batch, {', '.join(map(str, schema.observation_shape if factory else schema.frame_shape))}]",
        "dtype": schema.frame_dtype,
        "size": size,
        "normalize": NORMALIZE if is_normalized else "",
    }
    own = OWN.format(module=module, name=name, schema=schema.to_attributes(), **facts)
    normalized = (
        "The network subtracts the mean of each value and divides by its standard deviation; the file has both."
    )
    return Exported(
        module=network,
        output="action",
        names={},
        code=HEAD + (own if factory else POLICY.format(activation=config.dpg.first_activation, **facts)),
        summary="A deterministic policy of continuous actions",
        use="For a = `act(observation)`, the environment's action is `low + (a + 1) / 2 * (high - low)`.",
        facts=[
            normalized if is_normalized else "Observations are not normalized.",
            f"Output: float32 [batch, {size}], an action in -1 ... 1.",
            "The file also contains the critics; the names of their tensors begin with `critics`.",
        ],
    )
