"""Describes a policy for `apex export`: code that loads the file, and text for the model card."""

from typing import cast

from torch import nn

from apex.algorithms.encoders import Encoder
from apex.algorithms.exported import ENCODERS, Exported, begin_code, describe_input
from apex.config import Config
from apex.dpg.networks import ENCODED, LEAST_DEVIATION, MOST_DEVIATIONS, ActorCritic
from apex.schema import Schema

LOAD_POLICY = """\
policy = make(schema).policy.eval()
policy.load_state_dict({n.removeprefix("policy."): w[n] for n in w if n.startswith("policy.")})

"""
NORMALIZE = f"""\
    mean, variance = w["normalizer.mean"], w["normalizer.variance"]
    x = ((x - mean) / variance.sqrt().clamp(min={LEAST_DEVIATION:g})).clamp(-{MOST_DEVIATIONS:g}, {MOST_DEVIATIONS:g})
"""
ENCODE = """\
    x = linear("encoder.1", {features})
    x = torch.tanh(F.layer_norm(x, ({size},), w["encoder.2.weight"], w["encoder.2.bias"]))
"""
CUSTOM_LAYERS = """\
    return {result}
"""
BUILT_IN_LAYERS = """\
    x = F.relu(linear("policy.hidden2", torch.{activation}(linear("policy.hidden1", x.flatten(1)))))
    return {result}
"""


def export(config: Config, schema: Schema, network: ActorCritic, *, gaussian: bool = False) -> Exported:
    """Returns the policy and critics with their description for `apex export`.

    gaussian: the policy has 2 K outputs, and tanh of the first K is the action.
    """
    factory, size = config.network.factory, schema.action_size
    begin = begin_code(factory, schema)
    result = "policy(x)" if factory else 'linear("policy.output", x)'
    if gaussian or not factory:
        result = f"torch.tanh({result}{f'[:, :{size}]' * gaussian})"
    if factory:
        begin, layers = begin + LOAD_POLICY, CUSTOM_LAYERS.format(result=result)
        begin = "import torch\n" * gaussian + begin
    else:
        begin = "import torch\n" + begin
        layers = BUILT_IN_LAYERS.format(activation=config.dpg.first_activation, result=result)
        if network.encoder is not None:
            begin += ENCODERS
            encoder = cast(Encoder, cast(nn.Sequential, network.encoder)[0])
            layers = ENCODE.format(features=encoder.code("encoder.0"), size=ENCODED) + layers
    normalize, normalized = "", "Observations are not normalized."
    if config.dpg.normalize_observations:
        normalize = NORMALIZE
        normalized = (
            "The network subtracts the mean of each value and divides by its standard deviation; the file has both."
        )
    signature = f"{describe_input(factory, schema)} -> float32 [batch, {size}] in -1 ... 1"
    own = {name: name.replace(".module.", ".") for name in network.state_dict() if factory and schema.parts}
    return Exported(
        module=network,
        output="action",
        names=own,
        code=f"{begin}def act(x):  # {signature}\n{normalize}{layers}",
        summary="The mean of a Gaussian policy" if gaussian else "A deterministic policy of continuous actions",
        use="For a = `act(observation)`, the environment's action is `low + (a + 1) / 2 * (high - low)`.",
        facts=[
            normalized,
            f"Output: float32 [batch, {size}], an action in -1 ... 1.",
            "The file also contains the critics; the names of their tensors begin with `critics`.",
        ],
    )
