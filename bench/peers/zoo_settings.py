"""The settings of Stable-Baselines3's zoo by algorithm and environment, and the times of evaluations."""

from typing import Any, NamedTuple

GRID_TORSO = "3 x 3 convolution with 16 channels, hidden layer with 128 units"  # stands for `grid_torso`


class Evaluations(NamedTuple):
    """When and how full games are played, and how many; docs/learning.md lists the differences to ours."""

    period_seconds: float
    episodes: int
    confirm_episodes: int  # games that alone decide whether the stop score was reached
    num_envs: int
    epsilon: float  # epsilon of the evaluated policy


class Task(NamedTuple):
    """What is trained, and with which settings."""

    settings: dict[str, Any]  # arguments of the algorithm's class in stable_baselines3
    num_steps: int  # n_timesteps of the zoo, of which exploration is annealed over a fraction
    evaluations: Evaluations
    is_atari: bool = False
    num_envs: int = 1  # n_envs of the zoo
    is_sampled: bool = False  # whether evaluated actions are drawn from the policy, as the zoo does for Atari
    noise: float = 0.0  # standard deviation of the normal noise on actions: noise_std of the zoo
    is_fitted: bool = False  # Schedules end with the time limit.
    is_untuned: bool = False  # Atari: UNTUNED_OPTIONS, no information about lives


# All numbers are from rl_zoo3 2.9.2 (the release of stable-baselines3 2.9.2), hyperparams/dqn.yml, section "atari".
ATARI = Task(
    settings={
        "policy": "CnnPolicy",
        "buffer_size": 100_000,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "learning_starts": 100_000,
        "target_update_interval": 1_000,
        "train_freq": 4,
        "gradient_steps": 1,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.01,
        "optimize_memory_usage": False,
    },
    num_steps=10_000_000,
    # Games of Pong and Breakout never end if the policy does nothing, so some actions are random.
    evaluations=Evaluations(period_seconds=120.0, episodes=2, confirm_episodes=10, num_envs=2, epsilon=0.001),
    is_atari=True,
)
_DQN = {
    # The same file, section "CartPole-v1" ("almost tuned").
    "CartPole-v1": Task(
        settings={
            "policy": "MlpPolicy",
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
        num_steps=50_000,
        evaluations=Evaluations(period_seconds=2.0, episodes=20, confirm_episodes=100, num_envs=20, epsilon=0.0),
    ),
    # The same file, section "LunarLander-v3" ("tuned").
    "LunarLander-v3": Task(
        settings={
            "policy": "MlpPolicy",
            "learning_rate": 6.3e-4,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 0,
            "gamma": 0.99,
            "target_update_interval": 250,
            "train_freq": 4,
            "gradient_steps": -1,  # as many gradient steps as environment steps
            "exploration_fraction": 0.12,
            "exploration_final_eps": 0.1,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
        num_steps=100_000,
        evaluations=Evaluations(period_seconds=10.0, episodes=20, confirm_episodes=100, num_envs=10, epsilon=0.0),
    ),
}
# rl_zoo3 2.9.2, hyperparams/sac.yml and hyperparams/td3.yml, section "HalfCheetah-v4", which "Hopper-v4" refers to.
_MUJOCO_EVALUATIONS = Evaluations(period_seconds=30.0, episodes=10, confirm_episodes=30, num_envs=10, epsilon=0.0)
SAC = Task(
    settings={"policy": "MlpPolicy", "learning_starts": 10_000},
    num_steps=1_000_000,
    evaluations=_MUJOCO_EVALUATIONS,
)
TD3 = Task(
    settings={
        "policy": "MlpPolicy",
        "learning_starts": 10_000,
        "train_freq": 1,
        "gradient_steps": 1,
        "learning_rate": 1e-3,
        "batch_size": 256,
        "policy_kwargs": {"net_arch": [400, 300]},
    },
    num_steps=1_000_000,
    evaluations=_MUJOCO_EVALUATIONS,
    noise=0.1,
)
# rl_zoo3 2.9.2, hyperparams/ppo.yml, section "atari". As there, "lin_X" decreases linearly from X to 0 over
# `num_steps`.
PPO_ATARI = Task(
    settings={
        "policy": "CnnPolicy",
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 256,
        "learning_rate": "lin_2.5e-4",
        "clip_range": "lin_0.1",
        "vf_coef": 0.5,
        "ent_coef": 0.01,
    },
    num_steps=10_000_000,
    evaluations=ATARI.evaluations,
    is_atari=True,
    num_envs=8,
    is_sampled=True,
)
_ATARI_GAMES = ("ALE/Pong-v5", "ALE/Breakout-v5", "ALE/SpaceInvaders-v5", "ALE/Seaquest-v5")
# The same with schedules for the time that they get: exploration and learning rate as shares of the run instead of
# 10 million steps, and DQN learns after 10,000 steps, 5 % of what it makes in 19 minutes on two cores.
_UNTUNED_GAMES = ("ALE/BattleZone-v5", "ALE/DoubleDunk-v5", "ALE/NameThisGame-v5", "ALE/Phoenix-v5", "ALE/Qbert-v5")
_DQN_FITTED = ATARI._replace(settings=ATARI.settings | {"learning_starts": 10_000}, is_fitted=True, is_untuned=True)
_PPO_FITTED = PPO_ATARI._replace(is_fitted=True, is_untuned=True)
# The zoo has no settings for MinAtar. Replay and target are those of Young and Tian 2019 and of Atari above, with the
# network of their DQN (`GRID_TORSO`); optimizer and rate are those of Obando-Ceron and Castro 2021. Exploration is that
# of the Atari games above, in shares of the run.
MINATAR = Task(
    settings=ATARI.settings
    | {
        "learning_rate": 2.5e-4,
        "learning_starts": 5_000,
        "policy_kwargs": {
            "features_extractor_class": GRID_TORSO,
            "net_arch": [],  # one linear layer to the Q-values
            "optimizer_kwargs": {"eps": 3.125e-4},
        },
    },
    num_steps=ATARI.num_steps,
    evaluations=Evaluations(period_seconds=30.0, episodes=10, confirm_episodes=10, num_envs=10, epsilon=0.001),
    is_fitted=True,
)
_MINATAR_GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
TASKS = {
    "dqn": _DQN
    | dict.fromkeys(_ATARI_GAMES, ATARI)
    | dict.fromkeys(_UNTUNED_GAMES, _DQN_FITTED)
    | {f"MinAtar/{game}-v1": MINATAR for game in _MINATAR_GAMES},
    "ppo": dict.fromkeys(_ATARI_GAMES, PPO_ATARI) | dict.fromkeys(_UNTUNED_GAMES, _PPO_FITTED),
    "sac": {"HalfCheetah-v5": SAC, "Hopper-v5": SAC},
    "td3": {"HalfCheetah-v5": TD3, "Hopper-v5": TD3},
}
# As in apex/config: no sticky actions, the minimal action set, 30 minutes at most.
# The defaults of AtariWrapper add the rest: 30 no-ops, 4 frames per step, 84 x 84, life loss, clipping.
ATARI_OPTIONS = {
    "frameskip": 1,
    "repeat_action_probability": 0.0,
    "full_action_space": False,
    "max_num_frames_per_episode": 108_000,
}
UNTUNED_OPTIONS = ATARI_OPTIONS | {
    "repeat_action_probability": 0.25,
    "full_action_space": True,
    "max_num_frames_per_episode": 18_000,
}
