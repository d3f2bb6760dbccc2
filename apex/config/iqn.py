"""Settings of IQN. [IQN]: Dabney et al. 2018, arXiv 1806.06923. [BTR]: Clark et al. 2024, arXiv 2411.03820."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from apex.config.validation import Branch

Number = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IqnConfig(Branch):
    """IQN: quantiles of the return. Network, target and exploration are those of DQN; the loss is quantile Huber."""

    num_fractions: Number = 8  # random quantiles of predictions and of targets, N and N' [BTR]; [IQN]: 64
    num_policy_fractions: Number = 32  # fixed quantiles whose mean is the Q-value, K [IQN]
    layer_norm: bool = False  # normalize the hidden layer of each head before its ReLU [authors' code of BTR]
