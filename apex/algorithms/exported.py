"""What `apex export` writes about a network, so that the network can be used without this package."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from apex.algorithms.impala import CODE
from apex.schema import Schema

# The exported code does not import this package. The tests run it unchanged.
LINEAR = """
def linear(name, x):
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

"""
BUILT_IN = f"""\
import torch.nn.functional as F
from safetensors.torch import load_file

w = load_file("model.safetensors")
{LINEAR}"""


# Used by the code of `Encoder.code`.
ENCODERS = """\
def image_axes(x):  # [batch, S, H, W] or [batch, S, H, W, C] -> [batch, S * C, H, W]
    return x if x.dim() == 4 else x.permute(0, 1, 4, 2, 3).flatten(1, 2)

def bits(x):  # uint8 [batch, C, H, W] -> [batch, 8 * C, H, W]
    return ((x.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1, 1)) & 1).flatten(1, 2)

def convolve(x, name, strides, padding=0, pool=None):
    for i, stride in enumerate(strides):
        x = F.relu(F.conv2d(x.float(), w[f"{name}.{2 * i}.weight"], w[f"{name}.{2 * i}.bias"], stride, padding))
    return (F.adaptive_max_pool2d(x, pool) if pool else x).flatten(1)

def embed(x, table):
    rows = x.long() + torch.arange(x.shape[1])[:, None] * (len(table) // x.shape[1])
    return F.relu(F.embedding(rows.flatten(1), table).sum(1))

"""
ENCODERS += CODE


class Exported(NamedTuple):
    """A network to export. `code` needs torch, safetensors and, for a custom network, the module that defines it."""

    module: nn.Module  # frame_dtype[B, S, *F], or a dictionary of parts -> output; also exported to ONNX
    output: str  # name of the output in ONNX: "q" or "action"
    names: Mapping[str, str]  # name in the state dict -> name in the file, for tensors whose names differ
    code: str  # Python code that defines a function of observations
    summary: str  # first words of the model card: "A Q-network whose largest output marks the greedy action"
    use: str  # one sentence: how to choose an action from the output
    facts: Sequence[str]  # sentences about input and output
    state_size: int = 0  # D of a recurrent network, which also takes float32[B, D] and returns the next one; 0: others


def begin_code(factory: str, schema: Schema) -> str:
    """Returns code that loads the tensors as `w`. With a custom network, it also defines `make(schema)`, else `linear`.

    factory: `network.factory`.
    """
    if not factory:
        return BUILT_IN
    module, _, name = factory.partition(":")
    return f"""\
from types import SimpleNamespace

from safetensors.torch import load_file
from {module} import {name} as make

w = load_file("model.safetensors")
schema = SimpleNamespace(**{schema.to_attributes()})
"""


def describe_input(factory: str, schema: Schema) -> str:
    """Returns dtype and shape of the code's input: "uint8 [batch, 4, 84, 84]"; or "a dictionary of the inputs"."""
    if schema.parts:
        return "a dictionary of the inputs"
    is_one = schema.is_vector and schema.stack == 1 and not factory
    shape = schema.frame_shape if is_one else schema.observation_shape
    return f"{schema.frame_dtype} [batch, {', '.join(map(str, shape))}]"
