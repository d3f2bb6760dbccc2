"""What `apex export` writes about a network, so that the network can be used without this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn


class Exported(NamedTuple):
    """A network to export. `code` needs torch, safetensors and, for a custom network, the module that defines it."""

    module: nn.Module  # frame_dtype[B, S, *F] -> output; also exported to ONNX
    output: str  # name of the output in ONNX: "q" or "action"
    names: Mapping[str, str]  # name in the state dict -> name in the file, for tensors whose names differ
    code: str  # Python code that defines a function of observations
    summary: str  # first words of the model card: "A Q-network whose largest output marks the greedy action"
    use: str  # one sentence: how to choose an action from the output
    facts: Sequence[str]  # sentences about input and output
