"""Describes a Q-network for `apex export`: tensor names, code that loads the file, and text for the model card."""

from __future__ import annotations

from torch import nn

from apex.algorithms.exported import Exported
from apex.config import Config
from apex.types import Schema

# The exported code does not import this package. The tests run it unchanged.
LINEAR = """\
import torch.nn.functional as F
from safetensors.torch import load_file

w = load_file("model.safetensors")

def linear(name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

"""
IMAGE_BODY = """\
def q_values(x):  # uint8 {shape} -> float32 [batch, {num_actions}]
    x = x.float() * (1 / 255)
    for i, stride in enumerate((4, 2, 1), start=1):
        x = F.relu(F.conv2d(x, w[f"conv{{i}}.weight"], w[f"conv{{i}}.bias"], stride))
    x = x.flatten(1)
"""
VECTOR_BODY = """\
def q_values(x):  # float32 {shape} -> float32 [batch, {num_actions}]
    x = F.relu(linear("linear2", F.relu(linear("linear1", x))))
"""
DUELING_HEADS = """\
    v, a = (linear(f"{head}.output", F.relu(linear(f"{head}.hidden", x))) for head in ("value", "advantage"))
    return v + a - a.mean(1, keepdim=True)
"""
ONE_HEAD = """\
    return linear("q.output", F.relu(linear("q.hidden", x)))
"""
CUSTOM = """\
from types import SimpleNamespace

from safetensors.torch import load_file
from {module} import {name}

schema = SimpleNamespace(**{schema})
q_values = {name}(schema).eval()  # {dtype} {shape} -> float32 [batch, {num_actions}]
q_values.load_state_dict(load_file("model.safetensors"))
"""


def export(config: Config, schema: Schema, network: nn.Module) -> Exported:
    """Returns the Q-network with its description for `apex export`."""
    environment = config.environment
    output = f"Output: float32 [batch, {schema.num_actions}], one Q-value per action 0 ... {schema.num_actions - 1}"
    output += " of Atari's whole action set." if environment.full_action_space else "."
    if config.network.dueling and not config.network.factory:
        output += " Dueling heads: Q = V + A - mean(A)."
    values = "h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + 0.001 Q is the output; Q-values" * config.network.value_rescaling
    rewards = f"{values or 'Q-values'} estimate discounted sums of the training rewards"
    return Exported(
        module=network,
        output="q",
        names=_plain_names(config, schema, network),
        code=_load_code(config, schema),
        summary="A Q-network whose largest output marks the greedy action",
        use="The action is `q_values(observation).argmax(1)`."
        if not schema.masked
        else "The action is `q_values(observation).masked_fill(~mask, -torch.inf).argmax(1)`, with the environment's "
        '`info["action_mask"]` as `mask`, bool [batch, actions]. Actions that are False in the mask are not allowed.',
        facts=[
            "No mean, no variance and no other running statistic is applied to observations or rewards.",
            output,
            rewards + (", which were clipped to -1 ... 1; they are not scores." if environment.clip_rewards else "."),
        ],
    )


def _load_code(config: Config, schema: Schema) -> str:
    """Returns plain torch code that loads model.safetensors and defines `q_values`."""
    dims = schema.observation_shape if schema.frame_dtype == "uint8" or config.network.factory else schema.frame_shape
    facts = {"shape": f"[batch, {', '.join(map(str, dims))}]", "num_actions": schema.num_actions}
    if config.network.factory:
        module, _, name = config.network.factory.partition(":")
        return CUSTOM.format(module=module, name=name, schema=schema.to_attributes(), dtype=schema.frame_dtype, **facts)
    body = IMAGE_BODY if len(schema.frame_shape) == 2 else VECTOR_BODY
    return LINEAR + body.format(**facts) + (DUELING_HEADS if config.network.dueling else ONE_HEAD)


def _plain_names(config: Config, schema: Schema, network: nn.Module) -> dict[str, str]:
    """Maps names in the state dict to names in the file: conv1 ... or linear1 ..., then the heads.

    The tensors of a custom network keep their names.
    """
    if config.network.factory:
        return {}
    layer = "conv" if len(schema.frame_shape) == 2 else "linear"
    places = sorted({int(name.split(".")[1]) for name in network.state_dict() if name.startswith("body.")})
    names = {}
    for name in network.state_dict():
        part, place, leaf = name.split(".")
        if part == "body":
            names[name] = f"{layer}{places.index(int(place)) + 1}.{leaf}"
        elif not config.network.dueling:  # Without dueling, the head `advantage` is the only one and returns Q.
            names[name] = f"q.{place}.{leaf}"
    return names
