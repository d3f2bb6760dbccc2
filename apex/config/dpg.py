"""Settings of Ape-X DPG. The defaults are those of Horgan et al. 2018, appendix D. [TD3]: Fujimoto et al. 2018."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from apex.config.validation import Branch, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class DpgConfig(Branch):
    """Continuous actions: the policy, its critics and its noise. Actions and noise are scaled to [-1, 1]."""

    policy_units: PositiveInt = 300  # units in the first hidden layer of the policy [appendix D]
    policy_units_2: PositiveInt = 200  # units in the second hidden layer of the policy [appendix D]
    critic_units: PositiveInt = 400  # units in the first hidden layer of each critic [appendix D]
    critic_units_2: PositiveInt = 300  # units in the second hidden layer of each critic [appendix D]
    first_activation: Literal["tanh", "relu"] = "tanh"  # activation of the first hidden layer; the second one uses relu
    num_critics: Annotated[int, Meta(ge=1, le=2)] = 1  # number of critics; 2: bootstrap from the smaller value [TD3]
    policy_learning_rate_share: PositiveFloat = 1.0  # learning rate of the policy, divided by learner.learning_rate
    policy_period: PositiveInt = 1  # critic updates per policy update. [TD3]: 2
    action_gradient_clip: NonNegativeFloat = 1.0  # bound on each element of dQ/da [appendix D]; 0: no bound
    target_noise: NonNegativeFloat = 0.0  # standard deviation of noise on target actions. [TD3]: 0.2
    target_noise_clip: PositiveFloat = 0.5  # bound on the noise on target actions [TD3]
    noise: NonNegativeFloat = 0.3  # standard deviation of the exploration noise of actor 0 [appendix D]
    noise_ladder: Annotated[float, Meta(gt=0, le=1)] = 1.0  # noise of the last actor, divided by the noise of actor 0
    normalize_observations: bool = False  # learn from (observation - mean) / standard deviation
