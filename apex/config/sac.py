"""Settings of SAC. [SAC]: Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv 1812.05905."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from apex.config.validation import Branch, NonNegativeFloat, PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class SacConfig(Branch):
    """SAC: entropy and exploration. Networks, normalization and the policy's learning rate are those of `dpg.*`."""

    initial_temperature: PositiveFloat = 1.0  # weight of the entropy before the first update; then learned [SAC's code]
    target_entropy_scale: NonNegativeFloat = 1.0  # target of the entropy in nats, divided by -K [SAC, appendix D]
    noise: NonNegativeFloat = 1.0  # actor 0: factor on the policy's standard deviation; 1: samples of the policy [SAC]
    noise_ladder: Annotated[float, Meta(gt=0, le=1)] = 1.0  # factor of the last actor, divided by the factor of actor 0
