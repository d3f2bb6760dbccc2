"""The presets. Each lists only the settings that differ from the defaults, and why. The defaults are the paper's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from apex.config import (
    ActorConfig,
    CheckpointConfig,
    Config,
    DpgConfig,
    EnvironmentConfig,
    EvaluatorConfig,
    IqnConfig,
    LearnerConfig,
    NetworkConfig,
    R2d2Config,
    ReplayConfig,
    RunConfig,
    from_dict,
)
from apex.config.validation import did_you_mean, require_setting

# The kind of an environment, by its observations and actions. "image": also among other parts. "grid": all others that
# are not vectors. "continuous" has vectors and continuous actions.
EnvironmentKind = Literal["atari", "image", "grid", "vector", "continuous", "continuous-image", "continuous-grid"]


class Preset(NamedTuple):
    """A complete configuration and its purpose in one line."""

    config: Config
    summary: str


# Horgan et al. 2018. tree.py has every value and its reference beside the setting. Only the number of actors differs
# from the default, because few machines have enough cores for 360.
PAPER = Config(actor=ActorConfig(num_actors=360))  # [section 4.1]

# Any Atari game on a machine with a GPU: the paper's network, batch size and target period. The settings below learn
# faster on one machine and need half of the memory. The number of actors is chosen for the machine; the paper had 360.
ATARI = Config(
    environment=EnvironmentConfig(fire_after_life_loss=True),  # paper: not stated; Stable-Baselines3 does it
    actor=ActorConfig(
        bfloat16="auto",  # paper: not stated; depends on the CPU
        parameters_period=10,  # paper: 100, which are 400 updates with 16 actors and batches of 32
    ),
    replay=ReplayConfig(
        capacity=1_000_000,  # paper: 2 M; about 1.5 GiB of compressed frames instead of 3 GiB
        min_size_to_sample=20_000,  # paper: 50,000, which 360 actors insert within seconds
        samples_per_insert=8.0,  # paper: unlimited, about 0.8; a bound for few actors and a fast GPU; DQN: 8
    ),
    learner=LearnerConfig(
        optimizer="adam",  # paper: RMSProp; Adam needs no tuning for each game
        learning_rate=1e-4,  # paper: 2.5e-4 / 4, for RMSProp
        optimizer_epsilon=1.5e-4,  # paper: 1.5e-7, for RMSProp; for Adam see Hessel et al. 2018
        loss="huber",  # paper: squared; Huber bounds the gradient of very large errors
        bfloat16="auto",  # paper: not stated; with hardware support an update takes 0.6 times as long
    ),
    evaluator=EvaluatorConfig(
        # Long, because a full game occupies one core for tens of seconds. The paper does not state a period.
        period_seconds=120.0,
        episodes=2,
        num_envs=20,  # An evaluation uses only one per game; those that confirm a score use all 20.
    ),
)

# Any Atari game on a GPU: Beyond The Rainbow (Clark et al. 2024), with the values of the authors' code. Exploration is
# that of Ape-X; the paper has noisy networks.
BTR = Config(
    algorithm="iqn",
    environment=EnvironmentConfig(sticky_actions=0.25, life_loss_terminates=False),
    actor=replace(ATARI.actor, num_actors=64, gamma=0.997),
    replay=ReplayConfig(
        capacity=2**20,
        min_size_to_sample=200_000,
        priority_exponent=0.2,
        samples_per_insert=4.0,  # one batch of 256 after each step of 64 environments
        inserts_wait=True,  # the paper's learner and environments wait for each other
    ),
    learner=LearnerConfig(
        batch_size=256,
        optimizer="adam",
        learning_rate=1e-4,
        optimizer_epsilon=0.005 / 256,
        max_gradient_norm=10.0,
        loss="huber",
        target="munchausen",
        target_period=500,
    ),
    network=NetworkConfig(torso="impala"),
    iqn=IqnConfig(num_policy_fractions=8, layer_norm=True),  # layers are not normalized by default there
    evaluator=replace(ATARI.evaluator, epsilon=0.01),
)

# Pong on few cores: many small updates. The network has a quarter of the width. On few cores the batch is an eighth of
# the paper's, and an update then takes about a twentieth of the time. The number of actors and the batch size are
# chosen for the machine: 16 actors and batches of 64 on two cores.
PONG = Config(
    environment=ATARI.environment,
    actor=ATARI.actor,
    replay=ReplayConfig(
        capacity=200_000,  # paper: 2 M; a few games of each actor are enough here
        min_size_to_sample=10_000,  # paper: 50,000; two cores insert 10,000 in about 5 s
        # Paper: unlimited, in practice about 0.8; DQN: 8. On few cores, samples are scarcer than steps. In a rough
        # trial the score was 18 after 0.97 M steps (28 minutes) with 6, but still -21 after 2.4 M steps with 0.6.
        samples_per_insert=8.0,
        inserts_wait=True,  # leaves CPU time for the learner, the loader and the evaluator
    ),
    learner=replace(
        ATARI.learner,
        batch_size=0,  # paper: 512; chosen for the machine, 64 on few cores
        learning_rate=6e-4,  # paper: 2.5e-4 / 4; with 1e-4, Breakout learned a third as much
        learning_rate_warmup=2_000,  # paper: none
        centered_gradients=True,  # paper: not stated; without it, whole layers may become inactive
        optimizer_epsilon=1e-5,  # paper: 1.5e-7; with ATARI's rate and epsilon, Breakout learned half as much
        target_period=500,  # paper: 2,500; few cores make few updates
    ),
    network=NetworkConfig(width=0.25, initialization="balanced"),  # paper: 1; initialization not stated
    # A game of Pong takes few seconds. With 2 games, chance began one-minute confirmations of scores such as 6.
    evaluator=replace(ATARI.evaluator, period_seconds=45.0, episodes=5),
    checkpoint=CheckpointConfig(period=1_000),
)

# Any other game with images, without a GPU. With a quarter of the width and a constant learning rate, the score of
# Breakout stayed at 16 from minute 6 to minute 22.
NARROW = replace(
    PONG,
    actor=replace(ATARI.actor, n_step=5),  # paper: 3; with shifts, Breakout learned sooner (ADR 32)
    learner=replace(
        PONG.learner,
        random_shift=4,  # paper: not stated; one run of Breakout passed its plateau of 22 (ADR 32)
        learning_rate_until_limit=True,  # paper: constant
        learning_rate_updates=200_000,  # of a run without a limit: 45 minutes on two cores
    ),
    network=replace(PONG.network, width=0.5),  # paper: 1
    evaluator=replace(ATARI.evaluator, episodes=10),  # not 2, because the scores of single games differ by about 5
)

# Images of other environments, without a GPU. Often larger and in colour, so that an update takes longer, but simpler
# to learn than Atari: smaller batches, a sooner start, and evaluations that are more frequent.
IMAGE = replace(
    NARROW,
    environment=EnvironmentConfig(clip_rewards=False),
    # Few steps a second, so longer segments would arrive late. Rewards of more steps would hide those of simple tasks.
    actor=replace(NARROW.actor, num_actors=8, segment_length=25, n_step=2),
    replay=replace(NARROW.replay, capacity=100_000, min_size_to_sample=2_000),
    learner=replace(
        NARROW.learner,
        batch_size=32,
        learning_rate_warmup=500,
        centered_gradients=False,  # With them, balanced units never see how bright an image is.
        target_period=200,
        random_shift=0,  # A position in the image may have to be compared with another part of the observation.
    ),
    evaluator=replace(NARROW.evaluator, period_seconds=15.0, num_envs=10),
)

# Observations that are vectors of a few numbers. The values are not from the paper, whose DQN plays only Atari: small
# networks, a short target period, frequent publications and unclipped rewards.
VECTOR = Config(
    environment=EnvironmentConfig(clip_rewards=False),
    actor=ActorConfig(
        num_actors=8,
        segment_length=25,  # half of the paper's value, so that experience reaches the learner sooner
        parameters_period=20,  # more frequent than in the paper, because the policy changes every second
    ),
    replay=ReplayConfig(capacity=50_000, min_size_to_sample=1_000),
    learner=LearnerConfig(
        batch_size=128,
        optimizer="adam",
        learning_rate=1e-3,
        optimizer_epsilon=1e-8,
        loss="huber",
        max_gradient_norm=10.0,
        target_period=100,
        publish_period=5,
        publish_seconds=0.0,  # no minimum, because the parameters are few
        num_threads=1,  # the network is too small to gain from more threads
    ),
    network=NetworkConfig(hidden=64, body_hidden=64),
    evaluator=EvaluatorConfig(period_seconds=2.0, period_updates=500, episodes=20, epsilon=0.0, num_envs=20),
    checkpoint=CheckpointConfig(period=1_000),
)

# Grids of cells, planes of bools, and dictionaries without images. Updates take several times as long as with vectors.
GRID = replace(
    VECTOR,
    # Where one wrong move ends the game, returns of more steps contain the wrong moves of exploration (ADR 53).
    actor=replace(VECTOR.actor, n_step=1),
    replay=ReplayConfig(capacity=100_000, min_size_to_sample=1_000, samples_per_insert=8.0, inserts_wait=True),
    learner=replace(VECTOR.learner, batch_size=64, learning_rate=1e-4),  # ADR 53
    network=NetworkConfig(hidden=128, body_hidden=64, width=0.5),  # ADR 54
)

# These values were tuned on CartPole-v1 and may be too aggressive for other environments.
CARTPOLE = replace(
    VECTOR,
    environment=EnvironmentConfig(id="CartPole-v1", clip_rewards=False),
    actor=replace(VECTOR.actor, num_actors=16, n_step=5),  # paper: n_step 3; larger here, because episodes are long
    # Limits the actors, because learning needs more samples, not more steps. Without this limit, actors would use the
    # CPU time that the learner needs.
    replay=replace(VECTOR.replay, samples_per_insert=16.0, inserts_wait=True),
    learner=replace(VECTOR.learner, learning_rate=3e-3, target_period=25),
    evaluator=replace(
        VECTOR.evaluator,
        # Short: two seconds after a policy solves the task, later updates have already replaced it.
        period_seconds=0.5,
        period_updates=250,
        episodes=10,
        num_envs=100,
    ),
    run=RunConfig(stop_score=475.0),  # the environment's own threshold; the maximum of an episode is 500
)

# R2D2 on few cores, for vectors, grids and dictionaries. Sequences are those of the paper; networks are small.
R2D2 = replace(
    VECTOR,
    algorithm="r2d2",
    environment=EnvironmentConfig(frame_stack=1, clip_rewards=False, life_loss_terminates=False),  # [R2D2]: all three
    actor=ActorConfig(
        num_actors=16,  # [R2D2]: 256
        n_step=5,  # [R2D2]
        gamma=0.997,  # [R2D2]
        segment_length=40,  # a sequence becomes complete every 40 steps
        parameters_period=20,  # [R2D2]: 400
    ),
    replay=ReplayConfig(
        capacity=10_000,  # sequences. [R2D2]: 100,000
        min_size_to_sample=100,  # sequences. [R2D2]: 50,000 transitions
        priority_exponent=0.9,  # [R2D2]
        samples_per_insert=16.0,  # [R2D2]: not limited
        inserts_wait=True,
    ),
    learner=replace(
        VECTOR.learner,
        batch_size=32,  # sequences. [R2D2]: 64
        importance_sampling_exponent=0.6,  # [R2D2]
        # [R2D2]: 2,500 updates, Adam with 1e-4 and epsilon 1e-3
        target_period=100,
    ),
    network=replace(VECTOR.network, value_rescaling=True),  # [R2D2]
    r2d2=R2d2Config(units=64),  # [R2D2]: 512
)

LUNARLANDER = replace(
    VECTOR,
    environment=EnvironmentConfig(id="LunarLander-v3", clip_rewards=False),
    actor=replace(VECTOR.actor, num_actors=16, segment_length=50, n_step=5),
    # A higher ratio is slower: with 16 a run took 1.5 times as long, and with 32 the task was not solved in 5 minutes.
    replay=ReplayConfig(capacity=200_000, min_size_to_sample=5_000, samples_per_insert=6.0, inserts_wait=True),
    learner=replace(VECTOR.learner, batch_size=256),
    # With twice the width, an update on one core takes 3 times as long and improves the policy less than twice as much.
    network=NetworkConfig(hidden=128, body_hidden=128),
    evaluator=replace(VECTOR.evaluator, period_seconds=10.0, num_envs=100),
    run=RunConfig(stop_score=200.0),  # the environment's own threshold
)

# Ape-X DPG of Horgan et al. 2018, section 4.2 and appendix D. Values that differ from the paper have a comment.
DPG = Config(
    environment=EnvironmentConfig(id="Pendulum-v1", clip_rewards=False),  # paper: DeepMind's control suite
    actor=ActorConfig(num_actors=64, n_step=5),
    replay=ReplayConfig(capacity=1_000_000),  # paper: prioritised eviction; here the oldest are replaced
    learner=LearnerConfig(
        batch_size=256,
        optimizer="adam",
        learning_rate=1e-4,
        optimizer_epsilon=1e-8,  # paper: not stated; the default of Adam
        target_period=100,
    ),
    evaluator=EvaluatorConfig(epsilon=0.0),
)

# Any environment with continuous actions, on few cores: the additions of TD3, normalized observations, and a different
# noise for each actor.
CONTROL = Config(
    environment=DPG.environment,
    actor=ActorConfig(num_actors=16, n_step=3, segment_length=25, parameters_period=20),
    replay=ReplayConfig(capacity=1_000_000, min_size_to_sample=5_000, samples_per_insert=64.0, inserts_wait=True),
    learner=replace(DPG.learner, learning_rate=1e-3, publish_period=5, publish_seconds=0.0),
    dpg=DpgConfig(
        policy_units=256,
        policy_units_2=256,
        critic_units=256,
        critic_units_2=256,
        first_activation="relu",
        num_critics=2,
        policy_period=2,
        action_gradient_clip=0.0,
        target_noise=0.2,
        noise=0.6,
        noise_ladder=0.1,
        normalize_observations=True,
    ),
    evaluator=VECTOR.evaluator,
    checkpoint=CheckpointConfig(period=1_000),
)

# The same with grids and other parts of observations, which are not normalized.
CONTROL_GRID = replace(
    CONTROL,
    replay=replace(CONTROL.replay, samples_per_insert=16.0),  # an update takes several times as long as with vectors
    learner=replace(CONTROL.learner, batch_size=128),
    dpg=replace(CONTROL.dpg, normalize_observations=False),
)

# The same with images: DrQ-v2 (Yarats et al. 2021) has three frames in a stack and shifts of 4 pixels too.
CONTROL_IMAGE = replace(
    CONTROL_GRID,
    environment=replace(CONTROL.environment, frame_stack=3),
    replay=ReplayConfig(capacity=100_000, min_size_to_sample=2_000, samples_per_insert=16.0, inserts_wait=True),
    learner=replace(CONTROL_GRID.learner, batch_size=64, learning_rate=5e-4, random_shift=4),
    evaluator=replace(VECTOR.evaluator, period_seconds=30.0, episodes=10, num_envs=10),
)

PENDULUM = replace(
    CONTROL,
    environment=replace(CONTROL.environment, reward_scale=0.1),
    replay=replace(CONTROL.replay, capacity=100_000, min_size_to_sample=1_000),
    learner=replace(CONTROL.learner, num_threads=1),  # the networks are too small to gain from a second thread
    dpg=replace(CONTROL.dpg, policy_units=64, policy_units_2=64, critic_units=64, critic_units_2=64),
    evaluator=replace(VECTOR.evaluator, num_envs=100),
    run=RunConfig(stop_score=-200.0),
)

LUNARLANDER_CONTINUOUS = replace(
    CONTROL,
    environment=replace(CONTROL.environment, id="LunarLanderContinuous-v3"),
    actor=replace(CONTROL.actor, n_step=5, segment_length=50),
    replay=replace(CONTROL.replay, capacity=200_000, samples_per_insert=6.0),  # as for the discrete one
    learner=replace(CONTROL.learner, batch_size=128, num_threads=1),
    dpg=replace(CONTROL.dpg, policy_units=128, policy_units_2=128, critic_units=128, critic_units_2=128),
    evaluator=replace(VECTOR.evaluator, period_seconds=10.0, num_envs=100),
    run=LUNARLANDER.run,
)

DEFAULT = "pong"

PRESETS: dict[str, Preset] = {
    "cartpole": Preset(CARTPOLE, "CartPole-v1, until solved, in less than a minute"),
    "lunarlander": Preset(LUNARLANDER, "LunarLander-v3, until solved"),
    "pong": Preset(PONG, "Atari Pong, sized for this machine (the default)"),
    "atari": Preset(ATARI, "any Atari game on a GPU: the paper's network and batch"),
    "btr": Preset(BTR, "any Atari game on a GPU: Beyond The Rainbow, with IQN"),
    "r2d2": Preset(R2D2, "tasks that need memory: a recurrent network, few cores"),
    "dpg": Preset(DPG, "continuous actions: the paper's values, 64 actors"),
    "control": Preset(CONTROL, "continuous actions on few cores: TD3's additions"),
    "paper": Preset(PAPER, "the paper's values, 360 actors"),
}


def preset(name: str | Config, **changes: Any) -> Config:
    """Returns the preset `name` with changes: `preset("pong", seed=2, learner={"batch_size": 64})`.

    A branch of the configuration is given as a dictionary of the settings to change; all others keep the values of the
    preset. A configuration, such as `Run.config`, is changed in the same way. Raises ConfigError for an unknown preset
    or setting and for a value out of range.
    """
    if isinstance(name, Config):
        return from_dict(changes, name)
    problem = f"the preset must be one of {', '.join(PRESETS)}, got {name!r}"
    require_setting(name in PRESETS, problem, did_you_mean(str(name), PRESETS))
    return from_dict(changes, PRESETS[name].config)


def preset_for(kind: EnvironmentKind, environment_id: str, *, gpu: Callable[[], bool]) -> Config:
    """Returns the configuration for an environment if the user chose no preset. `gpu()`: whether the learner has a GPU.

    Pong, CartPole-v1, LunarLander and Pendulum have configurations of their own. Other Atari games use ATARI with a
    GPU, else NARROW: two cores make one or two updates per second with ATARI, and 70 to 80 with NARROW. Other images
    use ATARI or IMAGE, grids GRID, and other vector environments VECTOR. With continuous actions, they use
    CONTROL_IMAGE, CONTROL_GRID and CONTROL. None of these has a stop score, because each environment has its own scale
    of scores.
    """
    name = environment_id.rpartition("/")[2]
    if kind == "continuous":
        own = {"Pendulum": PENDULUM, "LunarLanderContinuous": LUNARLANDER_CONTINUOUS}
        base = own.get(name.rpartition("-")[0], CONTROL)
    elif kind in ("continuous-image", "continuous-grid"):
        base = CONTROL_IMAGE if kind == "continuous-image" else CONTROL_GRID
    elif kind == "grid":
        base = GRID
    elif kind == "vector":  # CartPole-v0 ends episodes after 200 steps, so its score cannot reach 475.
        base = LUNARLANDER if name.startswith("LunarLander-") else CARTPOLE if name == "CartPole-v1" else VECTOR
    elif kind == "atari" and name.lower().startswith("pong"):
        base = PONG
    elif kind == "atari":
        base = ATARI if gpu() else NARROW
    else:
        base = replace(ATARI, environment=IMAGE.environment) if gpu() else IMAGE
    return replace(base, environment=replace(base.environment, id=environment_id))
