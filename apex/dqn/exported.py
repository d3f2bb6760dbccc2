"""Describes a Q-network for `apex export`: tensor names, code that loads the file, and text for the model card."""

from typing import cast

from torch import nn

from apex.algorithms.encoders import Encoder
from apex.algorithms.exported import ENCODERS, Exported, begin_code, describe_input
from apex.config import Config
from apex.dqn.networks import PixelQNetwork, QNetwork
from apex.schema import Schema

CHANNELS_FIRST = """\
    x = x.permute(0, 1, 4, 2, 3).flatten(1, 2)
"""
IMAGE_BODY = """\
    x = x.float() * (1 / 255)
    for i, stride in enumerate((4, 2, 1), start=1):
        x = F.relu(F.conv2d(x, w[f"conv{i}.weight"], w[f"conv{i}.bias"], stride))
    x = x.flatten(1)
"""
VECTOR_BODY = """\
    x = F.relu(linear("linear2", F.relu(linear("linear1", %s))))
"""
DUELING_HEADS = """\
    v, a = (linear(f"{head}.output", F.relu(linear(f"{head}.hidden", x))) for head in ("value", "advantage"))
    return v + a - a.mean(1, keepdim=True)
"""
ONE_HEAD = """\
    return linear("q.output", F.relu(linear("q.hidden", x)))
"""


def export(config: Config, schema: Schema, network: nn.Module) -> Exported:
    """Returns the Q-network with its description for `apex export`."""
    return Exported(
        module=network,
        output="q",
        names=_plain_names(config, schema, network),
        code=_code(config, schema, network),
        summary="A Q-network whose largest output marks the greedy action",
        use=describe_use(schema),
        facts=facts(config, schema),
    )


def flat(schema: Schema) -> str:
    """Returns the code of the first layer's input for vectors, see `ScaledFlatten`."""
    return "x.flatten(1)" + ".float() * (1 / 255)" * (schema.frame_dtype == "uint8")


def describe_use(schema: Schema) -> str:
    """Returns how to choose an action, for the model card."""
    if not schema.masked:
        return "The action is `q_values(observation).argmax(1)`."
    return (
        "The action is `q_values(observation).masked_fill(~mask, -torch.inf).argmax(1)`. `mask` is the "
        'environment\'s `info["action_mask"]`, bool [batch, actions]; False marks actions that are not allowed.'
    )


def facts(config: Config, schema: Schema) -> list[str]:
    """Returns what the model card says about inputs and outputs."""
    output = f"Output: float32 [batch, {schema.num_actions}], one Q-value per action 0 ... {schema.num_actions - 1}"
    output += " of Atari's whole action set." if config.environment.full_action_space else "."
    if config.network.dueling and not config.network.factory:
        output += " Dueling heads: Q = V + A - mean(A)."
    values = "Q-values estimate discounted sums of the training rewards"
    if config.network.value_rescaling:
        values = f"h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + 0.001 Q is the output; {values}"
    values += ", which were clipped to -1 ... 1; they are not scores." if config.environment.clip_rewards else "."
    return [
        "No mean, no variance and no other running statistic is applied to observations or rewards.",
        output,
        values,
    ]


def _code(config: Config, schema: Schema, network: nn.Module) -> str:
    """Returns plain torch code that loads model.safetensors and defines `q_values`."""
    factory = config.network.factory
    begin = begin_code(factory, schema)
    signature = f"{describe_input(factory, schema)} -> float32 [batch, {schema.num_actions}]"
    if factory:
        return f"{begin}q_values = make(schema).eval()  # {signature}\nq_values.load_state_dict(w)\n"
    if isinstance(body := cast(QNetwork, network).body, Encoder):
        begin, layers = f"import torch\n{begin}{ENCODERS}", f"    x = {body.code('body')}\n"
    elif isinstance(network, PixelQNetwork):
        layers = IMAGE_BODY if len(schema.frame_shape) == 2 else CHANNELS_FIRST + IMAGE_BODY
        for pool in (layer for layer in cast(nn.Sequential, body) if isinstance(layer, nn.AdaptiveMaxPool2d)):
            layers = layers.replace("x.flatten(1)", f"F.adaptive_max_pool2d(x, {pool.output_size}).flatten(1)")
    else:
        layers = VECTOR_BODY % flat(schema)
    heads = DUELING_HEADS if config.network.dueling else ONE_HEAD
    return f"{begin}def q_values(x):  # {signature}\n{layers}{heads}"


def _plain_names(config: Config, schema: Schema, network: nn.Module) -> dict[str, str]:
    """Maps names in the state dict to names in the file: conv1 ... or linear1 ..., then the heads.

    The tensors of an `Encoder` and of a custom network keep their names.
    """
    if config.network.factory:
        return {name: name.removeprefix("module.") for name in network.state_dict() if schema.parts}
    is_encoder = isinstance(cast(QNetwork, network).body, Encoder)
    layer = "conv" if isinstance(network, PixelQNetwork) else "linear"
    body = [name for name in network.state_dict() if name.startswith("body.")]
    indices = [] if is_encoder else sorted({int(name.split(".")[1]) for name in body})
    names = {}
    for name in network.state_dict():
        part, module, tensor = name.split(".", 2)
        if part == "body" and is_encoder:
            continue
        if part == "body":
            names[name] = f"{layer}{indices.index(int(module)) + 1}.{tensor}"
        elif not config.network.dueling:  # Without dueling, the head `advantage` is the only one and returns Q.
            names[name] = f"q.{module}.{tensor}"
    return names
