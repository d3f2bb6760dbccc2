"""Describes a recurrent Q-network for `apex export`: code that loads the file, and text for the model card."""

from apex.algorithms.encoders import Encoder
from apex.algorithms.exported import ENCODERS, LINEAR, Exported, begin_code, describe_input
from apex.config import Config
from apex.dqn.exported import describe_use, facts, flat
from apex.r2d2.networks import RecurrentQNetwork
from apex.schema import Schema

LOAD_BODY = f"""\
import torch.nn.functional as F

body = make(schema).eval()
body.load_state_dict({{n.removeprefix("q.body."): w[n] for n in w if n.startswith("q.body.")}})
{LINEAR}"""
RECURRENT = """\
def recurrent(kind, x):
    return F.linear(x, w[f"recurrent.weight_{kind}_l0"], w[f"recurrent.bias_{kind}_l0"])

"""
LSTM = """\
    h, c = state.chunk(2, 1)
    i, f, g, o = (recurrent("ih", x) + recurrent("hh", h)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
"""
DUELING_HEADS = """\
    v, a = (linear(f"q.{head}.output", F.relu(linear(f"q.{head}.hidden", h))) for head in ("value", "advantage"))
    return v + a - a.mean(1, keepdim=True), torch.cat([h, c], 1)
"""
ONE_HEAD = """\
    return linear("q.advantage.output", F.relu(linear("q.advantage.hidden", h))), torch.cat([h, c], 1)
"""


def export(config: Config, schema: Schema, network: RecurrentQNetwork) -> Exported:
    """Returns the Q-network with its description for `apex export`."""
    factory, size = config.network.factory, network.state_size
    begin = f"import torch\n{begin_code(factory, schema)}{LOAD_BODY if factory else ENCODERS}{RECURRENT}"
    features = "body(x)" if factory else f'F.relu(linear("q.body.3", F.relu(linear("q.body.1", {flat(schema)}))))'
    if isinstance(network.q.body, Encoder):
        features = network.q.body.code("q.body")
    signature = f"{describe_input(factory, schema)}, float32 [batch, {size}] -> float32 [batch, {schema.num_actions}]"
    heads = DUELING_HEADS if config.network.dueling else ONE_HEAD
    own = {name: name.replace(".module.", ".") for name in network.state_dict() if factory and schema.parts}
    code = f"{begin}def q_values(x, state):  # {signature}, the next state\n    x = {features}\n{LSTM}{heads}"
    return Exported(
        module=network,
        output="q",
        names=own,
        code=code,
        summary="A recurrent Q-network whose largest output marks the greedy action",
        use=f"{describe_use(schema).replace('q_values(observation)', 'q')} `q, state = q_values(observation, state)`.",
        facts=[*facts(config, schema), f"State: float32 [batch, {size}], zeros at the beginning of each episode."],
        state_size=size,
    )
