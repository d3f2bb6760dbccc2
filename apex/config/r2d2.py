"""Settings of R2D2. [R2D2]: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning.

Values without a source are derived, as the comments say.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from apex.config.validation import Branch, NonNegativeInt, PositiveInt, Probability


@dataclass(frozen=True, slots=True, kw_only=True)
class R2d2Config(Branch):
    """R2D2: sequences and the recurrent layer. With it, all settings that count transitions count sequences."""

    sequence_length: Annotated[int, Meta(ge=2, le=500)] = 80  # steps of a sequence, with those that burn in [R2D2]
    burn_in: NonNegativeInt = 35  # steps that only prepare the state; 35 + 5 of n_step are the overlap of 40 [R2D2]
    units: PositiveInt = 512  # units of the LSTM [R2D2]
    priority_max_share: Probability = 0.9  # eta: priority = eta * max + (1 - eta) * mean of |TD errors| [R2D2]

    def period(self, n_step: int) -> int:
        """Returns after how many steps of an episode the next sequence begins: the steps that one sequence trains."""
        return self.sequence_length - self.burn_in - n_step
