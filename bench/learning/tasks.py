"""The tasks: environment, options, bar and time limit."""

from typing import NamedTuple

# names in tables and plots
SYSTEMS = {
    "apex": "Ape-X over ZeroMQ",
    "sb3": "Stable-Baselines3 DQN",
    "sb3-ppo": "Stable-Baselines3 PPO",
    "sb3-sac": "Stable-Baselines3 SAC",
    "sb3-td3": "Stable-Baselines3 TD3",
}

# Options of apex train for ablations. Each changes one setting, or a few related ones, of the presets for games without
# a GPU.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "apex-uncentered": ("gradients as they are", ("--learner.no-centered-gradients",)),
    "apex-n-3": ("3-step targets", ("--actor.n-step", "3")),
    "apex-no-shift": ("images as they are", ("--learner.random-shift", "0")),
    "apex-munchausen": ("Munchausen targets", ("--learner.target", "munchausen")),
    "apex-rescaled": (
        "value rescaling, raw rewards, gamma 0.997, lives ignored",
        (
            *("--network.value-rescaling", "--environment.no-clip-rewards", "--environment.no-life-loss-terminates"),
            *("--actor.gamma", "0.997"),
        ),
    ),
}
# Each removes one addition of the preset control to the paper's DPG.
CONTROL_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "apex-one-critic": ("one critic", ("--dpg.num-critics", "1")),
    "apex-exact-targets": ("no noise on target actions", ("--dpg.target-noise", "0")),
    "apex-every-policy": ("a policy update in every update", ("--dpg.policy-period", "1")),
    "apex-raw-observations": ("observations as they are", ("--dpg.no-normalize-observations",)),
    "apex-equal-noise": ("noise 0.3 for every actor", ("--dpg.noise", "0.3", "--dpg.noise-ladder", "1")),
    "apex-raw-rewards": ("rewards as they are", ("--environment.reward-scale", "1")),
}
VARIANTS |= CONTROL_VARIANTS
# For the GPU's tasks: what Atari on two cores without a GPU has shown to help, without which its presets were made.
VARIANTS["apex-live"] = (
    "settings from two cores",
    (
        *("--learner.centered-gradients", "--network.initialization", "balanced"),
        *("--learner.learning-rate-warmup", "2000", "--actor.n-step", "5"),
    ),
)
# Other algorithms with the same presets. They are compared with the peers as `apex` is.
ALGORITHMS = {
    "apex-sac": ("SAC", ("--algorithm", "sac")),
    "apex-iqn": ("IQN", ("--algorithm", "iqn")),
}
VARIANTS |= ALGORITHMS
SYSTEMS |= {name: f"{SYSTEMS['apex']}, {label}" for name, (label, _) in VARIANTS.items()}


class LearningTask(NamedTuple):
    """One task on one kind of machine (2 cores and no GPU, or 16 and one), for every system."""

    environment: str
    options: tuple[str, ...]  # options of apex train, beside the seed and the time limit
    episodes: int  # full games whose mean is the score
    bar: float | None  # mean score to reach in `limit_seconds`; None: no bar, or to be above every other system
    limit_seconds: float  # from the start of the command to its exit
    minutes: float  # after which the run is ended; longer than the limit if the bar is hard to reach
    num_seeds: int  # seeds that must all reach the bar; 0: only a curve, no claim
    equal_steps: int = 0  # steps after which scores are compared too; 0: only at the end
    equal_minutes: float = 0.0  # minutes after which scores are compared too; 0: only at the end
    peer_seeds: int = 0  # seeds that the strongest other system needs; 0: `num_seeds`
    final_only: bool = False  # whether the score is that of the policy at the end, and no other policy is scored

    @property
    def game(self) -> str:
        """Returns the usual name of the environment: Pong for ALE/Pong-v5, otherwise the id."""
        space, _, rest = self.environment.rpartition("/")
        if space == "MinAtar":
            return f"MinAtar {rest.removesuffix('-v1')}"
        return rest.removesuffix("-v5") if space else rest

    @property
    def is_ablation(self) -> bool:
        """Returns whether every run ends after the same number of updates."""
        return "--max-updates" in self.options

    @property
    def name(self) -> str:
        """Returns the game; for a curve also the preset or the number of updates; and whether the machine has a GPU."""
        gpu = ", GPU" if "cuda" in self.options else ""
        if self.is_ablation:
            return f"{self.game}, {int(self.options[self.options.index('--max-updates') + 1]):,} updates"
        if self.num_seeds or self.final_only:
            return self.game + gpu
        preset = self.options[self.options.index("--preset") + 1]
        return f"{self.game}, preset {preset}{gpu}"

    def reached(self, score: float, seconds: float) -> bool | None:
        """Returns whether one run reached the bar; None if the task has no bar for a single run."""
        return None if self.bar is None else score >= self.bar and seconds <= self.limit_seconds


# Atari-5 (Aitchison et al. 2023), games that no setting was tuned on, by task. Sticky actions, all actions, no
# information about lives and at most 5 minutes of play: Machado et al. 2018.
UNTUNED = {
    "battle-zone": "BattleZone",
    "double-dunk": "DoubleDunk",
    "name-this-game": "NameThisGame",
    "phoenix": "Phoenix",
    "qbert": "Qbert",
}
_UNTUNED_OPTIONS = (
    *("--environment.sticky-actions", "0.25", "--environment.full-action-space"),
    *("--environment.no-life-loss-terminates", "--environment.no-fire-after-life-loss"),
    *("--environment.max-episode-frames", "18000"),
)
# Fixed before the first run. A seed is run for every game before the next seed, so that an unfinished table is fair.
UNTUNED_RUNS = [
    (task, system, 200 + number)
    for number in (1, 2, 3)
    for task in UNTUNED
    for system in (("apex", "sb3-ppo", "sb3") if number < 3 else ("apex",))
]
_GPU = ("--device", "cuda")
_CURVE = (10, None, 420.0, 7.0, 0)

# Atari games on 10 x 10 planes (Young and Tian 2019).
_MINATAR = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")

TASKS = {
    **{
        task: LearningTask(
            f"ALE/{game}-v5",
            ("--env", f"ALE/{game}-v5", *_UNTUNED_OPTIONS),
            100,
            None,
            1_140.0,
            19.0,
            0,
            final_only=True,
        )
        for task, game in UNTUNED.items()
    },
    # Training ends at a score above the bar, because the bar must hold for new games: for CartPole, fifty games had the
    # mean 499.6 and the next hundred 456.9; for LunarLander, the means of two hundreds of games differ by 15; for Pong,
    # one lost game of ten costs 4 points.
    "cartpole": LearningTask("CartPole-v1", ("--preset", "cartpole", "--stop-score", "485"), 100, 475.0, 20.0, 3.0, 3),
    "lunarlander": LearningTask(
        "LunarLander-v3", ("--preset", "lunarlander", "--stop-score", "215"), 100, 200.0, 120.0, 10.0, 3
    ),
    "pendulum": LearningTask(
        "Pendulum-v1", ("--env", "Pendulum-v1", "--stop-score", "-180"), 100, -200.0, 60.0, 5.0, 5
    ),
    "lunarlander-continuous": LearningTask(
        "LunarLanderContinuous-v3",
        ("--env", "LunarLanderContinuous-v3", "--stop-score", "215"),
        100,
        200.0,
        240.0,
        8.0,
        3,
    ),
    # The memory of these two is a recurrent network; without it, the first one has the score 0.
    "cue": LearningTask(
        "examples.memory:make_cue",
        ("--preset", "r2d2", "--env", "examples.memory:make_cue", "--stop-score", "0.95"),
        100,
        0.9,
        300.0,
        6.0,
        3,
    ),
    "cartpole-positions": LearningTask(
        "examples.memory:make_cartpole",
        ("--preset", "r2d2", "--env", "examples.memory:make_cartpole", "--stop-score", "460"),
        100,
        450.0,
        360.0,
        8.0,
        3,
    ),
    # The peers have no bar either: each of our seeds must be above each of theirs after the same time.
    "halfcheetah": LearningTask("HalfCheetah-v5", ("--env", "HalfCheetah-v5"), 30, None, 1_200.0, 20.0, 3),
    "hopper": LearningTask("Hopper-v5", ("--env", "Hopper-v5"), 30, None, 1_200.0, 20.0, 2),
    # An Atari game has 30 starts; 100 games are expected to show 29 of them.
    "pong": LearningTask("ALE/Pong-v5", ("--preset", "pong", "--stop-score", "18.5"), 100, 18.0, 840.0, 30.0, 5),
    "breakout": LearningTask(
        "ALE/Breakout-v5", ("--env", "ALE/Breakout-v5"), 100, None, 3_600.0, 60.0, 3, 300_000, 20.0, 2
    ),
    "space-invaders": LearningTask(
        "ALE/SpaceInvaders-v5", ("--env", "ALE/SpaceInvaders-v5"), 100, None, 1_200.0, 20.0, 3, 100_000, peer_seeds=2
    ),
    "seaquest": LearningTask(
        "ALE/Seaquest-v5", ("--env", "ALE/Seaquest-v5"), 100, None, 1_200.0, 20.0, 3, peer_seeds=2
    ),
    **{
        f"minatar-{game.lower()}": LearningTask(
            f"MinAtar/{game}-v1", ("--env", f"MinAtar/{game}-v1"), 100, None, 600.0, 10.0, 2
        )
        for game in _MINATAR
    },
    # settings of the presets for larger machines
    "atari": LearningTask(
        "ALE/Breakout-v5", ("--preset", "atari", "--env", "ALE/Breakout-v5"), 10, None, 600.0, 10.0, 0
    ),
    "paper": LearningTask("ALE/Pong-v5", ("--preset", "paper"), 10, None, 600.0, 10.0, 0),
    "cartpole-swingup": LearningTask(
        "dm_control/cartpole-swingup-v0",
        ("--preset", "control", "--env", "dm_control/cartpole-swingup-v0"),
        30,
        None,
        1_200.0,
        20.0,
        0,
    ),
    "minigrid-empty": LearningTask(
        "minigrid:MiniGrid-Empty-8x8-v0",
        ("--env", "minigrid:MiniGrid-Empty-8x8-v0", "--stop-score", "0.93"),
        100,
        0.9,
        180.0,
        3.0,
        3,
    ),
    # Goals of one seed each.
    "cartpole-swingup-pixels": LearningTask(
        "examples.pixels:make_swingup",
        ("--env", "examples.pixels:make_swingup"),
        30,
        400.0,
        1_200.0,
        18.0,  # The evaluation of the final policy follows.
        1,
    ),
    "minigrid-doorkey": LearningTask(
        "minigrid:MiniGrid-DoorKey-6x6-v0",
        ("--env", "minigrid:MiniGrid-DoorKey-6x6-v0", "--stop-score", "0.93"),
        100,
        0.9,
        900.0,
        15.0,
        1,
    ),
    # Ablations: every variant has the same number of updates.
    "pong-updates": LearningTask(
        "ALE/Pong-v5", ("--preset", "pong", "--stop-score", "none", "--max-updates", "16000"), 30, None, 900.0, 15.0, 0
    ),
    "breakout-updates": LearningTask(
        "ALE/Breakout-v5", ("--env", "ALE/Breakout-v5", "--max-updates", "16000"), 30, None, 900.0, 15.0, 0
    ),
    # With 16 cores and a GPU; run by `bench/gpu.sh learn`.
    "pong-gpu": LearningTask("ALE/Pong-v5", (*_GPU, "--preset", "pong", "--stop-score", "18"), 10, 18.0, 480.0, 8.0, 2),
    "breakout-gpu": LearningTask("ALE/Breakout-v5", (*_GPU, "--preset", "atari", "--env", "ALE/Breakout-v5"), *_CURVE),
    "seaquest-gpu": LearningTask("ALE/Seaquest-v5", (*_GPU, "--preset", "atari", "--env", "ALE/Seaquest-v5"), *_CURVE),
    "qbert-gpu": LearningTask("ALE/Qbert-v5", (*_GPU, "--preset", "atari", "--env", "ALE/Qbert-v5"), *_CURVE),
}
