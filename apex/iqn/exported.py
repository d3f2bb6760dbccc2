"""Describes a quantile network for `apex export`: code that loads the file, and text for the model card."""

from apex.algorithms.encoders import Encoder
from apex.algorithms.exported import ENCODERS, LINEAR, Exported, begin_code, describe_input
from apex.config import Config
from apex.dqn import exported as dqn
from apex.iqn.networks import COSINES, QuantileNetwork
from apex.schema import Schema

LOAD_BODY = f"""\
import torch.nn.functional as F

body = make(schema).eval()
body.load_state_dict({{n.removeprefix("body."): w[n] for n in w if n.startswith("body.")}})
{LINEAR}"""
CODE = f"""\
def head(name, x):
    x, norm = linear(f"{{name}}.hidden", x), f"{{name}}.activation.0"
    if f"{{norm}}.weight" in w:
        x = F.layer_norm(x, x.shape[-1:], w[f"{{norm}}.weight"], w[f"{{norm}}.bias"])
    return linear(f"{{name}}.output", F.relu(x))

def q_values(x):  # %s
    cosines = torch.cos((torch.arange(%d)[:, None] + 0.5) / %d * torch.pi * torch.arange({COSINES}))
    x = %s[:, None] * F.relu(linear("embedding.0", cosines))
    a = head("advantage", x)
    z = %s
    return z.mean(1)
"""


def export(config: Config, schema: Schema, network: QuantileNetwork) -> Exported:
    """Returns the quantile network with its description for `apex export`; the output is the Q-values."""
    factory, number = config.network.factory, config.iqn.num_policy_fractions
    features = "body(x)" if factory else f'F.relu(linear("body.3", F.relu(linear("body.1", {dqn.flat(schema)}))))'
    if isinstance(network.body, Encoder):
        features = network.body.code("body")
    signature = f"{describe_input(factory, schema)} -> float32 [batch, {schema.num_actions}]"
    quantiles = "a" if network.value is None else 'head("value", x) + a - a.mean(-1, keepdim=True)'
    code = begin_code(factory, schema) + (LOAD_BODY if factory else ENCODERS)
    exported = dqn.export(config, schema, network)
    return exported._replace(
        code=f"import torch\n{code}{CODE % (signature, number, number, features, quantiles)}",
        names={
            name: name.replace("body.module.", "body.") for name in network.state_dict() if factory and schema.parts
        },
        summary="A quantile network (IQN) whose largest output marks the greedy action",
        facts=[*exported.facts, f"Each Q-value is the mean of {number} quantiles of the return, at fixed fractions."],
    )
