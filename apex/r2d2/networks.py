"""The recurrent Q-network: the body of DQN for each frame, an LSTM over time, and DQN's heads.

Axes: B batch, T steps, *F one frame, A actions, D numbers of the state: those of the hidden state, then those of the
cell state.
"""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from apex.algorithms.custom_network import seeded
from apex.config import NetworkConfig
from apex.config.algorithm_choice import STATE_ARRAYS
from apex.dqn.networks import QNetwork, hidden_units, make_body, make_custom
from apex.schema import Schema

Observation = Tensor | Mapping[str, Tensor]


def make_network(config: NetworkConfig, schema: Schema, *, seed: int) -> "RecurrentQNetwork":
    """Returns a network for observations frame_dtype[B, T, *F]. Equal seeds give equal parameters.

    A custom network, `network.factory`, is the body: dtype[B, 1, *F] -> float32[B, any].
    Raises UsageError if it cannot be trained or its parameters cannot be sent. torch's global random state does not
    change.
    """
    with seeded(seed):
        make = make_custom(config.factory, schema, None) if config.factory else make_body(config, schema)
        return RecurrentQNetwork(config, schema, *make)


class RecurrentQNetwork(nn.Module):
    """Returns the Q-values of each of T steps, and the state after the last one."""

    def __init__(self, config: NetworkConfig, schema: Schema, body: nn.Module, num_features: int) -> None:
        super().__init__()
        self.num_actions, self.state_size = schema.num_actions, schema.state_size
        units = self.state_size // STATE_ARRAYS
        # Its body and heads; without the recurrent layer in between, they would be a Q-network.
        self.q = QNetwork(config, body, units, schema.num_actions, hidden_units(config, schema))
        self.recurrent = nn.LSTM(num_features, units, batch_first=True)

    def forward(
        self, observation: Observation, state: Tensor | None = None, *, bfloat16: bool = False
    ) -> tuple[Tensor, Tensor]:
        """frame_dtype[B, T, *F] or its parts, float32[B, D] -> float32[B, T, A], float32[B, D].

        `state` None: all zero. `bfloat16`: the body computes in bfloat16.
        """
        first = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
        size, steps = first.shape[:2]
        precise = torch.autocast(first.device.type, torch.bfloat16) if bfloat16 else nullcontext()
        with precise:
            features = self.q.body(self._frames(observation)).float()
        if state is None:
            state = features.new_zeros(size, self.state_size)
        hidden, cell = (half.contiguous().unsqueeze(0) for half in state.chunk(2, 1))
        outputs, (hidden, cell) = self.recurrent(features.view(size, steps, -1), (hidden, cell))
        q: Tensor = self.q.values(outputs.flatten(0, 1))
        return q.view(size, steps, -1), torch.cat([hidden[0], cell[0]], 1)

    def _frames(self, observation: Observation) -> Observation:
        """Returns the steps as rows of one frame each, as the body takes them: [B * T, 1, *F]."""
        if not isinstance(observation, Tensor):
            return {name: part.flatten(0, 1).unsqueeze(1) for name, part in observation.items()}
        return observation.flatten(0, 1).unsqueeze(1)
